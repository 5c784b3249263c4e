"""A real disk that fills up under a running engine, by its own blocks and by somebody else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.builders.small_disk import run_on_small_disk

PROGRAM = """
import json, logging, time
from sessionkv.errors import StoreUnavailable
from tests.builders.engine import engine_config, greedy, open_engine, oracle
from sessionkv.store.block_store import BlockStore

later_s = 0.0
BlockStore.__init__.__kwdefaults__["clock"] = lambda: time.monotonic() + later_s
REPLY = greedy(3)
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
logging.getLogger().addHandler(Keep(logging.WARNING))
logs = {}
refused = 0


def turn(engine, name, length=20):
    global refused
    log = logs.get(name, [])
    prompt = [*log, *((len(log) + 7 * int(name[1:]) + 5 * i) % 200 for i in range(length))]
    try:
        reply = engine.open(name).turn(tokens=prompt[len(log):], sampling=REPLY)
    except StoreUnavailable:
        refused += 1
        return False
    assert list(reply.tokens) == oracle(prompt, REPLY)
    logs[name] = [*prompt, *reply.tokens]
    return True


def all_there(engine):
    found = {info.name: info.tokens for info in engine.sessions() if info.tokens}
    assert found == {name: len(log) for name, log in logs.items()}, (found, logs)


config = engine_config(FOLDER / "store", blocks=64, host_blocks=8, disk_bytes=2**26)
with open_engine(config) as engine:
    for i in range(40):
        turn(engine, f"s{i % 20}", 60)
    engine.flush()
    full = engine.stats()["store"]["blocks"]
    refused_by_own_blocks = refused
    fill_up()
    for i in range(120):
        turn(engine, f"s{i % 20}", 5)
    all_there(engine)
    engine.flush()
    filled = engine.stats()["store"]
    refused_when_filled = refused
    said_while_full = list(records)
    give_room()
    later_s = 60.0
    for i in range(20):
        assert turn(engine, f"s{i}", 2)
    engine.flush()
    tries = 0
    while not (freed := engine.stats()["store"]["blocks"])["enabled"]:
        later_s += 60.0  # the next time that it is tried
        assert turn(engine, f"s{tries % 20}", 2)
        engine.flush()
        tries += 1
    all_there(engine)
with open_engine(config) as engine:
    all_there(engine)
    for i in range(20):
        turn(engine, f"s{i}", 2)
print(json.dumps({
    "evicted": full["evicted_blocks"],
    "full": full["enabled"],
    "filled": filled["blocks"]["enabled"],
    "freed": freed["enabled"],
    "refused": [refused_by_own_blocks, refused_when_filled, refused],
    "while_full": said_while_full,
    "log": records,
}))
"""


def test_conversations_go_on_and_blocks_make_room(tmp_path: Path) -> None:
    done = run_on_small_disk(tmp_path / "disk", 4 * 2**20, PROGRAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["refused"] == [0, 0, 0]
    assert found["full"] is True
    assert found["evicted"] > 0
    assert found["freed"] is True
    assert sum("takes no blocks" in line for line in found["while_full"]) <= 1, found["while_full"]
    # Over both phases it is said once each time the tier goes off: between two is its return.
    words = [line for line in found["log"] if line.startswith("the disk tier")]
    went_off = ["takes no blocks" in line for line in words]
    assert went_off == [i % 2 == 0 for i in range(len(went_off))], words
