"""Stores that are harmed behind their backs, again and again, and what they serve then.

Whatever was done to the files, a store opens, hands on no byte that it was not given for that very
block, forgets what it cannot vouch for and counts it, and takes all of it anew. The trials run in a
process of their own, whose end by a signal is a failure like any other.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from sessionkv.errors import SessionDamaged
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import BlockRecord, MoveOutcome
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle
from tests.builders.harm import HARMS, NEED_SEGMENTS, Files, Scene, read_files, write_files
from tests.builders.store import IDENTITY, chain, geometry, payload, query

BLOCK = 4096
SLOT = 4096 + BLOCK
CAP = 2**24
CHAINS = [[i, i, 0, 1, 2, i, 3, 4, *range(i, i + 9)] for i in range(5)]
CHAINS += [[*CHAINS[0][:8], 9, 9, 9, 9, 7]]  # a branch
RECORDS = [chain(tokens) for tokens in CHAINS]
QUERIES = [query([*tokens, 7, 7]) for tokens in CHAINS]
PAYLOADS = {record.key: payload(record, BLOCK) for records in RECORDS for record in records}
ALL_BLOCKS = sum(map(len, RECORDS))

_TRIAL_S = 120
_context = multiprocessing.get_context("forkserver")


@dataclass
class Outcome:
    """What trials came to.

    Attributes:
        trials: By kind of harm.
        served: Blocks handed on, all of them right.
        bad: Blocks found bad and removed.
        absent: Blocks that were no longer found.
        harmless: Trials after which all was served all the same.
    """

    trials: Counter[str] = field(default_factory=Counter)
    served: int = 0
    bad: int = 0
    absent: int = 0
    harmless: int = 0

    def add(self, other: Outcome) -> None:
        self.trials += other.trials
        self.served += other.served
        self.bad += other.bad
        self.absent += other.absent
        self.harmless += other.harmless


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is not the disk."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="skv-integrity-", dir=where) as folder:
        yield Path(folder)


def harm_store(trials: int, *, seed: int) -> Outcome:
    """So many trials of a block store.

    Raises:
        AssertionError: Something wrong was served, not counted or not taken anew; or the process
            ended by a signal. Names the trial.
    """
    return _in_process(_store_trials, trials, seed)


def harm_engine(trials: int, *, seed: int) -> Outcome:
    """The same of the blocks below whole engines: every answer is that of a cold one."""
    return _in_process(_engine_trials, trials, seed)


def harm_journal(trials: int, *, seed: int) -> Outcome:
    """The same of journals: a session that is there has a history that it once had."""
    return _in_process(_journal_trials, trials, seed)


_Trials = Callable[[Path, int, int], Iterator[tuple[str, Outcome]]]


def _in_process(work: _Trials, trials: int, seed: int) -> Outcome:
    line, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_report, args=(work, trials, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    total, doing = Outcome(), "before the first trial"
    try:
        while True:
            assert line.poll(_TRIAL_S), f"nothing happened for {_TRIAL_S} s: {doing}"
            try:
                said = line.recv()
            except EOFError:
                process.join()
                assert process.exitcode == 0, f"ended with {process.exitcode}: {doing}"
                return total
            if isinstance(said, Outcome):
                total.add(said)
            else:
                doing = said
    finally:
        process.kill()
        process.join()
        process.close()
        line.close()


def _report(work: _Trials, trials: int, seed: int, line: Connection) -> None:
    """The process: tells what it is about to do, and what that came to."""
    logging.disable()  # each trial would have something to say
    doing = "before the first trial"
    try:
        with fast_folder() as folder:
            for what, outcome in work(folder, trials, seed):
                doing = what or doing
                line.send(outcome if outcome.trials else what)
    except BaseException:  # noqa: BLE001 - passed to the parent
        line.send(f"{doing}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None


def _harmed(
    whole: Mapping[str, bytes], earlier: Mapping[str, bytes], seed: str
) -> tuple[str, str, Files]:
    """Kind of harm, what was done, and the files after it."""
    rng = random.Random(seed)
    files: Files = {name: bytearray(data) for name, data in whole.items()}
    scene = Scene(files, earlier, SLOT)
    kind = rng.choice(sorted(HARMS.keys() - (() if scene.segments() else NEED_SEGMENTS)))
    what = HARMS[kind](rng, scene)
    return kind, f"trial {seed}, {kind}: {what}", files


# -- block stores


@contextmanager
def _open_store(path: Path) -> Iterator[BlockStore]:
    with StoreDirectory.open(path) as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
        yield store
        assert store.stats().used_bytes == disk_bytes(directory.blocks_path) <= CAP
        store.close()


def _write_all(store: BlockStore, chains: list[list[BlockRecord]]) -> None:
    records = {record.key: record for records in chains for record in records}
    outcomes = store.write_many([(r, memoryview(_payload(r))) for r in records.values()])
    assert set(outcomes) == {MoveOutcome.OK} or not store.enabled, outcomes


def _take_anew(store: BlockStore) -> int:
    """Write everything until nothing bad is found; how many were, on the way."""
    found_bad = 0
    # A bad block counts as stored until somebody asks for it, and is not asked for before those
    # above it are there.
    for _ in range(len(CHAINS[0])):
        _write_all(store, RECORDS)
        _, bad, _ = again = _served(store)
        found_bad += bad
        if not bad:
            break
    # One that has found its index damaged takes nothing until it starts anew.
    assert _full_blocks_are_there(store) or not store.enabled, (
        f"what was lost is not taken anew: {again}"
    )
    return found_bad


def _served(store: BlockStore) -> tuple[int, int, int]:
    """Blocks handed on, bad, and not found; every one handed on is compared."""
    served = bad = absent = 0
    for records, asked in zip(RECORDS, QUERIES, strict=True):
        right = {record.key: record for record in records}
        receipt = store.lookup(asked)
        found = [*receipt.blocks, *([receipt.tail] if receipt.tail else [])]
        for block in found:
            into = bytearray(BLOCK)
            outcome = store.read(block, memoryview(into))
            if outcome is MoveOutcome.OK:
                assert into == _payload(block.record), "wrong bytes were served"
                assert _fits(block.record, right), "a block of another history was served"
                served += 1
            else:
                assert outcome in (MoveOutcome.CORRUPT, MoveOutcome.MISSING), outcome
                bad += 1
        absent += len(right) - len(found)
        store.release(receipt.receipt_id)
    return served, bad, absent


def _payload(record: BlockRecord) -> bytearray:
    return PAYLOADS.get(record.key) or payload(record, BLOCK)


def _full_blocks_are_there(store: BlockStore) -> bool:
    """Whether each chain is found whole, but for a tail that the index may not name as a child."""
    for records, asked in zip(RECORDS, QUERIES, strict=True):
        receipt = store.lookup(asked)
        store.release(receipt.receipt_id)
        if [block.record for block in receipt.blocks] != [r for r in records if r.fill == 4]:
            return False
    return True


def _fits(record: BlockRecord, right: Mapping[bytes, BlockRecord]) -> bool:
    """Whether it belongs to the chain, as one of its blocks or one that shares its first tokens."""
    if record.key in right:
        return right[record.key] == record
    parents = {known.parent: known for known in right.values()}
    sibling = parents.get(record.parent)
    return sibling is not None and sibling.token_ids[0] == record.token_ids[0]


def _store_trials(folder: Path, trials: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    path = folder / "store"
    others = [chain([90 + i] * 16) for i in range(7)]
    with _open_store(path) as store:
        # An earlier time: other blocks in the same slots, and tails that have grown since.
        _write_all(store, [*others, *(chain(tokens[:9]) for tokens in CHAINS)])
    earlier = read_files(path, "blocks/**/*")
    with _open_store(path) as store:
        store.delete([record.key for records in others for record in records])
        _write_all(store, RECORDS)
        everything = _served(store)
        assert everything == (ALL_BLOCKS, 0, 0)
    whole = read_files(path, "blocks/**/*")
    for number in range(trials):
        kind, what, files = _harmed(whole, earlier, f"{seed}/{number}")
        shutil.rmtree(path / "blocks")
        write_files(path, files)
        yield what, Outcome()
        with _open_store(path) as store:
            served, bad, absent = _served(store)
            stats = store.stats()
            assert stats.corrupt_blocks + stats.missing_blocks == bad
            served_then, bad_then, _ = _served(store)
            assert bad_then == 0, "what was found bad is found again"
            assert served_then <= served
            bad += _take_anew(store)
            was_damaged = not store.enabled
        if was_damaged:
            with _open_store(path) as store:
                _take_anew(store)
                assert store.enabled
        harmless = served == everything[0]
        yield "", Outcome(Counter({kind: 1}), served, bad, absent, harmless)


# -- whole engines

_TURNS = [[(7 * i + 3 * j) % 90 + 5 for i in range(11)] for j in range(3)]
_REPLY = greedy(5)
_NAMES = [f"s{i}" for i in range(5)]


def _talk(engine: CheckedEngine, name: str, turn: list[int], log: list[int]) -> None:
    """One turn, compared with a cold engine's; ``log`` grows by it."""
    prompt = [*log, *turn]
    want = oracle(prompt, _REPLY)
    assert list(engine.session(name).turn(tokens=turn, sampling=_REPLY).tokens) == want
    log[:] = [*prompt, *want]


