"""``sessionkv sessions export`` and ``import``: sessions into a file, and out of one.

The log goes through the socket of a running engine, or, with ``--store`` or ``--kv``, straight from
and to the store of a stopped one. KV is in a store and nowhere else. A file is read through and
checked before anything of it is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from sessionkv.cli import output
from sessionkv.cli.connect import connect
from sessionkv.cli.files import STDIO, new_file, old_file
from sessionkv.cli.progress import StartProgress
from sessionkv.cli.unnamed import tell_not_exported, tell_not_exported_of
from sessionkv.cli.usage import WrongUsage
from sessionkv.config import LimitsConfig, user_data_dir
from sessionkv.engine.stopped_kv import KVImport, export_kv
from sessionkv.engine.stopped_sessions import open_sessions
from sessionkv.errors import InvalidRequest, SessionExists, SessionKVError
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.export_file import (
    ExportCounts,
    ExportedBlock,
    ExportItem,
    ExportReader,
    ExportWriter,
    KVSection,
)
from sessionkv.store.stopped import open_stopped
from sessionkv.types import NodeRecord
from sessionkv.types.portable import PortableSession
from sessionkv.types.portable_tree import PortableTree

_TOGETHER_BYTES = 1024**2
"""Trees of turns are imported together up to here: a transaction costs the same for one or many."""


def run(args: argparse.Namespace) -> int:
    """Carry out one of the two and print what came of it."""
    return _export(args) if args.action == "export" else _import(args)


# Out -----------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    if args.session is None and not args.all:
        raise WrongUsage("name a session, or give --all")
    if args.session is not None and args.all:
        raise WrongUsage("SESSION and --all exclude each other")
    with StartProgress() as progress, new_file(args.output) as file:
        writer = ExportWriter(file)
        from_store = args.kv or args.store is not None
        items = _from_store(args, progress) if from_store else _from_engine(args, progress)
        for item in items:
            writer.add(item)
        counts = writer.finish()
    _report_export(args, counts, writer.num_turns)
    return 0


def _from_engine(args: argparse.Namespace, progress: StartProgress) -> Iterator[ExportItem]:
    from sessionkv.client.portable import export_trees

    with connect(args) as client:
        names = [info.name for info in client.sessions()] if args.all else [args.session]
        told = _told(progress, "sessions", len(names))
        yield from export_trees(client, names, skip_missing=args.all, progress=told)
        if args.all:
            progress.close()
            tell_not_exported(client)


def _from_store(args: argparse.Namespace, progress: StartProgress) -> Iterator[ExportItem]:
    with ExitStack() as stack:
        directory = stack.enter_context(open_stopped(args.store or user_data_dir()))
        sessions = stack.enter_context(open_sessions(directory))
        names = list(sessions.heads) if args.all else [args.session]
        yield from sessions.export(names, progress=_told(progress, "sessions", len(names)))
        if args.kv:
            yield from export_kv(
                directory, sessions, names, progress=_told(progress, "blocks", None)
            )
        if args.all:
            progress.close()
            tell_not_exported_of(len(sessions.unnamed))


def _report_export(args: argparse.Namespace, counts: ExportCounts, num_turns: int) -> None:
    to_stdout = args.output == STDIO
    num_bytes = None if to_stdout else Path(args.output).stat().st_size
    if args.json and not to_stdout:
        output.print_json(
            {
                "file": args.output,
                "bytes": num_bytes,
                "sessions": counts.sessions,
                "turns": num_turns,
                "blocks": counts.blocks,
            }
        )
        return
    console = output.stderr() if to_stdout else output.stdout()
    parts = [output.count(counts.sessions, "session"), output.count(num_turns, "turn")]
    if args.kv:
        parts.append(output.count(counts.blocks, "KV block"))
    size = "" if num_bytes is None else f", {output.size(num_bytes)}"
    console.print(f"exported {', '.join(parts)} to {args.output}{size}", markup=False)


# In ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Contents:
    """What a first reading of a file found."""

    names: list[str] = field(default_factory=list)
    turns: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Outcome:
    """What was imported."""

    sessions: list[str] = field(default_factory=list)
    turns: int = 0
    blocks: int = 0
    other_tokenizer: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _import(args: argparse.Namespace) -> int:
    with StartProgress() as progress, old_file(args.file) as file:
        contents = _check(file, progress)
        if args.new_name is not None and len(contents.names) != 1:
            has = len(contents.names)
            raise WrongUsage(f"--as needs a file with one session; this one has {has:,}")
        names = contents.names if args.new_name is None else [args.new_name]
        into = _into_store if args.kv or args.store is not None else _into_engine
        outcome = into(args, file, names, progress)
        outcome.turns = contents.turns
    if contents.blocks and not args.kv:
        outcome.notes.append(
            f"{output.count(contents.blocks, 'KV block')} left out: a running engine takes the log "
            "alone; --kv takes them into the store of a stopped one"
        )
    _report_import(args, outcome)
    return 0


def _check(file: BinaryIO, progress: StartProgress) -> _Contents:
    """Read the whole file once.

    Raises:
        ExportDamaged: With the offset.
    """
    contents = _Contents()
    reader = ExportReader(file)
    told = _told(progress, "checking", os.fstat(file.fileno()).st_size, unit="bytes")
    for item in reader:
        if isinstance(item, PortableSession):
            contents.names.append(item.name)
        elif isinstance(item, NodeRecord):
            contents.turns += item.kind != "root"
        elif isinstance(item, ExportedBlock):
            contents.blocks += 1
        told(reader.offset)
    if len(set(contents.names)) != len(contents.names):
        raise InvalidRequest("FILE", "a session twice", "each name once")
    return contents


def _trees(
    items: Iterable[ExportItem], new_name: str | None
) -> Iterator[PortableTree | ExportItem]:
    """Whole trees of turns, small ones together, then what follows them."""
    tree = PortableTree()
    for item in items:
        if isinstance(item, NodeRecord):
            if item.parent_id is None and tree.num_bytes > _TOGETHER_BYTES:
                yield tree
                tree = PortableTree()
            tree.add_node(item)
        elif isinstance(item, PortableSession):
            tree.add_session(replace(item, name=new_name or item.name))
        else:
            if tree.nodes:
                yield tree
                tree = PortableTree()
            yield item
    if tree.nodes:
        yield tree


def _into_engine(
    args: argparse.Namespace, file: BinaryIO, names: list[str], progress: StartProgress
) -> _Outcome:
    from sessionkv.client.portable import import_tree

    outcome = _Outcome()
    with connect(args) as client:
        if len(names) > 1:  # one is refused by the engine before anything is imported
            _refuse_taken(names, {info.name for info in client.sessions()})
        told = _told(progress, "importing", len(names))
        with _saying_what_is_done(outcome):
            for tree in _trees(ExportReader(file), args.new_name):
                if not isinstance(tree, PortableTree):
                    break  # KV
                value = import_tree(client, tree)
                outcome.sessions += value["sessions"]
                outcome.other_tokenizer += value.get("other_tokenizer", ())
                told(len(outcome.sessions))
    return outcome


def _into_store(
    args: argparse.Namespace, file: BinaryIO, names: list[str], progress: StartProgress
) -> _Outcome:
    outcome = _Outcome()
    with ExitStack() as stack:
        directory = stack.enter_context(StoreDirectory.open(args.store or user_data_dir()))
        sessions = stack.enter_context(open_sessions(directory))
        _refuse_taken(names, sessions.heads)
        stack.enter_context(_saying_what_is_done(outcome))
        kv = stack.enter_context(KVImport(directory))
        told = _told(progress, "importing", len(names))
        for item in _trees(ExportReader(file), args.new_name):
            if isinstance(item, PortableTree):
                sessions.add(item, LimitsConfig())
                outcome.sessions += [session.name for session in item.sessions]
                told(len(outcome.sessions))
            elif not args.kv:
                break
            elif isinstance(item, KVSection):
                kv.begin(item)
            elif isinstance(item, ExportedBlock):
                kv.add(item)
        kv.close()
        outcome.blocks = kv.taken
        if kv.left_out:
            outcome.notes.append(
                f"{output.count(kv.left_out, 'KV block')} left out: they are of another model, "
                "dtype or block size than this store's; the log is whole"
            )
        if kv.refused:
            outcome.notes.append(f"{output.count(kv.refused, 'KV block')} could not be stored")
    return outcome


@contextmanager
def _saying_what_is_done(outcome: _Outcome) -> Iterator[None]:
    """Each tree of turns is imported whole or not at all; an error between two says how far."""
    try:
        yield
    except SessionKVError as error:
        if outcome.sessions:
            done = output.count(len(outcome.sessions), "session")
            error.message += f"; {done} of the file had been imported before that"
        raise


def _refuse_taken(names: Iterable[str], taken: Iterable[str]) -> None:
    both = sorted(set(names) & set(taken))
    if both:
        raise SessionExists(
            f"there is a session named {both[0]!r}"
            + (f" (and {len(both) - 1} others of the file)" if len(both) > 1 else ""),
            sessions=len(both),
        )


def _report_import(args: argparse.Namespace, outcome: _Outcome) -> None:
    if outcome.other_tokenizer:
        outcome.notes.append(
            f"{output.count(len(outcome.other_tokenizer), 'session')} of another tokenizer: the "
            "next turn of a chat encodes it anew; raw turns can be read, not continued"
        )
    if args.json:
        output.print_json(
            {
                "sessions": outcome.sessions,
                "turns": outcome.turns,
                "blocks": outcome.blocks,
                "other_tokenizer": outcome.other_tokenizer,
                "notes": outcome.notes,
            }
        )
        return
    parts = [output.count(len(outcome.sessions), "session"), output.count(outcome.turns, "turn")]
    if outcome.blocks:
        parts.append(output.count(outcome.blocks, "KV block"))
    output.stdout().print(f"imported {', '.join(parts)}", markup=False)
    for note in outcome.notes:
        output.stderr().print(note, markup=False)


def _told(progress: StartProgress, stage: str, total: int | None, *, unit: str = "") -> Any:
    """A progress callback for one stage."""

    def tell(done: int) -> None:
        progress.update({"stage": stage, "done": done, "total": total, "unit": unit})

    return tell
