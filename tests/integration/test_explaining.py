"""``explain``, ``top``, ``stats`` and ``sessions tree`` against an engine that is served."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from sessionkv.cli.main import main
from sessionkv.cli.session_tree import session_trees
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    SocketEngine,
    engine_config,
    greedy,
    open_engine,
    socket_engine,
)
from tests.builders.tenants import KEYS, access

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketEngine]:
    """Session "a" lost its blocks to others before its second turn; "b" and "c" are its forks."""
    folder = tmp_path_factory.mktemp("e")
    with socket_engine(folder, engine_config(blocks=24)) as served, served.client() as client:
        session = client.open("a")
        session.turn(tokens=tokens(40), sampling=GREEDY)
        session.fork("b")
        client.generate(tokens=tokens(94, start=200), sampling=greedy(1))
        session.turn(tokens=[5, 6], sampling=GREEDY)
        session.fork("c").turn(tokens=[7], sampling=GREEDY)
        client.open("other")
        yield served


def said(engine: SocketEngine, capsys: Capture, *argv: str) -> str:
    assert main([*argv, "--endpoint", engine.endpoint]) == 0
    return capsys.readouterr().out


def test_the_last_turns_are_explained(engine: SocketEngine, capsys: Capture) -> None:
    lines = said(engine, capsys, "explain", "a").splitlines()
    assert lines[0].startswith("turn 2 (n-")
    assert "prompt of 50 tokens, 0 found, 50 computed" in lines[0]
    assert lines[1] == "  reason: evicted: the blocks had to make room for others"
    assert lines[2] == "  position: token 0, in turn 1"
    assert lines[3].startswith("  helps: a larger tier")
    assert lines[4].startswith("  larger: ")
    assert "more of device would have had" in lines[4]
    assert any("turn 1 (n-" in line for line in lines[5:])
    assert lines[-1].startswith("  reason: first_turn")


def test_one_turn_by_number_and_by_node(engine: SocketEngine, capsys: Capture) -> None:
    by_number = said(engine, capsys, "explain", "a", "--turn", "1")
    assert by_number.count("turn 1 (n-") == 1
    node = by_number.partition("(")[2].partition(")")[0]
    assert said(engine, capsys, "explain", node) == by_number
    (found,) = json.loads(said(engine, capsys, "explain", node, "--json"))
    assert (found["turn"], found["node"]) == (1, node)
    assert found["cache"]["miss"]["reason"] == "first_turn"


@pytest.mark.parametrize(
    ("target", "code"),
    [(["a", "--turn", "9"], 2), (["nobody"], 1), (["n-9999"], 1)],
)
def test_what_is_not_there(
    engine: SocketEngine, capsys: Capture, target: list[str], code: int
) -> None:
    assert main(["explain", *target, "--endpoint", engine.endpoint]) == code
    assert capsys.readouterr().err.startswith("sessionkv: ")


def test_forks_are_a_tree(engine: SocketEngine, capsys: Capture) -> None:
    lines = [line.strip() for line in said(engine, capsys, "sessions", "tree").splitlines()]
    assert [line.split("(")[0].strip("└├─│ ") for line in lines] == [
        "turn 1",
        "b  1 turn",
        "turn 2",
        "a  2 turns",
        "c  3 turns",
        "other  0 turns",
    ]
    listed = json.loads(said(engine, capsys, "sessions", "tree", "c", "--json"))
    assert [(one["name"], one["turns"], len(one["path"])) for one in listed] == [("c", 3, 4)]


def test_a_chain_of_many_forks_is_shown_and_not_indented_without_end() -> None:
    paths = {f"s{i:04}": [1, *range(2, i + 3)] for i in range(1200)}
    (tree,) = session_trees(paths)
    console = Console(width=200, file=io.StringIO())
    console.print(tree)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert sum(" turns (n-" in line or " turn (n-" in line for line in lines) == 1200
    assert max(map(len, (line.rstrip() for line in lines))) < 80


def test_top_and_stats_off_a_terminal_are_printed_once(
    engine: SocketEngine, capsys: Capture
) -> None:
    top = said(engine, capsys, "top", "--sessions", "2")
    for words in ("0 running, 0 waiting", "hit rate", "first token", "p99", "device", "evicted"):
        assert words in top
    assert "and 2 more sessions" in top
    watched = said(engine, capsys, "stats", "--watch", "1")
    assert "larger_cache" in watched
    assert "buckets" not in watched


def test_a_tenant_looks_at_its_own(tmp_path: Path, capsys: Capture) -> None:
    key = tmp_path / "key"
    key.write_text(f"{KEYS['bob']}\n")
    operator = tmp_path / "operator"
    operator.write_text(KEYS["root"])
    with socket_engine(tmp_path, access=access()) as served:
        with served.client(KEYS["bob"]) as bob:
            bob.open("his").turn(tokens=tokens(9), sampling=GREEDY)
        shown = said(served, capsys, "top", "--key-file", str(key))
        assert "his" in shown
        assert "alice" not in shown
        assert "first_turn" in said(served, capsys, "explain", "his", "--key-file", str(key))
        everything = said(served, capsys, "top", "--key-file", str(operator))
        assert "alice" in everything
        names = ("sessions", "ls", "--tenant", "bob", "--key-file", str(operator))
        assert "his" in said(served, capsys, *names)
        assert main(["stats", "--endpoint", served.endpoint]) == 1
        assert "--key-file" in capsys.readouterr().err


def test_a_larger_device_would_have_had_exactly_these_blocks() -> None:
    """The same prompts again in an engine that is as much larger as the figures ask for."""
    prompts = [tokens(21, start=100 * i) for i in range(4)]  # five full blocks and a part each

    def looked_for(blocks: int) -> tuple[int, list[tuple[int, int]], int]:
        with open_engine(engine_config(blocks=blocks)) as engine:
            block_bytes = engine.parts.runner.geometry.block_bytes
            hits = 0
            for _ in range(2):
                for prompt in prompts:
                    hits += engine.generate(tokens=prompt, sampling=greedy(1)).cache.cached_tokens
            larger = engine.stats()["larger_cache"]["device"]
            sizes = [
                (int(size) // block_bytes, count) for size, count in larger["by_more_bytes"].items()
            ]
            return hits // 4, sizes, larger["wanted_blocks"]

    hits, sizes, wanted = looked_for(12)
    assert hits == 0
    assert wanted == 4 * 5  # each full block of the second round was there once
    enough = next(size for size, count in sizes if count == wanted)
    assert looked_for(12 + enough)[0] >= wanted
    assert looked_for(12 + enough)[2] == 0
