"""One engine in this process: core on its own thread, and its front for whoever runs a loop."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import ExitStack
from typing import Any

from sessionkv.actor.front import EngineInfo, Front
from sessionkv.actor.writer import Writer
from sessionkv.config import EngineConfig
from sessionkv.engine.build import BuiltEngine
from sessionkv.engine.core import Core, FrontSink
from sessionkv.engine.messages import Drain
from sessionkv.ipc.limits import limits_to_map
from sessionkv.text.model import TextModel

_log = logging.getLogger(__name__)


class EngineHost:
    """Joins a built engine and its front. The owner runs the front's loop on one thread.

    Attributes:
        front: Fed by the owner's loop only.
        info: What clients and ``serve`` are told.
    """

    def __init__(self, built: BuiltEngine, config: EngineConfig, sink: FrontSink) -> None:
        """Start nothing yet.

        Args:
            built: Owned from here on; closed if this fails.
            config: The engine's.
            sink: Takes core's messages to the front's thread.

        Raises:
            ModelError: The model's text folder cannot be used.
        """
        self._built = built
        self._config = config
        with ExitStack() as undo:
            undo.callback(built.resources.close)
            text = TextModel.load(built.text)
            undo.pop_all()
        engine_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        limits = limits_to_map(config.limits) | {
            "max_model_len": built.parts.runner.max_model_len,
            "vocab_size": text.vocab_size,
        }
        info = EngineInfo(engine=engine_id, pid=os.getpid(), model=config.model, limits=limits)
        writer = Writer(text, config.limits, built.parts.runner.max_model_len)
        self.front = Front(writer, config.limits, info)
        self._core = Core(built.parts, built.inbox, sink)
        self._thread = threading.Thread(target=self._core.run, name="core", daemon=True)

    def start(self) -> None:
        """Start the step loop; returns when it has what it needs of its thread."""
        self._thread.start()
        self._core.ready.wait()

    def pass_on(self) -> None:
        """Hand what the front has for core to core. The front's thread."""
        for message in self.front.to_core:
            self._core.inbox.put(message)
        self.front.to_core.clear()

    def drain(self) -> None:
        """Accept no more turns; core stops when the running ones have ended, or in time."""
        self._core.inbox.put(Drain(self._config.limits.drain_s))

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
            "notes": list(self._built.memory.notes),
        }
