"""Nothing on the wire is ever executed: no pickle, no extension types, no open doors."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import msgpack
import pytest
import zmq

import sessionkv
from sessionkv import launch
from sessionkv.config import LimitsConfig
from sessionkv.errors import ConfigError, ProtocolViolation
from sessionkv.ipc.codec import decode_reply, decode_request
from sessionkv.ipc.endpoint import socket_path
from sessionkv.ipc.server import RouterServer
from tests.builders.engine import greedy
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient

ran: list[str] = []


class Payload:
    def __reduce__(self):
        return (ran.append, ("executed",))


EXTENSIONS = [
    msgpack.ExtType(1, pickle.dumps(Payload())),
    msgpack.ExtType(127, b""),
    msgpack.Timestamp(1, 2),
]


@pytest.mark.parametrize("value", EXTENSIONS, ids=repr)
def test_extension_types_are_refused_in_both_directions(value):
    head = {"v": 1, "id": 1}
    for frame in (
        msgpack.packb({**head, "t": "turn", "session": "a", "text": value}),
        msgpack.packb({**head, "t": "turn", "session": "a", "text": "x", "unknown": [value]}),
        msgpack.packb(value),
    ):
        with pytest.raises(ProtocolViolation):
            decode_request([frame], LimitsConfig())
    with pytest.raises(ProtocolViolation):
        decode_reply([msgpack.packb({**head, "t": "result", "value": [value]})])
    assert ran == []


def test_a_pickle_is_junk():
    with pytest.raises(ProtocolViolation):
        decode_request([pickle.dumps(Payload())], LimitsConfig())
    assert ran == []


def test_no_source_file_can_load_code_from_bytes():
    forbidden = re.compile(
        r"\b(pickle|dill|cloudpickle|shelve|marshal)\b|recv_pyobj|send_pyobj|torch\.load\(|\beval\(|\bexec\("
    )
    package = Path(sessionkv.__file__).parent
    linked = [package / name for name in ("ipc", "kernels", "store")]  # not followed by rglob
    files = {path.resolve() for root in (package, *linked) for path in root.resolve().rglob("*.py")}
    assert {"codec.py", "block_store.py", "sampling.py", "weights.py"} <= {f.name for f in files}
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(files)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


def test_the_socket_is_local_and_the_users_own():
    with short_endpoint() as endpoint, RouterServer(endpoint, LimitsConfig()) as server:
        assert server._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").startswith(b"ipc:///")
        assert socket_path(endpoint).stat().st_mode & 0o777 == 0o600
        assert socket_path(endpoint).parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError):
        RouterServer("tcp://0.0.0.0:0", LimitsConfig())


def test_a_live_engine_runs_nothing_and_lets_nobody_else_in(tmp_path):
    with (
        launch("checksum", store=tmp_path / "store") as engine,
        WireClient(engine.endpoint) as wire,
    ):
        for value in EXTENSIONS:
            for fields in ({"text": value}, {"text": "x", "unknown": [value]}, {value: 1}):
                frame = {"v": 1, "t": "turn", "id": 1, "session": "a", **fields}
                wire.socket.send(msgpack.packb(frame))
                assert wire.receive()["code"] == "protocol_violation"
        wire.socket.send(pickle.dumps(Payload()))
        assert wire.receive()["code"] == "protocol_violation"
        assert ran == []
        path = socket_path(engine.endpoint)
        lock = path.with_name(path.name + ".lock")
        for private, mode in ((path, 0o600), (lock, 0o600), (path.parent, 0o700)):
            assert (private.stat().st_mode & 0o777, private.stat().st_uid) == (mode, os.getuid())
        client = engine.client()
        client.open("a").turn("x", sampling=greedy(2))
        client.flush()
        for folder, _, files in os.walk(tmp_path / "store"):
            for name in files:
                assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0, name
