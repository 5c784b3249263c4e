from sessionkv.text.output import Piece
from sessionkv.text.stops import StopMatch
from tests.builders import text as built


def run(ids, stops=(), **options):
    stream = built.chatml().reply_stream(stops, **options)
    return stream, [*map(stream.push, ids), stream.finish()]


def test_text_without_stops():
    stream, pieces = run("aé".encode())
    assert [piece.text for piece in pieces] == ["a", "", "é", ""]
    assert stream.text == "aé"
    assert stream.stop is None


def test_stop_over_a_split_character():
    stream, pieces = run("xé!y".encode(), ("é!",))
    assert pieces[0] == Piece("x", None)
    assert pieces[3] == Piece("", StopMatch("é!", 1, 3))
    assert pieces[4:] == [Piece("", None), Piece("", None)]
    assert stream.text == "x"
    assert stream.stop == StopMatch("é!", 1, 3)


def test_end_tokens_have_no_text():
    assert run((*b"a", 258))[0].text == "a"
