"""Programs on a disk of a few megabytes: a real one where this user may mount it, else a limit.

The stand-in limits how far any file may grow, which needs no rights; it is narrower than a disk, as
files do not take room from each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MOUNT = 'mount -t tmpfs -o size="$1",mode=0700 none "$2" && shift 2 && exec "$@"'

PRELUDE = '''
import errno, os, resource, sys
from pathlib import Path

FOLDER, IS_REAL, SIZE = Path(sys.argv[1]), sys.argv[2] == "real", int(sys.argv[3])
if not IS_REAL:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill_up():
    """Somebody else takes all the room that is left."""
    if not IS_REAL:
        sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
        limit(max(sizes))
        return
    with open(FOLDER / "filler", "wb", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC, error


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def give_room():
    """And gives it back."""
    if IS_REAL:
        (FOLDER / "filler").unlink()
    else:
        limit(SIZE)
'''
"""What programs begin with: ``FOLDER`` is on the disk."""


@cache
def _mounting() -> tuple[str, ...] | None:
    """A command under which the mount above works here."""
    own_user = ("unshare", "--user", "--map-root-user", "--mount")
    for command in (("unshare", "--mount"), own_user):
        try:
            done = subprocess.run(
                [*command, "sh", "-c", _MOUNT, "sh", "1m", "/mnt", "true"],
                capture_output=True,
                timeout=30,
                check=False,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return command
    return None


def run_on_small_disk(
    folder: Path, size: int, program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run ``PRELUDE`` and ``program`` with a disk of ``size`` bytes at ``folder``."""
    folder.mkdir(exist_ok=True)
    mounting = _mounting()
    kind = "real" if mounting else "limit"
    python = [sys.executable, "-c", PRELUDE + program, str(folder), kind, str(size), *arguments]
    command = [*mounting, "sh", "-c", _MOUNT, "sh", str(size), str(folder)] if mounting else []
    return subprocess.run(
        [*command, *python],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
