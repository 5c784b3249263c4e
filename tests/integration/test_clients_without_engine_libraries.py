"""The clients where only msgpack and pyzmq are installed, and what importing them loads."""

from __future__ import annotations

import subprocess
import sys

from tests.builders.fake_engine import FakeEngine, short_endpoint

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    absent = {"torch", "triton", "transformers", "lmdb", "tokenizers", "jinja2", "safetensors",
              "numpy", "xxhash", "gguf", "accelerate", "rich"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
USE = (
    BLOCK
    + """
import asyncio
from sessionkv import AsyncClient, Client, SamplingParams, launch
with Client(sys.argv[1]) as client:
    session = client.open("trip", system="s")
    print(session.turn("hello", sampling=SamplingParams(temperature=0.0)).text)
    print("".join(event.text for event in session.stream("abc")))

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        print((await client.generate(prompt="async")).text)

asyncio.run(main())
"""
)
LOADED = """
import sys
import sessionkv
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
sessionkv.Client
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


def run(code: str, *args: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_both_clients_work_with_nothing_but_msgpack_and_pyzmq():
    with short_endpoint() as endpoint, FakeEngine(endpoint):
        assert run(USE, endpoint) == ["hello", "abc", "async"]


def test_importing_the_package_loads_no_engine_library_and_a_blocking_client_no_asyncio():
    heavy = ["torch", "transformers", "lmdb", "tokenizers", "numpy", "zmq", "asyncio"]
    assert run(LOADED, *heavy) == ["[]", "[]"]
