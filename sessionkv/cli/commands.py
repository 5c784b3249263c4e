"""Parses the command line, runs one command, and turns errors into one line.

Exit codes: 0 done, 1 an error (said on stderr), 2 wrong usage, 130 interrupted,
143 ``serve`` terminated before it was ready.

Imports nothing heavy: commands are modules of this package with a ``run(args)`` that are imported
when they are asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from sessionkv.cli.hints import hint_for
from sessionkv.cli.parser import build_parser
from sessionkv.cli.usage import WrongUsage
from sessionkv.errors import ConfigError, InvalidRequest, SessionKVError

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: Arguments without the program's name; None takes the process's own.

    Raises:
        KeyboardInterrupt: It was interrupted.
        SessionKVError: An error, where ``--debug`` was given.
    """
    args = build_parser().parse_args(argv)
    try:
        command = importlib.import_module(f"sessionkv.cli.{args.module}")
        code: int = command.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except SessionKVError as error:
        if args.debug:
            raise
        _print_error(error, args.module)
        is_usage = isinstance(error, ConfigError | InvalidRequest | WrongUsage)
        return EXIT_USAGE if is_usage else EXIT_ERROR
    return code


def _print_error(error: SessionKVError, module: str) -> None:
    hint = hint_for(error, module=module)
    sys.stderr.write(f"sessionkv: {' '.join(error.message.split())}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")
