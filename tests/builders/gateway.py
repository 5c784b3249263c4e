"""A gateway over a served engine with the checksum runner, all on threads of this process.

Real HTTP on a free port of the loopback interface: ``gateway(engine.endpoint)`` serves beside any
engine, ``http_engine(folder)`` starts both. Tests talk to ``.http``, an ``httpx.Client``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sessionkv import EngineConfig
from sessionkv.gateway.server import GatewayServer
from sessionkv.gateway.settings import GatewaySettings
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.text.builtin import IM_END, write_byte_text
from sessionkv.types import StepPlan
from tests.builders.engine import SocketEngine, engine_config, socket_engine

MODEL = "checksum"
HEAD = [ord(c) for c in "assistant"]


@dataclass(frozen=True)
class Gateway:
    """A served gateway.

    Attributes:
        url: Its root, without a slash at the end.
        http: A client of it.
    """

    url: str
    http: httpx.Client

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def stream(self, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
        """All events of a stream: parsed data, the word ``[DONE]`` as it is."""
        with self.http.stream("POST", path, json=body, **options) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return [parsed(line.removeprefix("data: ")) for line in lines]


def parsed(data: str) -> Any:
    """The value of one event."""
    return data if data == "[DONE]" else json.loads(data)


@contextmanager
def gateway(endpoint: str, **settings: Any) -> Iterator[Gateway]:
    """A gateway to the engine at an endpoint; ``settings`` as for :class:`GatewaySettings`."""
    ready = threading.Event()
    server = GatewayServer(GatewaySettings(endpoint, **settings), ready.set)
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="gateway")
    thread.start()
    try:
        assert ready.wait(30)
        assert server.started, "the gateway did not start"
        # No connection outlives its request, so that tests which share an engine leave none open.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=url, timeout=60, limits=limits) as client:
            yield Gateway(url, client)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the gateway did not stop"


@dataclass(frozen=True)
class HttpEngine(Gateway):
    """A gateway and its engine."""

    engine: SocketEngine


@contextmanager
def http_engine(
    config: EngineConfig | None = None,
    *,
    gates: Gates = OPEN_GATES,
    gate: Callable[[StepPlan], None] | None = None,
    runner: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[HttpEngine]:
    """Both; arguments as for ``socket_engine`` and :func:`gateway`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket_engine(
            Path(folder), config or engine_config(blocks=512), gates=gates, gate=gate, runner=runner
        ) as engine,
        gateway(engine.endpoint, **settings) as served,
    ):
        yield HttpEngine(served.url, served.http, engine)


TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- set content = message.content or '' -%}"
    "{%- set thoughts = message.reasoning_content or '' -%}"
    "{%- if message.role == 'assistant' and '</think>' in content -%}"
    "{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}"
    "{%- endif -%}"
    "{%- if message.role == 'assistant' and thoughts and loop.index0 > ns.last -%}"
    "{{- '<think>\n' + thoughts + '\n</think>\n\n' -}}"
    "{%- endif -%}"
    "{{- content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '\n' if content or not loop.first else '' -}}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- call.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""ChatML with tools, Hermes calls and thoughts, kept only behind the last user message."""


def tools_folder(folder: Path) -> Path:
    """Text of one token a byte with :data:`TOOLS`, as ``text_dir`` of an engine."""
    write_byte_text(folder)
    path = folder / "chat_template.jinja"
    path.unlink()
    path.write_text(TOOLS)
    return folder


def replies(*texts: str | bytes) -> Callable[[Sequence[int]], int | None]:
    """A runner's script: each answer says the next of these texts and ends; then the hash again.

    Which answer it is, is how many the conversation has already; so a request made twice is
    answered twice the same.
    """
    scripted = [text.encode() if isinstance(text, str) else text for text in texts]
    opening = [257, *HEAD, 10]  # of an assistant's message

    def script(ids: Sequence[int]) -> int | None:
        starts = [
            i + len(opening)
            for i in range(len(ids) - len(opening) + 1)
            if ids[i] == opening[0] and list(ids[i : i + len(opening)]) == opening
        ]
        number = len(starts) - 1
        if not 0 <= number < len(scripted):
            return None
        said = len(ids) - starts[-1]
        return scripted[number][said] if said < len(scripted[number]) else IM_END

    return script
