"""Entry point of the command line: Ctrl-C ends it quietly, from its first moments on.

Whatever takes time to import is imported inside, where an interrupt is caught; so this module
imports nothing that a program which has just started does not have yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
    """
    try:
        from sessionkv.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