def _build_sessions(path: Path) -> tuple[dict[str, list[list[int]]], dict[str, bytes]]:
    """Every history that each session had, oldest first; the files half-way."""
    histories: dict[str, list[list[int]]] = {name: [[]] for name in _NAMES}
    earlier: dict[str, bytes] = {}
    for turn in _TURNS:
        with open_engine(engine_config(path, blocks=64, disk_bytes=CAP)) as engine:
            for i, name in enumerate(_NAMES):
                engine.open(name)
                log = list(histories[name][-1])
                _talk(engine, name, [i, *turn], log)
                histories[name].append(log)
            engine.flush()
        earlier = earlier or read_files(path, "**/*")
    return histories, earlier


def _engine_trials(folder: Path, trials: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    path = folder / "store"
    histories, earlier = _build_sessions(path)
    whole = read_files(path, "**/*")
    blocks = {name: data for name, data in whole.items() if name.startswith("blocks")}
    before = {name: data for name, data in earlier.items() if name.startswith("blocks")}
    for number in range(trials):
        kind, what, files = _harmed(blocks, before, f"{seed}/{number}")
        shutil.rmtree(path)
        write_files(path, {n: d for n, d in whole.items() if n not in blocks} | files)
        yield what, Outcome()
        with open_engine(engine_config(path, blocks=64, disk_bytes=CAP)) as engine:
            assert [info.name for info in engine.sessions()] == _NAMES
            for name in _NAMES:
                _talk(engine, name, [3, 1, 4], list(histories[name][-1]))
            engine.assert_ledger()
            stats = engine.stats()
        tiers = stats["prefix_cache"]
        bad = (
            stats["store"]["blocks"]["corrupt_blocks"] + stats["store"]["blocks"]["missing_blocks"]
        )
        yield "", Outcome(Counter({kind: 1}), tiers["disk_tokens"], bad, 0, bad == 0)


def _journal_trials(folder: Path, trials: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    path = folder / "store"
    histories, earlier = _build_sessions(path)
    whole = read_files(path, "**/*")
    journal = {name: data for name, data in whole.items() if name.startswith("journal")}
    before = {name: data for name, data in earlier.items() if name.startswith("journal")}
    ends = {name: {len(log): log for log in logs} for name, logs in histories.items()}
    for number in range(trials):
        kind, what, files = _harmed(journal, before, f"{seed}/{number}")
        shutil.rmtree(path)
        write_files(path, {n: d for n, d in whole.items() if n not in journal} | files)
        yield what, Outcome()
        current = 0
        with open_engine(engine_config(path, blocks=64, disk_bytes=CAP)) as engine:
            infos = list(engine.sessions())
            for info in infos:
                log = list(ends[info.name][info.tokens])
                is_current = log == histories[info.name][-1]
                with suppress(SessionDamaged):  # a turn of it cannot be read, and it says so
                    _talk(engine, info.name, [3, 1, 4], log)
                    current += is_current
            engine.open("new").turn(tokens=[1, 2], sampling=_REPLY)
            engine.assert_ledger()
        lost = len(_NAMES) - current
        yield "", Outcome(Counter({kind: 1}), current, 0, lost, lost == 0)
