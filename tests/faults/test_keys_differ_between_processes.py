"""Block keys are the same in every process, whatever the seed of Python's own hash."""

import os
import subprocess
import sys

import pytest

from sessionkv.cache.chain import TokenChain
from tests.builders.kv_world import ROOT, B, T

SCRIPT = """
from sessionkv.cache.chain import TokenChain
for tenant in ("", "é"):
    chain = TokenChain({root!r}, {size}, tenant=tenant, token_ids={tokens})
    print(*[key.hex() for key in chain.hashes], chain.tail_record(14).key.hex())
"""


def keys_here() -> list[str]:
    lines = []
    for tenant in ("", "é"):
        chain = TokenChain(ROOT, B, tenant=tenant, token_ids=T(14))
        tail = chain.tail_record(14)
        assert tail is not None
        lines.append(" ".join([*(key.hex() for key in chain.hashes), tail.key.hex()]))
    return lines


@pytest.mark.parametrize("seed", [None, "0", "1"])
def test_another_process_computes_the_same_keys(seed: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environ["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=bytes(ROOT), size=B, tokens=T(14))],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == keys_here()
