"""Any thread may call; each socket is touched by one thread only."""

from __future__ import annotations

import threading
from pathlib import Path

import zmq

from sessionkv.client import Client
from tests.builders.engine import engine_config, greedy, socket_engine
from tests.builders.fake_engine import FakeEngine, short_endpoint

THREADS = 16
ROUNDS = 40


def test_sixteen_threads_submit_and_cancel_on_one_client(monkeypatch):
    users: dict[int, set[int]] = {}

    def watched(name: str) -> None:
        original = getattr(zmq.Socket, name)

        def call(self, *args, **kwargs):
            users.setdefault(id(self), set()).add(threading.get_ident())
            return original(self, *args, **kwargs)

        monkeypatch.setattr(zmq.Socket, name, call)

    for name in ("send", "send_multipart", "recv", "recv_multipart", "getsockopt", "connect"):
        watched(name)
    texts: list[str] = []
    cancelled: list[int] = []

    def work(client: Client, number: int) -> None:
        session = client.session(f"s{number}")
        for i in range(ROUNDS):
            texts.append(session.turn(f"{number}-{i}").text)
            stream = session.stream("hold")
            if i % 2:
                assert stream.cancel() is None
            else:
                stream.close()
            cancelled.append(i)

    with short_endpoint() as endpoint, FakeEngine(endpoint), Client(endpoint) as client:
        threads = [threading.Thread(target=work, args=(client, n)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert client.generate(prompt="alive").text == "alive"
    assert sorted(texts) == sorted(f"{n}-{i}" for n in range(THREADS) for i in range(ROUNDS))
    assert len(cancelled) == THREADS * ROUNDS
    # The engine's socket, the client's, and the one that tells the client of a lost engine.
    assert [len(threads) for threads in users.values()] == [1, 1, 1]


def test_sixteen_threads_on_one_client_of_an_engine(monkeypatch):
    users: dict[int, set[str]] = {}

    def watched(name: str) -> None:
        original = getattr(zmq.Socket, name)

        def call(self, *args, **kwargs):
            users.setdefault(id(self), set()).add(threading.current_thread().name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(zmq.Socket, name, call)

    for name in ("send", "send_multipart", "recv", "recv_multipart", "getsockopt", "connect"):
        watched(name)
    turns: list[int] = []

    def work(client: Client, number: int) -> None:
        session = client.open(f"s{number}")
        for i in range(ROUNDS // 4):
            session.turn(tokens=[number], sampling=greedy(3))
            stream = session.stream(tokens=[number], sampling=greedy(500))
            if i % 2:
                stream.cancel()
            else:
                stream.close()
        turns.append(session.info().turns)

    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with (
            socket_engine(folder, engine_config(blocks=16_384)) as engine,
            Client(engine.endpoint) as client,
        ):
            threads = [threading.Thread(target=work, args=(client, n)) for n in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert len(turns) == THREADS
            # Those that were cancelled are not there; one may have ended before it was.
            assert all(ROUNDS // 4 <= count <= ROUNDS // 2 for count in turns)
    clients = ["sessionkv-client"]
    assert sorted(map(sorted, users.values())) == [["serve"], clients, clients]
