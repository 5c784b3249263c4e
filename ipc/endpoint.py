"""Where an engine listens: one endpoint string that engine and client read alike.

An endpoint is ``ipc://`` and an absolute path. The socket lies in a folder of the user's own (0700)
and is 0600; a lock file beside it says which process serves it. ``tcp://`` is refused: it will
need keys first. Knows nothing of zmq.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from sessionkv.config import user_runtime_dir
from sessionkv.errors import ConfigError, EngineRunning

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket (``sockaddr_un`` less the closing NUL)."""


def default_endpoint() -> str:
    """Endpoint of the user's own engine, the same for engine and client.

    ``$XDG_RUNTIME_DIR/sessionkv/engine.sock``; where that path is too long for a socket, a short
    one under ``/tmp`` named by its digest.
    """
    return _fitting(user_runtime_dir() / "engine.sock")


def private_folder() -> Path:
    """A new folder for one engine's socket, and for what else goes with it; the caller removes it.

    In the system's folder for temporary files, unless a socket's path would be too long there.
    """
    parent = Path(tempfile.gettempdir()).absolute()
    if len(os.fsencode(parent / "skv-12345678" / "engine.sock")) > MAX_PATH_BYTES:
        parent = _short_dir()
        parent.mkdir(mode=0o700, exist_ok=True)
        _make_private(parent)
    return Path(tempfile.mkdtemp(prefix="skv-", dir=parent))


def private_endpoint(folder: Path) -> str:
    """Endpoint of an engine that owns a :func:`private_folder`."""
    return f"ipc://{folder}/engine.sock"


def _fitting(path: Path) -> str:
    raw = os.fsencode(path)
    if len(raw) > MAX_PATH_BYTES:
        path = _short_dir() / f"{hashlib.sha256(raw).hexdigest()[:16]}.sock"
    return f"ipc://{path}"


def socket_path(endpoint: str) -> Path:
    """Path of an endpoint's socket.

    Raises:
        ConfigError: Another transport, a relative path, or a path too long for a socket.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        raise ConfigError(
            "endpoint",
            endpoint,
            "ipc://PATH: an engine listens on Unix sockets only; for other machines there is "
            "`sessionkv serve --http`",
        )
    if scheme != "ipc" or not rest.startswith("/") or "\0" in rest:
        raise ConfigError("endpoint", endpoint, "ipc:// followed by an absolute path")
    size = len(os.fsencode(rest))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            "endpoint",
            endpoint,
            f"a path of at most {MAX_PATH_BYTES} bytes, this one has {size}",
        )
    return Path(rest)


def is_listening(endpoint: str) -> bool:
    """Whether some process accepts connections there now. Cost: one connect.

    Raises:
        ConfigError: As :func:`socket_path`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(socket_path(endpoint)))
        except BlockingIOError:  # listening, with a full backlog
            return True
        except OSError:
            return False
        return True


def prepare_folder(path: Path) -> None:
    """See that the folder of a socket is there.

    Made, 0700, are only the folders of :func:`default_endpoint`; any other is its owner's to make.

    Raises:
        ConfigError: It is not there or no folder, or one of the well-known folders cannot be made
            or is not private to this user.
    """
    folder = path.parent
    try:
        if folder in (user_runtime_dir(), _short_dir()):
            folder.mkdir(mode=0o700, exist_ok=True)
            _make_private(folder)
        elif not folder.is_dir():
            raise ConfigError(
                "endpoint", str(path), f"a path in a folder that exists; {folder} does not"
            )
    except OSError as error:
        raise ConfigError("endpoint", str(path), f"a folder that can be used ({error})") from None


def _short_dir() -> Path:
    return Path(f"/tmp/sessionkv-{os.getuid()}")


def _make_private(folder: Path) -> None:
    """The name can be guessed, so somebody else may have been there first."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError("endpoint", str(folder), "a folder that belongs to this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)


class EndpointLock:
    """Exclusive right to serve a socket path; ends with :meth:`release` or with the process.

    The file stays when the lock ends: removing it would let two engines lock two files of one name.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock ``<path>.lock`` and write this process's id into it.

        Raises:
            EngineRunning: Another process has it; ``details["pid"]`` says which.
            ConfigError: The file cannot be made.
        """
        name = f"{path}.lock"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("endpoint", name, f"a lock file ({error})") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    "endpoint", name, f"a file that can be locked ({error})"
                ) from None
            pid = int(text) if text.isdecimal() else None
            raise EngineRunning(
                f"an engine is already running (pid {pid}) at ipc://{path}",
                pid=pid,
                endpoint=f"ipc://{path}",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    @property
    def is_held(self) -> bool:
        """Whether it was not released yet."""
        return self._fd >= 0

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EndpointLock:
        """The lock itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release."""
        self.release()
