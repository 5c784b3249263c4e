"""Start a private engine process and hold on to it.

Nothing here loads the engine's libraries into the calling process. The child lives while the
handle's pipe is open: when this process ends, however it ends, the child drains and exits.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sessionkv.client.client import Client
from sessionkv.config import EngineConfig
from sessionkv.errors import EngineStartFailed, error_from_wire
from sessionkv.ipc.endpoint import private_endpoint, private_folder

if TYPE_CHECKING:
    from sessionkv.client.async_client import AsyncClient

DEFAULT_START_TIMEOUT_S = 600.0
_LOG_TAIL_BYTES = 2000


class EngineProcess:
    """A running private engine. Close it, or use it as a context manager.

    Attributes:
        endpoint: Where clients connect.
        info: What the engine reported when it became ready (model, memory split).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: int,
        endpoint: str,
        info: Mapping[str, Any],
        scratch: Path,
    ) -> None:
        """Made by :func:`launch`."""
        self._process = process
        self._lifeline: int | None = lifeline
        self._scratch = scratch
        self._clients: list[Client] = []
        self.endpoint = endpoint
        self.info = info

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def client(self, *, key: str | None = None, tenant: str | None = None) -> Client:
        """A new client of this engine; closed with the handle if it is still open then."""
        client = Client(self.endpoint, key=key, tenant=tenant)
        self._clients.append(client)
        return client

    def async_client(self, *, key: str | None = None, tenant: str | None = None) -> AsyncClient:
        """A new asyncio client of this engine; closing it is the caller's."""
        from sessionkv.client.async_client import AsyncClient  # loads asyncio

        return AsyncClient(self.endpoint, key=key, tenant=tenant)

    def close(self, timeout_s: float = 30.0) -> None:
        """Let running turns end within the drain time, then stop the engine. Idempotent."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._reap(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a crash would: what was acknowledged is in the store. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._reap(10.0)

    def _reap(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> EngineProcess:
        """The handle itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def launch(
    model: str | None = None,
    *,
    store: str | Path | None = None,
    config: EngineConfig | None = None,
    endpoint: str | None = None,
    timeout_s: float = DEFAULT_START_TIMEOUT_S,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
) -> EngineProcess:
    """Start a private engine process with its own socket; returns when it is ready.

    Args:
        model: Overrides ``config.model``.
        store: Overrides ``config.store``; with none, a temporary one that goes with the engine.
        config: Everything else.
        endpoint: Where to listen; a private ``ipc://`` path by default.
        timeout_s: How long to wait for ready; a first start may download a model.
        on_progress: Called with ``{"stage", "done", "total", "unit"}`` while it starts.

    Raises:
        EngineStartFailed: The engine died or was not ready in time; carries its own words. An
            error of the engine's that has a class of its own is raised as that.
    """
    config = config or EngineConfig()
    if model is not None:
        config = replace(config, model=model)
    scratch = private_folder()
    if store is not None:
        config = replace(config, store=Path(store))
    elif config.store is None:
        config = replace(config, store=scratch / "store")
    try:
        return _start(
            config, endpoint or private_endpoint(scratch), scratch, timeout_s, on_progress
        )
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _start(
    config: EngineConfig,
    endpoint: str,
    scratch: Path,
    timeout_s: float,
    on_progress: Callable[[Mapping[str, Any]], None] | None,
) -> EngineProcess:
    status_read, status_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    log = (scratch / "engine.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "sessionkv.actor.child", str(status_write), str(lifeline_read)],
        pass_fds=(status_write, lifeline_read),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
    )
    log.close()
    os.close(status_write)
    os.close(lifeline_read)
    request = {"config": _plain(asdict(config)), "endpoint": endpoint, "scratch": str(scratch)}
    try:
        os.write(lifeline_write, json.dumps(request).encode() + b"\n")
        with os.fdopen(status_read, "rb") as status:
            info = _await_ready(process, status, scratch, time.monotonic() + timeout_s, on_progress)
    except BaseException:
        process.kill()
        process.wait()
        os.close(lifeline_write)
        raise
    return EngineProcess(process, lifeline_write, endpoint, info, scratch)


def _await_ready(
    process: subprocess.Popen[bytes],
    status: IO[bytes],
    scratch: Path,
    deadline_s: float,
    on_progress: Callable[[Mapping[str, Any]], None] | None,
) -> Mapping[str, Any]:
    """Read the child's status lines up to ``ready``; ``deadline_s`` is monotonic."""
    pending = b""
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([status], [], [], left_s)[0]:
            raise EngineStartFailed("the engine was not ready in time; " + _last_words(scratch))
        data = os.read(status.fileno(), 65536)
        if not data:
            process.wait()
            raise EngineStartFailed(
                f"the engine exited with code {process.returncode}; " + _last_words(scratch)
            )
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                info: Mapping[str, Any] = message["ready"]
                return info
            if "error" in message:
                raise error_from_wire(message["error"])
            if on_progress is not None:
                on_progress(message["progress"])


def _last_words(scratch: Path) -> str:
    try:
        text = (scratch / "engine.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        text = ""
    return f"its last words: {text.strip()}" if text.strip() else "it said nothing"


def _plain(value: Any) -> Any:
    """JSON-ready: paths as strings, None values left out."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return str(value) if isinstance(value, Path) else value
