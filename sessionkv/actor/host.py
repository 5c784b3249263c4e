"""A built engine's core on its own thread, and what its front is told and tells it.

The same whether the front is a thread of this process or a process of its own: the sink takes
core's messages there. The front's come through :attr:`CoreHost.inbox`: a thread puts them there, or
core reads them itself from a source.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sessionkv.actor.front_setup import FrontSetup
from sessionkv.config import EngineConfig
from sessionkv.engine.access import apply_access
from sessionkv.engine.build import BuiltEngine
from sessionkv.engine.core import Core, FrontSink
from sessionkv.engine.inbox import Inbox, Source
from sessionkv.engine.messages import Drain, NewAccess
from sessionkv.errors import EngineStartFailed
from sessionkv.store.set_aside import SetAside
from sessionkv.text.folder import TextFiles
from sessionkv.types.access import Access

_log = logging.getLogger(__name__)

HURRY_S = 1.0
"""What a drain that is to end now still writes: what goes this fast."""


class CoreHost:
    """Owns a built engine and runs its core.

    Attributes:
        setup: For the front.
    """

    def __init__(
        self,
        built: BuiltEngine,
        config: EngineConfig,
        sink: FrontSink,
        *,
        source: Source[object] | None = None,
        access: Access | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            built: Owned from here on; closed if this fails.
            config: The engine's.
            sink: Takes core's messages to the front.
            source: Where the front's come from, unless threads of this process put them.
            access: Who may come in; None lets in whoever can.

        Raises:
            ModelBroken: The model's text folder cannot be read.
        """
        self._built = built
        self._config = config
        with ExitStack() as undo:
            undo.callback(built.resources.close)
            text = TextFiles.read(built.text) if isinstance(built.text, Path) else built.text
            undo.pop_all()
        self.setup = FrontSetup(
            text=text,
            model=config.model,
            pid=os.getpid(),
            max_model_len=built.parts.runner.max_model_len,
            limits=config.limits,
            access=access or Access(),
        )
        if source is not None:
            built.inbox.read_from(source)
        apply_access(built.parts, self.setup.access)
        self._core = Core(built.parts, built.inbox, sink)
        self._thread = threading.Thread(target=self._core.run, name="core", daemon=True)

    @property
    def inbox(self) -> Inbox[object]:
        """Takes the front's messages. Any thread."""
        return self._core.inbox

    def renew_access(self, access: Access) -> None:
        """Other keys and quotas from now on; connections whose key is gone are cut. Any thread."""
        self.inbox.put(NewAccess(access))

    def start(self) -> None:
        """Start the step loop; returns when it has what it needs of its thread.

        Raises:
            EngineStartFailed: It cannot have that.
        """
        self._thread.start()
        self._core.ready.wait()
        failure = self._core.start_failure
        if failure is not None:
            what = f"{type(failure).__name__}: {failure}"
            raise EngineStartFailed(f"the step loop could not be prepared ({what})") from failure

    @property
    def is_running(self) -> bool:
        """Whether the step loop runs. Core says its last word while it does."""
        return self._thread.is_alive()

    def drain(self, *, abandoned: bool = False) -> None:
        """Accept no more turns; core stops when the running ones have ended, or in time.

        Args:
            abandoned: The front is gone: running turns end at once.
        """
        self.inbox.put(Drain(self._config.limits.drain_s, abandoned))

    def hurry(self) -> None:
        """End a drain that has begun: running turns at once, and soon what is being written."""
        self.inbox.put(Drain(min(HURRY_S, self._config.limits.drain_s), abandoned=True))

    @property
    def num_turns(self) -> int:
        """Turns that run or wait now."""
        return self._core.num_turns

    def close(self) -> None:
        """Wait for the core's end and close everything under it. To be called after a drain."""
        if self._thread.ident is not None:
            self._thread.join(self._config.limits.drain_s + 5.0)
        if self._thread.is_alive():
            _log.error("the step loop did not end in time")
        self._built.resources.close()

    @property
    def report(self) -> dict[str, Any]:
        """Model and memory split, for people."""
        parts = self._built.parts
        journals = parts.store.journals_set_aside()
        return {
            "model": self._config.model,
            "pid": os.getpid(),
            "max_model_len": parts.runner.max_model_len,
            "block_size": parts.kv.block_size,
            "block_bytes": parts.runner.geometry.block_bytes,
            "kv_bytes_per_token": parts.runner.geometry.token_bytes,
            "weights_bytes": parts.runner.weights_bytes,
            "device_blocks": parts.runner.num_blocks,
            "device_bytes": parts.runner.pool_bytes,
            "host_bytes": parts.host_bytes,
            "disk_bytes": parts.disk_bytes,
            "store": str(self._built.store_path),
            "notes": [*self._built.memory.notes, *map(_set_aside, journals)],
        }


def _set_aside(journal: SetAside) -> str:
    return (
        f"A DAMAGED JOURNAL was set aside on {journal.moved_at} to {journal.path}: the sessions "
        "in it are not served. Restore the store from a backup or import an export of them; once "
        "you do not need the folder any more, remove it"
    )
