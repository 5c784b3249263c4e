import json

import pytest

from sessionkv.cli import sessions, stats
from sessionkv.cli.main import main
from sessionkv.ipc import messages as wire
from tests.builders.cli_engine import ScriptedEngine, connects_to


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Two sessions: ``trip`` with two turns, ``a[b]`` with one."""
    engine = ScriptedEngine()
    engine.sessions = {"trip": {"texts": ["a", "b"]}, "a[b]": {"texts": ["x"]}}
    monkeypatch.setattr(sessions, "connect", connects_to(engine))
    monkeypatch.setattr(stats, "connect", connects_to(engine))
    return engine


def test_ls_is_a_table(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "ls"]) == 0
    header, first, second = capsys.readouterr().out.rstrip("\n").split("\n")
    assert header.split() == [
        "session", "turns", "tokens", "device", "pin", "idle", "last", "miss"
    ]  # fmt: skip
    assert first.split()[:5] == ["a[b]", "1", "10", "1.0", "KiB"]
    assert first.split()[-1] == "evicted"
    assert second.split()[0] == "trip"


def test_ls_takes_a_prefix(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "ls", "tr", "--json"]) == 0
    assert [info["name"] for info in json.loads(capsys.readouterr().out)] == ["trip"]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, ""),
        (1, "and 1 conversation without a name of its own, as HTTP makes it"),
        (1000, "and 1,000 conversations without a name of their own, as HTTP makes them"),
        (1001, "and more than 1,000 conversations without a name of their own, as HTTP makes them"),
    ],
)
def test_ls_says_how_many_it_leaves_out(
    engine: ScriptedEngine, number: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.sessions |= {f"~http:chat:{n}": {"texts": ["x"]} for n in range(number)}
    assert main(["sessions", "ls"]) == 0
    captured = capsys.readouterr()
    assert "~" not in captured.out
    assert captured.err == (told and f"{told}: `sessionkv sessions ls '~'`\n")
    for quiet in (["ls", "--json"], ["ls", "tr"], ["ls", "~"]):
        assert main(["sessions", *quiet]) == 0
        assert capsys.readouterr().err == ""


def test_tree_says_what_it_leaves_out_too(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.sessions = {"~http:chat:1": {"texts": ["x"]}}
    assert main(["sessions", "tree"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("and 1 conversation without a name of its own")


def test_show_json_has_everything(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "show", "trip", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["turns"], info["tokens"]) == (2, 20)
    assert info["bytes"] == {"device": {"exclusive": 2048, "shared": 0}}
    assert info["last_cache"]["miss"]["reason"] == "evicted"


def test_show_names_shared_bytes_apart(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "show", "trip"]) == 0
    printed = capsys.readouterr().out
    assert "KV in device" in printed
    assert "2.0 KiB" in printed


def test_fork_rewind_pin_unpin_rm(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "fork", "trip", "other"]) == 0
    assert main(["sessions", "rewind", "trip", "2"]) == 0
    assert main(["sessions", "pin", "other", "--tier", "disk", "--priority", "70"]) == 0
    assert engine.sessions["trip"]["texts"] == []
    assert engine.sessions["other"]["texts"] == ["a", "b"]
    assert engine.sessions["other"]["pin"] == {"tier": "disk", "expires_s": None, "priority": 70}
    assert "disk (70)" in capsys.readouterr().out
    assert main(["sessions", "unpin", "other"]) == 0
    assert engine.sessions["other"]["pin"] is None
    assert main(["sessions", "rm", "other"]) == 0
    assert "other" not in engine.sessions
    assert capsys.readouterr().out.endswith("removed other\n")


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        ("3600", 3600.0),
        ("1.5", 1.5),
        ("45s", 45.0),
        ("30m", 1800.0),
        ("1h", 3600.0),
        ("2d", 172_800.0),
    ],
)
def test_pin_lasts_as_long_as_its_ttl_says(
    engine: ScriptedEngine, ttl: str, seconds: float
) -> None:
    assert main(["sessions", "pin", "trip", "--ttl", ttl]) == 0
    assert [r.ttl_s for r in engine.log if isinstance(r, wire.Pin)] == [seconds]


def test_rm_removes_what_it_can_and_names_the_rest(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "fork", "trip", "other"]) == 0
    capsys.readouterr()
    assert main(["sessions", "rm", "x", "other", "y", "trip"]) == 1
    assert engine.sessions.keys().isdisjoint({"other", "trip"})
    captured = capsys.readouterr()
    assert captured.out == "removed other\nremoved trip\n"
    assert captured.err.splitlines()[:2] == [
        "there is no session named 'x'",
        "sessionkv: there is no session named 'y'",
    ]


@pytest.mark.parametrize(
    "argv", [["show", "x"], ["fork", "x", "y"], ["rewind", "x"], ["pin", "x"], ["rm", "x"]]
)
def test_unknown_session_is_one_line(
    engine: ScriptedEngine, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "sessionkv: there is no session named 'x'"


def test_stats_groups_and_units(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.stats = {
        "uptime_s": 12.5,
        "prefix": {"hit_rate": 0.5, "lookups": 1200},
        "tiers": {"device": {"used_bytes": 1536, "cap_bytes": None}, "evictions": 3},
    }
    assert main(["stats"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["uptime_s", "12.50", "s"] in lines
    assert ["hit_rate", "50.0%"] in lines
    assert ["lookups", "1,200"] in lines
    assert ["device.used_bytes", "1.5", "KiB"] in lines
    assert ["device.cap_bytes", "-"] in lines
    assert main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == engine.stats
