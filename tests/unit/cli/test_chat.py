import io
import signal
import sys

import pytest
from rich.console import Console

from sessionkv.cli import chat
from sessionkv.cli.chat_commands import Commands
from sessionkv.cli.main import main
from sessionkv.errors import ConnectionLost, SessionBusy, TurnFailed
from sessionkv.ipc import messages as wire
from tests.builders.cli_engine import HOLD, ScriptedEngine, connects_to

CACHE_LINE = (
    "prompt 100 = 64 device + 16 host + 0 disk + 20 computed"
    " · first token 12 ms · 34.5 tok/s · miss: evicted from token 80"
)


def talk(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine,
    *lines: str,
    flags: tuple[str, ...] = (),
) -> int:
    """Run ``sessionkv chat`` with these lines on a standard input that is no terminal."""
    monkeypatch.setattr(chat, "connect", connects_to(engine))
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--session", "trip", *flags])


def test_replies_go_to_stdout_and_cache_lines_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, ScriptedEngine("blue", "red [bold]"), "a colour", "", "another") == 0
    captured = capsys.readouterr()
    assert captured.out == "blue\nred [bold]\n"
    assert captured.err.splitlines() == [CACHE_LINE, CACHE_LINE]


def test_flags_reach_session_and_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    flags = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "5", "--seed", "7")
    assert talk(monkeypatch, engine, "hello", flags=flags) == 0
    opened = next(r for r in engine.log if isinstance(r, wire.Open))
    turn = next(r for r in engine.log if isinstance(r, wire.Turn))
    assert (opened.session, opened.system) == ("trip", "Be brief.")
    assert (turn.text, turn.stream) == ("hello", True)
    sampling = turn.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.0, 5, 7)


def test_resumed_session_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    engine.sessions["trip"] = {"texts": ["a", "b"]}
    talk(monkeypatch, engine)
    assert capsys.readouterr().err == "resumed trip after 2 turns\n"


SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one\x1b[2J\ntwo"},
    {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
    {"role": "tool", "content": "\n".join("1234567")},
    {"role": "assistant", "content": "x" * 601},
]


def test_history_is_all_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    engine.sessions["trip"] = {"texts": ["a", "b"], "messages": SAID}
    assert talk(monkeypatch, engine, "/history") == 0
    assert capsys.readouterr().err.splitlines() == [
        "resumed trip after 2 turns",
        "system: Be brief.", "user: first", "assistant: one\\x1b[2J", "two", "user: a b",
        "assistant: (calls look)", "tool: 1", *"234567", f"assistant: {'x' * 601}",
    ]  # fmt: skip


def test_who_resumes_at_a_terminal_is_shown_the_last_exchange() -> None:
    engine = ScriptedEngine()
    engine.sessions["trip"] = {"texts": ["a", "b"], "messages": SAID}
    engine.sessions["short"] = {"texts": ["a"], "messages": SAID[:3]}
    engine.sessions["raw"] = {"texts": ["a"]}
    shown = io.StringIO()
    commands = Commands(engine.client(), Console(file=shown, width=1000), recalls=True)
    for name in ("trip", "short", "raw", "new"):
        commands.switch(name)
    assert shown.getvalue().splitlines() == [
        "resumed trip after 2 turns",
        "user: a b", "assistant: (calls look)", "tool: 1", "2", "3", "4", "5", "6 ...",
        f"assistant: {'x' * 600} ...",
        "(/history shows all of it)",
        "resumed short after 1 turn",
        "user: first", "assistant: one\\x1b[2J", "two",
        "resumed raw after 1 turn",
    ]  # fmt: skip


def test_sessions_that_were_made_and_never_used_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    engine.sessions["before"] = {"texts": []}
    lines = ("/switch used", "one", "/switch used", "/switch before", "/fork f", "/switch empty")
    assert talk(monkeypatch, engine, *lines) == 0
    assert set(engine.sessions) == {"before", "used", "f"}


def test_a_switch_that_fails_leaves_the_chat_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    opened = Commands._exists

    def exists(commands: Commands, name: str) -> bool:
        if name == "bad":
            raise SessionBusy("not now")
        return opened(commands, name)

    monkeypatch.setattr(Commands, "_exists", exists)
    assert talk(monkeypatch, engine, "one", "/switch bad", "two") == 1
    assert engine.sessions["trip"]["texts"] == ["ONE", "TWO"]


def test_commands_act_on_the_current_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    lines = ("one", "two", "/fork b", "three", "/rewind 2", "/pin disk", "/switch trip", "/unpin")
    assert talk(monkeypatch, engine, *lines) == 0
    assert engine.sessions["trip"]["texts"] == ["ONE", "TWO"]
    assert engine.sessions["b"]["texts"] == ["ONE"]
    assert engine.sessions["b"]["pin"]["tier"] == "disk"
    remarks = [line for line in capsys.readouterr().err.splitlines() if line != CACHE_LINE]
    assert remarks == [
        "now in b",
        "1 turn left",
        "pinned to disk",
        "resumed trip after 2 turns",
        "no longer pinned",
    ]


def test_info_and_sessions_show_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ScriptedEngine(), "one", "/info", "/sessions", "/help")
    errors = capsys.readouterr().err
    assert "KV in device" in errors
    assert "1.0 KiB" in errors
    assert "evicted" in errors
    assert "/rewind [N]" in errors


