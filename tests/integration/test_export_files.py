"""``sessions export`` and ``import`` of whole files, from running engines and stopped stores."""

import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from sessionkv.cli.main import main
from sessionkv.client import TurnResult
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.engine import (
    CheckedEngine,
    SocketEngine,
    engine_config,
    greedy,
    open_engine,
    socket_engine,
)

SHORT = greedy(6)
DISK = 4 * 1024**2


def talk(engine: Any, name: str, *texts: str) -> list[TurnResult]:
    session = engine.open(name, system="Be brief.")
    return [session.turn(text, sampling=SHORT) for text in texts]


def log_of(engine: CheckedEngine | SocketEngine, name: str) -> list[int]:
    tree = engine.parts.tree
    return list(tree.tokens_of(tree.head("local", name).node_id))


def test_from_one_running_engine_to_another(tmp_path: Path, run: Any) -> None:
    file = tmp_path / "all.skv"
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    with socket_engine(tmp_path / "a") as engine, engine.client() as client:
        talk(client, "trip", "one", "two")
        client.session("trip").fork("other").turn("aside", sampling=SHORT)
        where = ("--endpoint", engine.endpoint)
        code, out, _ = run("sessions", "export", "--all", "-o", file, "--json", *where)
        assert code == 0
        assert json.loads(out) == {
            "file": str(file), "bytes": file.stat().st_size, "sessions": 2, "turns": 3, "blocks": 0
        }  # fmt: skip
        logs = {name: log_of(engine, name) for name in ("trip", "other")}
        code, out, _ = run("sessions", "export", "trip", "-o", tmp_path / "one.skv", *where)
        assert (code, out.split(" to ")[0]) == (0, "exported 1 session, 2 turns")
        client.session("trip").fork("~http:chat:1")
        code, out, err = run("sessions", "export", "--all", "-o", tmp_path / "again.skv", *where)
        assert (code, out.split(" to ")[0]) == (0, "exported 2 sessions, 3 turns")
        assert err.startswith("left out: 1 conversation without a name of its own, as HTTP makes")
        unnamed = run("sessions", "export", "~http:chat:1", "-o", tmp_path / "http.skv", *where)
        assert (unnamed[0], unnamed[1].split(" to ")[0]) == (0, "exported 1 session, 2 turns")
        expected = client.session("trip").turn("three", sampling=SHORT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with socket_engine(tmp_path / "b") as engine, engine.client() as client:
        where = ("--endpoint", engine.endpoint)
        code, out, err = run("sessions", "import", file, *where)
        assert (code, out, err) == (0, "imported 2 sessions, 3 turns\n", "")
        assert {name: log_of(engine, name) for name in logs} == logs
        code, out, err = run("sessions", "import", file, *where)
        assert code == 1
        assert "'other' (and 1 others of the file)" in err
        code, out, err = run("sessions", "import", tmp_path / "one.skv", *where)
        assert code == 1
        assert "--as" in err
        code, out, _ = run(
            "sessions", "import", tmp_path / "one.skv", "--as", "again", "--json", *where
        )
        assert json.loads(out)["sessions"] == ["again"]
        code, _, err = run("sessions", "import", file, "--as", "x", *where)
        assert (code, err) == (2, "sessionkv: --as needs a file with one session; this one has 2\n")
        for name in ("trip", "again"):
            resumed = client.session(name).turn("three", sampling=SHORT)
            assert (resumed.tokens, resumed.text) == (expected.tokens, expected.text)


def test_kv_goes_from_store_to_store_and_the_first_turn_is_warm(tmp_path: Path, run: Any) -> None:
    config = engine_config(tmp_path / "a", disk_bytes=DISK)
    with open_engine(config) as engine:
        talk(engine, "trip", "one", "two")
        engine.flush()
    with open_engine(config) as engine:  # a restart
        engine.session("trip").fork("twin")
        uninterrupted = engine.session("twin").turn("three", sampling=SHORT)
        engine.delete("twin")
    file = tmp_path / "trip.skv"
    code, out, err = run(
        "sessions", "export", "trip", "-o", file, "--kv", "--store", tmp_path / "a"
    )
    assert (code, err) == (0, "")
    assert out.startswith("exported 1 session, 2 turns, ")
    code, out, err = run("sessions", "import", file, "--kv", "--store", tmp_path / "b", "--json")
    assert (code, err) == (0, "")
    blocks = json.loads(out)["blocks"]
    assert blocks > 5
    with open_engine(engine_config(tmp_path / "b", disk_bytes=DISK)) as engine:
        assert engine.parts.store.stats().blocks == blocks
        first = engine.session("trip").turn("three", sampling=SHORT)
        assert first.tokens == uninterrupted.tokens
        assert first.cache.disk_tokens == uninterrupted.cache.disk_tokens > 0
        assert first.cache.computed_tokens == uninterrupted.cache.computed_tokens
        assert first.cache.miss.reason is MissReason.NONE
        engine.assert_ledger()


def test_kv_of_another_model_is_left_out_and_said_to_be(tmp_path: Path, run: Any) -> None:
    for place, block_size in (("a", 4), ("b", 8)):
        with open_engine(
            engine_config(tmp_path / place, disk_bytes=DISK, block_size=block_size)
        ) as engine:
            talk(engine, place, "one")
            engine.flush()
    file = tmp_path / "a.skv"
    assert run("sessions", "export", "a", "-o", file, "--kv", "--store", tmp_path / "a")[0] == 0
    code, out, err = run("sessions", "import", file, "--kv", "--store", tmp_path / "b")
    assert (code, out) == (0, "imported 1 session, 1 turn\n")
    assert "left out: they are of another model" in err
    code, out, err = run("sessions", "import", file, "--as", "c", "--store", tmp_path / "b")
    assert "--kv takes them" in err
    with open_engine(engine_config(tmp_path / "b", disk_bytes=DISK, block_size=8)) as engine:
        assert [info.name for info in engine.sessions()] == ["a", "b", "c"]
        assert engine.session("a").turn("two", sampling=SHORT).tokens


def test_another_tokenizer_is_said_to_be_encoded_anew(tmp_path: Path, run: Any) -> None:
    file = tmp_path / "a.skv"
    with open_engine(engine_config(tmp_path / "a")) as engine:
        talk(engine, "a", "one")
    assert run("sessions", "export", "a", "-o", file, "--store", tmp_path / "a")[0] == 0
    folder = tmp_path / "text"
    folder.mkdir()
    built.write_folder("llama3", folder)
    (tmp_path / "b").mkdir()
    config = engine_config(None, blocks=512)
    with (
        socket_engine(tmp_path / "b", config, runner={"text_dir": folder}) as engine,
        engine.client() as client,
    ):
        code, _, err = run("sessions", "import", file, "--endpoint", engine.endpoint)
        assert code == 0
        assert "1 session of another tokenizer" in err
        again = client.session("a").turn("two", sampling=SHORT)
        assert again.cache.miss.reason is MissReason.IDENTITY_CHANGED


def test_damage_anywhere_imports_nothing(tmp_path: Path, run: Any) -> None:
    with open_engine(engine_config(tmp_path / "a", disk_bytes=DISK)) as engine:
        talk(engine, "a", "one")
        engine.flush()
    file = tmp_path / "a.skv"
    assert run("sessions", "export", "a", "-o", file, "--kv", "--store", tmp_path / "a")[0] == 0
    content = file.read_bytes()
    bad = tmp_path / "bad.skv"
    for at in range(0, len(content), len(content) // 40):
        bad.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        code, out, err = run("sessions", "import", bad, "--kv", "--store", tmp_path / "b")
        assert (code, out) == (1, "")
        assert "at byte" in err
        bad.write_bytes(content[:at])
        assert run("sessions", "import", bad, "--kv", "--store", tmp_path / "b")[0] == 1
    assert not (tmp_path / "b").exists()


def test_a_live_engine_is_named_and_left_alone(tmp_path: Path, run: Any) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        talk(engine, "a", "one")
        for argv in (
            ("sessions", "export", "a", "-o", tmp_path / "x", "--kv", "--store", tmp_path / "a"),
            ("store", "verify", "--store", tmp_path / "a"),
            ("store", "stats", "--store", tmp_path / "a"),
            ("store", "purge", "--yes", "--store", tmp_path / "a"),
        ):
            code, out, err = run(*argv)
            assert (code, out) == (1, "")
            assert f"process {os.getpid()}" in err
        assert list(tmp_path.glob("*x*")) == []
        assert talk(engine, "a", "two")


def test_a_pipe_from_store_to_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any
) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        talk(engine, "a", "one")
    assert main(["sessions", "export", "a", "-o", "-", "--store", str(tmp_path / "a")]) == 0
    content, said = capsysbinary.readouterr()
    assert content.startswith(b"SKVEXPRT")
    assert said == b"exported 1 session, 1 turn to -\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["sessions", "import", "-", "--store", str(tmp_path / "b")]) == 0
    with open_engine(engine_config(tmp_path / "b")) as engine:
        assert engine.session("a").info().turns == 1


def test_what_cannot_be_exported_leaves_no_file(tmp_path: Path, run: Any) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        talk(engine, "a", "one")
    file = tmp_path / "x.skv"
    file.write_text("before")
    store = ("--store", tmp_path / "a")
    assert run("sessions", "export", "b", "-o", file, *store)[0] == 1
    assert run("sessions", "export", "-o", file, *store)[0] == 2
    assert run("sessions", "export", "a", "--all", "-o", file, *store)[0] == 2
    assert file.read_text() == "before"
    assert not list(tmp_path.glob(".*"))
    assert run("sessions", "export", "a", "-o", tmp_path / "no" / "x", *store)[0] == 1
    assert run("sessions", "import", tmp_path / "no", *store)[0] == 1
    code, _, err = run("sessions", "export", "a", "-o", file, "--store", tmp_path / "none")
    assert code == 1
    assert "there is no store" in err
    assert not (tmp_path / "none").exists()
