"""What HTTP adds to the socket's time to the first token, and many streams at once. No model."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.engines import CHECKSUM_CONFIG, exactly
from benchmarks.report import Options, Row, median_row, percentile
from sessionkv import launch
from sessionkv.actor.gateway_process import GatewayProcess
from sessionkv.config import HttpConfig

ABOUT = "first tokens over HTTP against the socket, and 500 streams at once, checksum runner"
TURNS = 300
WARM_UP = 30
TOKENS = 8
STREAMS, STREAM_TOKENS = 500, 40
MAX_ADDED_US = 2000.0
PROMPT = "What is the weather in Oslo? " * 4


def _times_us(one: Callable[[int], Any]) -> list[float]:
    times = []
    for number in range(TURNS + WARM_UP):
        start = time.perf_counter()
        rest = one(number)
        times.append((time.perf_counter() - start) * 1e6)
        for _ in rest:  # the next one is alone again
            pass
    return times[WARM_UP:]


def _body(number: int, **fields: Any) -> dict[str, Any]:
    return {"model": "checksum", "stream": True, "temperature": 0, "ignore_eos": True} | fields


def _over_socket(client: Any) -> Callable[[int], Any]:
    def one(number: int) -> Any:
        stream = client.stream_generate(f"{number} {PROMPT}", sampling=exactly(TOKENS))
        next(stream)
        return stream

    return one


def _new_session(client: Any) -> Callable[[int], Any]:
    """What a chat's first request asks of the engine."""

    def one(number: int) -> Any:
        session = client.open(f"{time.time_ns()}", history="follow")
        messages = [{"role": "user", "content": f"{number} {PROMPT}"}]
        stream = session.stream(messages=messages, sampling=exactly(TOKENS))
        next(stream)
        return stream

    return one


def _over_http(
    connection: http.client.HTTPConnection, path: str, asked: Callable[[int], dict[str, Any]]
) -> Callable[[int], Any]:
    def one(number: int) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(_body(number) | asked(number)), headers)
        response = connection.getresponse()
        while not response.readline().startswith(b"data: "):
            pass
        return iter(response.readline, b"")

    return one


@contextmanager
def _connection(host: str, port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(host, port)
    connection.connect()
    # The request's head and its body are two writes, the second of which must not wait.
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield connection
    finally:
        connection.close()


def _completion(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} {PROMPT}", "max_tokens": TOKENS}


def _chat(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number} {PROMPT}"}]
    return {"messages": messages, "max_tokens": TOKENS}


@contextmanager
def _gateway(endpoint: str) -> Iterator[tuple[str, int]]:
    with GatewayProcess(HttpConfig("127.0.0.1", 0)) as gateway:
        gateway.start({"endpoint": endpoint}, lambda: None, meanwhile=lambda: None)
        host, port = gateway.url.removeprefix("http://").split(":")
        yield host, int(port)


async def _stream(host: str, port: int, number: int) -> str:
    """The text of one stream."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(_body(number, prompt=f"{number}", max_tokens=STREAM_TOKENS)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    text = ""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            text += json.loads(line[6:])["choices"][0]["text"]
    writer.close()
    return text


async def _all_streams(host: str, port: int) -> tuple[float, list[str]]:
    start = time.perf_counter()
    texts = await asyncio.gather(*(_stream(host, port, number) for number in range(STREAMS)))
    return time.perf_counter() - start, texts


def measure(options: Options) -> list[Row]:
    """One engine; added is the difference of the medians."""
    repeats = range(options.repeats)
    rows = []
    with launch(config=CHECKSUM_CONFIG) as engine, _gateway(engine.endpoint) as (host, port):
        client = engine.client()
        for name, path, asked, over_socket in (
            ("completions", "/v1/completions", _completion, _over_socket(client)),
            ("chat", "/v1/chat/completions", _chat, _new_session(client)),
        ):
            socket_us = [percentile(_times_us(over_socket), 50) for _ in repeats]
            rows.append(median_row(f"socket, {name}, p50 to a first token", socket_us, "us"))
            times = [
                percentile(_times_us(_over_http(connection, path, asked)), 50) for _ in repeats
            ]
            added = [a - b for a, b in zip(sorted(times), sorted(socket_us), strict=True)]
            rows.append(median_row(f"HTTP, {name}, p50", times, "us"))
            rows.append(
                median_row(f"added by HTTP, {name}, p50", added, "us", bound=("<=", MAX_ADDED_US))
            )
        said = {
            number: client.generate(f"{number}", sampling=exactly(STREAM_TOKENS)).text
            for number in range(STREAMS)
        }
        runs = [asyncio.run(_all_streams(host, port)) for _ in repeats]
        wrong = sum(text != said[n] for _, texts in runs for n, text in enumerate(texts))
        seconds = [elapsed for elapsed, _ in runs]
        rows.append(median_row(f"{STREAMS} streams of {STREAM_TOKENS} tokens", seconds, "s"))
        rows.append(Row("of them with an event lost or doubled", wrong, "", bound=("<=", 0)))
    return rows