@pytest.mark.parametrize("command", ["/quit", "/exit", "/q"])
def test_quit_ends_the_chat(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    engine = ScriptedEngine()
    assert talk(monkeypatch, engine, command, "never sent") == 0
    assert not any(isinstance(request, wire.Turn) for request in engine.log)


def test_errors_of_a_line_do_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(SessionBusy("a turn is running"), TurnFailed("NaN"), "fine")
    lines = ("one", "two", "/fork", "/rewind x", "/pin moon", "/bogus", "three")
    assert talk(monkeypatch, engine, *lines) == 1  # at the end, for whoever wrote the lines
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "fine"
    assert captured.err.splitlines()[:6] == [
        "a turn is running",
        "NaN",
        "usage: /fork NAME",
        "usage: /rewind N, a number",
        "usage: /pin device|host|disk",
        "no command /bogus; /help lists them",
    ]


def test_lost_engine_ends_the_chat_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(ConnectionLost("the engine is gone"))
    assert talk(monkeypatch, engine, "one", "two") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "sessionkv: the engine is gone; the unfinished turn was not kept",
        "  Start it again with `sessionkv serve`; the conversation goes on from its last completed "
        "turn.",
    ]


class LosesEngine(io.StringIO):
    """Standard output at which the engine dies as soon as a reply begins."""

    engine: ScriptedEngine

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == "so far":
            self.engine._sink.lost(ConnectionLost("the engine is gone"), final=True)
        return written


def test_an_engine_that_dies_in_a_reply_leaves_its_line_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = LosesEngine()
    out.engine = ScriptedEngine(HOLD)
    monkeypatch.setattr(sys, "stdout", out)
    assert talk(monkeypatch, out.engine, "one", "two") == 1
    assert out.getvalue() == "so far\n"
    assert "the unfinished turn was not kept" in capsys.readouterr().err


def test_switch_says_whether_the_session_is_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    engine.sessions["old"] = {"texts": ["a"]}
    assert talk(monkeypatch, engine, "/switch b", "/switch old") == 0
    assert capsys.readouterr().err == "new session b\nresumed old after 1 turn\n"


class PressesCtrlC(io.StringIO):
    """Standard output at which the user presses Ctrl-C as soon as a reply begins."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == "so far":
            signal.raise_signal(signal.SIGINT)
        return written


def test_interrupt_ends_the_reply_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(HOLD, "next")
    out = PressesCtrlC()
    monkeypatch.setattr(sys, "stdout", out)
    before = signal.getsignal(signal.SIGINT)
    assert talk(monkeypatch, engine, "one", "two") == 0
    assert signal.getsignal(signal.SIGINT) is before
    cancel = next(request for request in engine.log if isinstance(request, wire.Cancel))
    assert cancel.keep
    assert out.getvalue() == "so far, and a bit\nnext\n"
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "(stopped; the conversation keeps what you saw)"


def test_second_interrupt_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(HOLD, "never asked for")

    class PressesTwice(PressesCtrlC):
        def write(self, text: str) -> int:
            if text == "so far":
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", PressesTwice())
    assert talk(monkeypatch, engine, "one", "two") == 130
    assert len([request for request in engine.log if isinstance(request, wire.Turn)]) == 1


def test_no_engine_at_a_named_endpoint_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_args: object) -> None:
        raise ConnectionLost("no engine at ipc:///x")

    monkeypatch.setattr(chat, "connect", refuse)
    assert main(["chat", "--endpoint", "ipc:///x"]) == 1
    assert capsys.readouterr().err.startswith("sessionkv: no engine at ipc:///x\n")
