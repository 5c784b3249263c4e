"""Text that may begin a stop string comes out when the reply ends otherwise."""

import pytest

from tests.builders import text as built


@pytest.mark.parametrize("end", [(), (258,)], ids=["length", "end token"])
def test_tail_is_given_out(end):
    stream = built.chatml().reply_stream(["STOP"])
    pieces = [stream.push(i).text for i in (*b"aST", *end)]
    assert "".join(pieces) == "a"
    assert stream.finish().text == "ST"
    assert stream.text == "aST"
    assert stream.stop is None
