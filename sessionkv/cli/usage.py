"""What was typed and cannot be done, in words of the command line."""

from __future__ import annotations

from sessionkv.errors import SessionKVError


class WrongUsage(SessionKVError):
    """The message says what to type instead. The exit code is 2."""

    code = "wrong_usage"
