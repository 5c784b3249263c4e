import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sessionkv.cli.main import main
from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import PutHead, PutKey, PutNode
from tests.builders.engine import engine_config, greedy, open_engine
from tests.builders.store import chain, geometry, head, key, node, payload

SHORT = greedy(6)
DISK = 4 * 1024**2
OTHER = bytes(range(32))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "store"
    with open_engine(engine_config(path, disk_bytes=DISK)) as engine:
        for name in ("a", "b"):
            engine.open(name, system=name).turn("one", sampling=SHORT)
        engine.flush()
    with StoreDirectory.open(path) as directory:
        blocks = BlockStore(directory, OTHER, geometry(4096), cap_bytes=2**40)
        for record in chain([1, 2, 3, 4, 5, 6]):
            blocks.write(record, memoryview(payload(record)))
        blocks.close()
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """An engine's store: two sessions of one turn each, their KV, and another identity's."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def own_folder(store: Path) -> Path:
    return next(path for path in (store / "blocks").iterdir() if path.name != OTHER.hex())


def test_a_sound_store_is_said_to_be(store: Path, run: Any) -> None:
    code, out, err = run("store", "verify", "--store", store)
    assert (code, err) == (0, "")
    assert "2 sessions, 2 turns, 0 keys" in out
    assert "in 2 block stores: all sound" in out
    code, out, _ = run("store", "verify", "--store", store, "--json")
    assert json.loads(out)["problems"] == []


def test_a_flipped_bit_is_found_named_and_removed(store: Path, run: Any) -> None:
    segment = store / "blocks" / OTHER.hex() / "segment-000000.kv"
    content = bytearray(segment.read_bytes())
    content[4096 + 100] ^= 1  # of the first record's payload
    segment.write_bytes(content)
    code, out, _ = run("store", "verify", "--store", store)
    assert code == 1
    assert "in slot 0: its bytes are not what was stored" in out
    assert run("store", "verify", "--store", store)[0] == 1  # nothing was changed
    code, out, _ = run("store", "verify", "--store", store, "--repair", "--json")
    found = json.loads(out)
    assert (code, found["repaired"], found["problems"]) == (0, 1, [])
    assert run("store", "verify", "--store", store)[0] == 0


def test_rows_that_disagree_with_their_entries_are_found_and_put_right(
    store: Path, run: Any
) -> None:
    index = BlockIndex(store / "blocks" / OTHER.hex() / "index", block_size=4)

    def harm(txn: Any) -> None:
        first, second = index.entries(txn)
        txn.put(b"p" * 32, b"\x01" + b"k" * 32, db=index._children)
        txn.delete(index._row(first), db=index._order)
        txn.put(second.key, b"not an entry", db=index._entries)
        index.slots.unnamed(txn, first.slot, has_space=True)

    index.write(harm)
    index.close()
    code, out, _ = run("store", "verify", "--store", store, "--json")
    said = [item["what"] for item in json.loads(out)["problems"]]
    assert code == 1
    assert said == [
        "1 entries are damaged",
        "1 entries lack a row by which they are found or evicted",
        "3 rows belong to no entry",
        "1 slots are in use and free at once",
        "1 slots are neither in use nor free",
    ]
    code, out, _ = run("store", "verify", "--store", store, "--repair", "--json")
    found = json.loads(out)
    assert (code, found["repaired"], found["problems"]) == (0, 1, [])


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"junk" * 4096])
def test_a_harmed_index_is_found_and_its_block_store_removed(
    store: Path, content: bytes, run: Any
) -> None:
    (store / "blocks" / OTHER.hex() / "index" / "data.mdb").write_bytes(content)
    code, out, _ = run("store", "verify", "--store", store)
    assert code == 1
    assert f"blocks/{OTHER.hex()}/index: " in out
    code, out, _ = run("store", "stats", "--store", store, "--json")
    assert code == 0
    assert [item["damage"] is None for item in json.loads(out)["identities"]].count(False) == 1
    assert run("store", "verify", "--store", store, "--repair")[0] == 0
    assert not (store / "blocks" / OTHER.hex()).exists()
    assert own_folder(store).exists()


def test_truncated_segments_and_open_permissions_are_found(store: Path, run: Any) -> None:
    segment = store / "blocks" / OTHER.hex() / "segment-000000.kv"
    os.truncate(segment, 10_000)
    segment.chmod(0o640)
    (store / "journal").chmod(0o755)
    code, out, _ = run("store", "verify", "--store", store, "--json")
    problems = {item["place"]: item["what"] for item in json.loads(out)["problems"]}
    assert code == 1
    assert problems["journal"] == "its mode is 0755, not 0700"
    assert problems[f"blocks/{OTHER.hex()}/segment-000000.kv"] == "its mode is 0640, not 0600"
    assert "the segment file ends before it" in problems.values()


def test_a_harmed_journal_is_found_and_left_where_it_is(store: Path, run: Any) -> None:
    data = store / "journal" / "data.mdb"
    data.write_bytes(b"junk" * 4096)
    code, out, _ = run("store", "verify", "--store", store, "--repair")
    assert code == 1
    assert "\njournal: " in "\n" + out
    for action in ("stats", "purge"):
        code, _, err = run(
            "store", action, "--store", store, *["--sessions", "--yes"][: 2 * (action == "purge")]
        )
        assert code == 1
        assert "is damaged" in err
    assert data.read_bytes() == b"junk" * 4096
    assert own_folder(store).exists()


def test_records_of_the_journal_that_are_no_longer_what_they_were(tmp_path: Path, run: Any) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        journal.commit(
            [
                [PutNode(node(1, incoming_blob=b"find me here")), PutNode(node(2, 1))],
                [PutHead(head("a", 2)), PutNode(node(3)), PutHead(head("b", 3)), PutKey(key("k"))],
            ]
        )
        journal.close()
    assert run("store", "verify", "--store", tmp_path / "store")[0] == 0
    data = tmp_path / "store" / "journal" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"find me here", b"find ME here"))
    code, out, _ = run("store", "verify", "--store", tmp_path / "store", "--json")
    assert code == 1
    assert [item["what"] for item in json.loads(out)["problems"]] == [
        "2 of 3 turns (and roots) are damaged, or need one that is",
        "1 of 2 sessions are damaged, or need one that is",
    ]
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        tables = journal._tables
        with journal._env.begin(write=True) as txn:
            place = tables.place(txn, 3)
            assert place is not None
            tables.put_place(txn, 3, replace(place, num_tokens=99))
        journal.close()
    code, out, _ = run("store", "verify", "--store", tmp_path / "store")
    assert "session 'b' is listed with a wrong number of turns or tokens" in out


def test_stats_say_what_is_retained_and_what_takes_room(store: Path, run: Any) -> None:
    code, out, _ = run("store", "stats", "--store", store, "--json")
    stats = json.loads(out)
    assert code == 0
    assert (stats["sessions"], stats["turns"], stats["keys"]) == (2, 2, 0)
    assert stats["oldest_use_s"] < stats["newest_use_s"]
    own, other = sorted(stats["identities"], key=lambda item: item["identity"] == OTHER.hex())
    assert (other["blocks"], other["retained_blocks"], other["block_bytes"]) == (2, 0, 4096)
    assert own["blocks"] == own["retained_blocks"] > 4
    for name, size in stats["bytes"].items():
        assert size == (store / name).stat().st_blocks * 512
    code, out, _ = run("store", "stats", "--store", store)
    assert code == 0
    assert OTHER.hex()[:16] in out


def test_purge_takes_kv_and_leaves_sessions(store: Path, run: Any) -> None:
    code, _, err = run("store", "purge", "--store", store)
    assert code == 2
    assert err == "sessionkv: nobody can be asked here; give --yes\n"
    assert own_folder(store).exists()
    code, out, _ = run("store", "purge", "--store", store, "--yes")
    assert code == 0
    assert out.endswith("in 2 block stores; all sessions stay\n")
    assert list((store / "blocks").iterdir()) == []
    with open_engine(engine_config(store, disk_bytes=DISK)) as engine:
        assert [info.turns for info in engine.sessions()] == [1, 1]
        assert engine.session("a").turn("two", sampling=SHORT).tokens


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("\n", 1), ("no\n", 1), ("", 1), ("y\n", 0)])
def test_purge_asks_a_terminal(
    store: Path, answer: str, code: int, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    found, _, err = run("store", "purge", "--store", store, "--sessions")
    assert found == code
    assert "in 2 block stores and 2 SESSIONS with all their turns? [y/N]" in err
    assert own_exists(store) == bool(code)


def own_exists(store: Path) -> bool:
    return any((store / "blocks").iterdir())


def test_purge_of_one_identity(store: Path, run: Any) -> None:
    own = own_folder(store)
    for wrong in ("zz", ""):
        assert run("store", "purge", "--store", store, "--identity", wrong, "--yes")[0] == 2
    code, out, _ = run(
        "store", "purge", "--store", store, "--identity", OTHER.hex()[:6], "--yes", "--json"
    )
    assert (code, json.loads(out)["identities"]) == (0, [OTHER.hex()])
    assert own.exists()


def test_purge_of_what_is_old(store: Path, run: Any) -> None:
    for path in (store / "blocks" / OTHER.hex()).rglob("*"):
        os.utime(path, (1.0, 1.0))
    for wrong in ("30", "d", "3x", "-1d"):
        argv = ("store", "purge", "--store", store, f"--older-than={wrong}", "--yes")
        assert run(*argv)[0] == 2, wrong
    code, out, _ = run("store", "purge", "--store", store, "--older-than", "30d", "--yes", "--json")
    assert (code, json.loads(out)["identities"]) == (0, [OTHER.hex()])
    assert own_folder(store).exists()


def test_sessions_are_purged_only_when_named(tmp_path: Path, run: Any) -> None:
    path = tmp_path / "store"
    with StoreDirectory.open(path) as directory:
        journal = Journal(directory)
        old, new = head("old", 2), head("new", 3)
        journal.commit(
            [
                [PutNode(node(1)), PutNode(node(2, 1)), PutNode(node(3, 1)), PutKey(key("k"))],
                [PutHead(old), PutHead(replace(new, updated_s=4e9))],
            ]
        )
        journal.close()
    assert run("store", "purge", "--store", path, "--sessions", "--identity", "00")[0] == 2
    code, out, _ = run(
        "store", "purge", "--store", path, "--sessions", "--older-than", "1d", "--yes"
    )
    assert code == 0
    assert out.endswith("and 1 session\n")
    assert _left(path) == ([1, 3], ["new"], 1)
    assert run("store", "purge", "--store", path, "--sessions", "--yes")[0] == 0
    assert _left(path) == ([], [], 0)
    with StoreDirectory.open(path) as directory:
        journal = Journal(directory)
        assert journal.load().next_node_id == 4  # numbers are not given twice
        journal.close()


def test_export_of_all_says_what_it_leaves_out_and_how_that_is_had(
    store: Path, tmp_path: Path, run: Any
) -> None:
    file = tmp_path / "all.skv"
    with StoreDirectory.open(store) as directory:
        journal = Journal(directory)
        one = journal.load().heads[0]
        journal.commit([[PutHead(replace(one, name=f"~http:chat:{n}")) for n in (1, 2)]])
        journal.close()
    code, out, err = run("sessions", "export", "--all", "--store", store, "-o", file, "--json")
    assert (code, json.loads(out)["sessions"]) == (0, 2)
    assert err == (
        "left out: 2 conversations without a name of their own, as HTTP makes them; "
        "`sessionkv sessions ls '~'` lists them, one is exported by its name and imported under "
        "another with --as\n"
    )
    code, _, err = run("sessions", "export", "~http:chat:2", "--store", store, "--kv", "-o", file)
    assert (code, err) == (0, "")
    assert run("sessions", "import", file, "--store", store)[0] == 2  # names with ~ are not given
    assert run("sessions", "import", file, "--store", store, "--as", "kept")[0] == 0
    assert sorted(_left(store)[1]) == ["a", "b", "kept", "~http:chat:1", "~http:chat:2"]


def _left(path: Path) -> tuple[list[int], list[str], int]:
    with StoreDirectory.open(path) as directory:
        journal = Journal(directory)
        state = journal.load()
        journal.close()
    return (
        [node.node_id for node in state.nodes],
        [head.name for head in state.heads],
        len(state.keys),
    )


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, run: Any) -> None:
    for action in ("verify", "stats", "purge"):
        code, _, err = run("store", action, "--store", tmp_path / "none")
        assert code == 1
        assert "there is no store" in err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "argv", [["store"], ["store", "purge"], ["sessions", "export"], ["sessions", "import"]]
)
def test_help_and_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    assert "usage: sessionkv" in capsys.readouterr().out
