"""Entry of a private engine process: ``python -m sessionkv.actor.child STATUS_FD LIFELINE_FD``.

The configuration comes as JSON on the lifeline pipe's first line. What happens is reported as JSON
lines on the status pipe: ``progress``, then ``ready`` or ``error``, exactly one. The process lives
as long as its parent holds the other end of the lifeline: at its end it drains and exits, whatever
it is doing, model loading included.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from typing import Any

_GRACE_S = 3.0


class _Status:
    """Writes JSON lines for the parent; a parent that is gone is the lifeline's business."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", encoding="utf-8")

    def send(self, kind: str, value: Any) -> None:
        try:
            self._file.write(json.dumps({kind: value}) + "\n")
            self._file.flush()
        except (BrokenPipeError, ValueError):
            return

    def close(self) -> None:
        try:
            self._file.close()
        except BrokenPipeError:
            return


def _watch_lifeline(fd: int, scratch: str | None, orphaned: threading.Event) -> None:
    """Exit when the parent's end of the pipe closes: politely first, then for sure."""
    while os.read(fd, 1):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line


def main() -> int:
    """Run the engine until the parent closes it or dies."""
    status, lifeline = _Status(int(sys.argv[1])), int(sys.argv[2])
    line = _read_line(lifeline)
    if not line:
        return 1  # the parent died before it said what to run
    request = json.loads(line)
    scratch, orphaned = request.get("scratch"), threading.Event()
    tempfile.tempdir = scratch  # whatever is left there when this process is killed goes with it
    # Until the engine handles signals itself, an early end is a plain one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(
        target=_watch_lifeline, args=(lifeline, scratch, orphaned), name="lifeline", daemon=True
    ).start()

    from sessionkv.actor.serve import run_serve
    from sessionkv.config import load_config
    from sessionkv.errors import EngineStartFailed, SessionKVError

    try:
        return run_serve(
            load_config(request["config"], environ={}),
            request["endpoint"],
            on_ready=lambda info: status.send("ready", info),
            on_progress=lambda event: status.send("progress", event),
        )
    except SessionKVError as error:
        status.send("error", error.to_wire())
        return 1
    except Exception as failure:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        traceback.print_exc()
        words = f"the engine could not start ({type(failure).__name__}: {failure})"
        status.send("error", EngineStartFailed(words).to_wire())
        return 1
    finally:
        status.close()
        if scratch and orphaned.is_set():  # else the parent removes it, and may read the log first
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
