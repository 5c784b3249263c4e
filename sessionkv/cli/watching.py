"""Something shown again and again until it is told to stop: ``top`` and ``stats --watch``."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live

from sessionkv.cli import output

LEAST_S = 0.1


def watch(render: Callable[[], RenderableType], *, every_s: float) -> int:
    """Show what ``render`` makes, anew every so often; 0 when ``q`` or Ctrl-C ends it.

    Off a terminal it is printed once, for whoever reads the pipe.
    """
    console = output.stdout()
    if not sys.stdout.isatty():
        console.print(render())
        return 0
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Group(render(), "", "[dim]q ends[/dim]"), refresh=True)
                if pressed(max(every_s, LEAST_S)):
                    return 0
        except KeyboardInterrupt:
            return 0


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A question that waits so many seconds: whether ``q`` was pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def pressed(seconds: float) -> bool:
        if not select.select([fd], [], [], seconds)[0]:
            return False
        typed = os.read(fd, 64)
        return not typed or b"q" in typed or typed == b"\x1b"

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
