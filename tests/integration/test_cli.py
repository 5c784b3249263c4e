"""The command line against real engine processes, without a model."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory

from sessionkv import Client, SamplingParams
from sessionkv.errors import ConnectionLost, EngineClosed

ROOT = Path(__file__).parents[2]
SESSIONKV = (sys.executable, "-m", "sessionkv")


@dataclass(frozen=True)
class Place:
    """Where one test's engines listen and keep things."""

    endpoint: str
    store: Path
    environ: dict[str, str]

    def run(
        self, *args: str, stdin: str = "", endpoint: bool = True
    ) -> subprocess.CompletedProcess[str]:
        where = ("--endpoint", self.endpoint) if endpoint else ()
        return subprocess.run(
            [*SESSIONKV, *args, *where],
            cwd=ROOT, env=self.environ, input=stdin, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip

    @contextmanager
    def serving(self, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
        """``sessionkv serve checksum`` and what it printed up to ``ready``."""
        args = ("serve", "checksum", "--endpoint", self.endpoint, "--store", str(self.store))
        process = subprocess.Popen(
            [*SESSIONKV, *args, *flags],
            cwd=ROOT, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            try:
                printed = []
                for line in process.stdout:
                    printed.append(line.rstrip("\n"))
                    if printed[-1] == "ready":
                        break
                assert printed, process.stderr.read()
                assert printed[-1] == "ready", printed
                yield process, printed
            finally:
                process.terminate()
                process.wait(30)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Short paths: a socket's has at most 107 bytes."""
    folder = tmp_path_factory.mktemp("cli")
    environ = os.environ | {
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
    }
    return Place(f"ipc://{folder}/e.sock", folder / "store", environ)


def test_serve_says_what_it_serves_drains_and_exits_0(place: Place) -> None:
    with place.serving("--host-bytes", "1MiB") as (process, printed):
        facts = {line.split()[0]: line.partition(" ")[2].strip() for line in printed[:-1]}
        assert facts["socket"] == place.endpoint
        assert facts["pid"] == str(process.pid)
        assert facts["model"] == "checksum"
        assert facts["host"] == "up to 1.0 MiB"
        assert facts["disk"].endswith(f"in {place.store}")
        assert "blocks of 16 tokens" in facts["device"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"


def test_a_second_interrupt_ends_the_turns_that_the_first_waits_for(place: Place) -> None:
    with place.serving("--set", "limits.drain_s=1000") as (process, _):
        assert process.stdout is not None
        assert process.stderr is not None
        with Client(place.endpoint) as client:
            stream = client.open("a").stream("x", sampling=SamplingParams(ignore_eos=True))
            next(stream)
            process.send_signal(signal.SIGINT)
            line = "stopping: 1 turn has up to 1000 s; a second signal ends it now\n"
            assert process.stdout.readline() == line
            end = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < end:  # close ones count as one
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            assert process.returncode == 0
            with pytest.raises((ConnectionLost, EngineClosed)):
                list(stream)
        last = process.stdout.read()
        assert last.startswith("stopped after ")
        assert last.endswith(" s: 1 turn did not end\n")
        assert process.stderr.read() == ""


def test_second_serve_names_the_first(place: Place) -> None:
    with place.serving() as (process, _):
        again = place.run("serve", "checksum", "--store", str(place.store) + "-2")
        assert again.returncode == 1
        assert str(process.pid) in again.stderr
        assert "Traceback" not in again.stderr
        other = place.run(
            "serve", "checksum", "--store", str(place.store), "--endpoint", place.endpoint + "2",
            endpoint=False,
        )  # fmt: skip
        assert other.returncode == 1
        assert str(process.pid) in other.stderr


def test_chat_sessions_and_stats_of_the_running_engine(place: Place) -> None:
    with place.serving():
        assert place.run("sessions", "ls").stdout == "no sessions\n"
        assert place.run("sessions", "ls", "zz").stdout == "no sessions that start with 'zz'\n"
        flags = ("--session", "trip", "--temperature", "0", "--max-tokens", "8")
        first = place.run("chat", *flags, stdin="hello\n")
        assert first.returncode == 0, first.stderr
        assert "miss: first_turn" in first.stderr
        second = place.run("chat", *flags, stdin="and again\n/fork other\n")
        assert second.stderr.startswith("resumed trip after 1 turn\n")
        assert "no miss" in second.stderr
        listed = json.loads(place.run("sessions", "ls", "--json").stdout)
        assert [(info["name"], info["turns"]) for info in listed] == [("other", 2), ("trip", 2)]
        for action in (["rewind"], ["unpin"], ["pin", "--tier", "disk"]):
            acted = json.loads(place.run("sessions", *action, "trip", "--json").stdout)
            assert acted["bytes"].keys() == {"device", "host", "disk"}, action
            assert sum(acted["bytes"]["device"].values()) > 0, action
        shown = json.loads(place.run("sessions", "show", "trip", "--json").stdout)
        assert (shown["turns"], shown["pin"]["tier"]) == (1, "disk")
        assert place.run("sessions", "rm", "other").returncode == 0
        assert place.run("sessions", "show", "other").returncode == 1
        stats = json.loads(place.run("stats", "--json").stdout)
        assert stats["generation_tokens"] == 16
        assert place.run("stats").returncode == 0
        doctor = place.run("doctor", "--offline")
        assert f"{place.endpoint}: running" in " ".join(doctor.stdout.split())


def test_chat_with_a_running_engine_refuses_a_store_and_names_the_flags_it_ignores(
    place: Place,
) -> None:
    with place.serving() as (process, _):
        engine = f"the running engine (pid {process.pid})"
        refused = place.run("chat", "--store", str(place.store), stdin="hello\n")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"--store is not for {engine}" in refused.stderr
        flags = ("--threads", "1", "--device", "cpu", "--set", "cache.block_size=4")
        told = place.run("chat", *flags, "--max-tokens", "4", stdin="hello\n")
        assert told.returncode == 0
        first = told.stderr.splitlines()[0]
        assert first == f"{engine} keeps its settings; ignored: --set, --device, --threads"
        assert "ignored" not in place.run("chat", "--max-tokens", "4", stdin="hello\n").stderr


def test_chat_starts_a_private_engine_that_remembers(place: Place) -> None:
    flags = ("chat", "--model", "checksum", "--max-tokens", "8")
    first = place.run(*flags, stdin="hello\n", endpoint=False)
    assert first.returncode == 0, first.stderr
    second = place.run(*flags, stdin="/info\n", endpoint=False)
    assert "resumed chat after 1 turn\n" in second.stderr


def test_without_an_engine_the_error_is_one_line_and_advice(place: Place) -> None:
    done = place.run("sessions", "ls")
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("sessionkv: ")
    assert "sessionkv serve" in lines[0]
    assert "--endpoint" in lines[1]
    assert len(lines) == 2


class Terminal:
    """The side of a terminal at which a person sits."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, text: str) -> None:
        """Until ``text`` is written; what was written up to there counts as read."""
        while text not in self._seen:
            self._seen += os.read(self._side, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def wait_for_prompt(self, name: str) -> None:
        self.wait_for(BEGINS_TO_READ)
        self.wait_for(f"{name}>")


BEGINS_TO_READ = "\x1b[?2004h"  # a paste is to be marked as one from here on
XTERM = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
PASTE, PASTE_ENDS = "\x1b[200~", "\x1b[201~"


@pytest.mark.parametrize("at_end", ["quit", "ctrl-c"])
def test_chat_in_a_terminal(place: Place, at_end: str) -> None:
    with place.serving():
        ours, theirs = pty.openpty()
        terminal = Terminal(ours)
        try:
            process = subprocess.Popen(
                [*SESSIONKV, "chat", "--endpoint", place.endpoint, "--max-tokens", "8"],
                cwd=ROOT,
                env=place.environ | XTERM,
                stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            )  # fmt: skip
            os.close(theirs)
            terminal.wait_for("/help lists the commands")
            terminal.wait_for_prompt("chat")
            terminal.type("/help\r")
            terminal.wait_for("/rewind")
            terminal.wait_for_prompt("chat")
            terminal.type(f"{PASTE}hello\nthere{PASTE_ENDS}\r")
            terminal.wait_for("miss: first_turn")
            terminal.wait_for_prompt("chat")
            terminal.type("/fork b\r")
            terminal.wait_for_prompt("b")
            terminal.type("half a li")
            terminal.wait_for("half a li")
            process.send_signal(signal.SIGINT)  # clears it
            terminal.wait_for_prompt("b")
            if at_end == "ctrl-c":
                process.send_signal(signal.SIGINT)
            else:
                terminal.type("/quit\r")
            assert process.wait(30) == 0
        finally:
            os.close(ours)
    history = Path(place.environ["XDG_CACHE_HOME"]) / "sessionkv" / "chat_history"
    typed = ["/help", "hello\nthere", "/fork b", *(["/quit"] if at_end == "quit" else [])]
    assert list(FileHistory(history).load_history_strings()) == typed[::-1]
    assert history.stat().st_mode & 0o077 == 0
