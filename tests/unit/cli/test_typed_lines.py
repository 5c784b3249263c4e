import errno
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sessionkv.cli import typed_lines as module
from sessionkv.cli.typed_lines import typed_lines

CTRL_C, CTRL_D, ALT = "\x03", "\x04", "\x1b"


def typed(keys: str, history: Path | None = None) -> list[str]:
    with create_pipe_input() as terminal:
        terminal.send_text(keys)
        with create_app_session(input=terminal, output=DummyOutput()):
            return list(typed_lines(lambda: "> ", history))


def test_enter_sends_and_ctrl_d_ends():
    assert typed(f"one\rtwo\r{CTRL_D}three\r") == ["one", "two"]


def test_ctrl_c_takes_back_what_is_typed_and_ends_where_nothing_is():
    assert typed(f"half{CTRL_C}whole\r{CTRL_C}more\r") == ["whole"]


def test_a_pasted_text_and_a_new_line_are_of_one_message():
    assert typed(f"\x1b[200~a\nb\x1b[201~\rc{ALT}\rd\r{CTRL_D}") == ["a\nb", "c\nd"]


def test_what_was_typed_is_kept_for_the_next_chat_and_for_no_other_user(tmp_path: Path):
    history = tmp_path / "made" / "history"
    assert typed(f"one\ntwo\r{CTRL_D}", history) == ["one", "two"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert typed(f"three\r{CTRL_D}", history) == ["three"]
    assert list(FileHistory(history).load_history_strings()) == ["three", "two", "one"]


def test_the_last_messages_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    history = tmp_path / "history"
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    assert typed("".join(f"{i}\nmore\r" for i in range(5)) + CTRL_D, history)
    typed(f"new\r{CTRL_D}", history)
    assert list(FileHistory(history).load_history_strings()) == ["new", "more", "4", "more"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["history"]


def test_a_file_that_cannot_be_written_is_said_and_costs_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    assert typed(f"one\rtwo\r{CTRL_D}", tmp_path / "file" / "history") == ["one", "two"]
    assert "is not kept" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(history: FileHistory, string: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(FileHistory, "store_string", full)
    assert typed(f"one\rtwo\r{CTRL_D}", tmp_path / "history") == ["one", "two"]
    assert capsys.readouterr().err.count("is not kept") == 1
