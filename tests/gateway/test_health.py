"""``/health``, ``/ready`` and ``/version``."""

from importlib.metadata import version

from sessionkv.engine.messages import Drain
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, StepGate
from tests.builders.gateway import http_engine


def test_an_engine_that_serves() -> None:
    with http_engine() as engine:
        assert engine.http.get("/health").json() == {"status": "ok"}
        ready = engine.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["model"] == "checksum"
        about = engine.http.get("/version").json()
        assert about["version"] == version("sessionkv")
        assert about["protocol"] == 1


def test_an_engine_that_drains_and_one_that_is_gone() -> None:
    gate = StepGate()
    with http_engine(gate=gate) as engine, engine.engine.client() as client:
        turn = Later(lambda: client.generate("x", sampling=GREEDY))
        gate.reached()
        engine.engine.host.inbox.put(Drain(30.0))
        # Core stands in its step: the front answers, and the engine counts as alive.
        assert engine.http.get("/health").status_code == 200
        gate.open()
        seen = []
        while not seen or seen[-1] != "loading":
            answer = engine.http.get("/health")
            if answer.json()["status"] not in seen:
                seen.append(answer.json()["status"])
            assert answer.status_code == (200 if seen[-1] == "ok" else 503)
        assert set(seen) <= {"ok", "draining", "loading"}
        assert engine.http.get("/ready").status_code == 503
        turn.result()
