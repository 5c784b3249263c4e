"""Text that may begin a stop string comes out when the reply ends otherwise."""

import pytest

from sessionkv import SamplingParams
from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, open_engine


@pytest.mark.parametrize("end", [(), (258,)], ids=["length", "end token"])
def test_tail_is_given_out(end):
    stream = built.chatml().reply_stream(["STOP"])
    pieces = [stream.push(i).text for i in (*b"aST", *end)]
    assert "".join(pieces) == "a"
    assert stream.finish().text == "ST"
    assert stream.text == "aST"
    assert stream.stop is None


@pytest.mark.parametrize("end", [(), (258,), (256,)], ids=["length", "closing", "other end"])
@pytest.mark.parametrize("kind", ["session", "generate"])
def test_engine_gives_the_tail_out_before_the_end(end, kind):
    sampled = (*b"aST", *end)
    sampling = SamplingParams(temperature=0.0, max_tokens=len(sampled), stop=("STOP",))
    with open_engine(engine_config(), runner={"script": Script(sampled)}) as engine:
        if kind == "session":
            stream = engine.open("a").stream("x", sampling=sampling)
        else:
            stream = engine.stream_generate("x", sampling=sampling)
        events = list(stream)
        assert "".join(event.text for event in events) == stream.result.text == "aST"
        assert stream.result.stop is None
        engine.assert_ledger()
