from __future__ import annotations

from sessionkv.ipc.messages import Delta, Done, Failure, Restarted, Result
from sessionkv.ipc.outbox import Outbox


def delta(request_id: int, offset: int, text: str, **more: object) -> Delta:
    return Delta(request_id, offset=offset, tokens=[ord(c) for c in text], text=text, **more)


def filled(max_unread: int = 2) -> Outbox:
    """An outbox whose client reads nothing, with request 1's ``a``, ``b`` sent and ``c`` kept."""
    box = Outbox(max_unread, timeout_s=30.0)
    for i, c in enumerate("abc"):
        box.push(delta(1, i, c), now_s=float(i))
    assert [r.text for r in box.take_ready()] == ["a", "b"]
    return box


def test_everything_passes_in_order_below_the_bound():
    box = Outbox(3)
    replies = [delta(1, 0, "a"), Result(2), delta(3, 0, "x"), Done(1), Failure(3)]
    for reply in replies:
        box.push(reply, 0.0)
    assert box.take_ready() == replies
    assert box.take_ready() == []
    assert box.overdue(1e9) == ()


def test_deltas_past_the_bound_grow_into_one():
    box = filled()
    box.push(delta(1, 3, "de"), 3.0)
    assert box.take_ready() == []
    box.consumed(1, 4.0)
    assert box.take_ready() == [Delta(1, offset=2, tokens=(99, 100, 101), text="cde")]
    assert box.unread == 2


def test_each_request_is_kept_apart_and_the_oldest_goes_first():
    box = filled()
    box.push(delta(2, 0, "x"), 3.0)
    box.push(delta(1, 3, "d"), 3.0)
    box.consumed(1, 4.0)
    assert [(r.id, r.text) for r in box.take_ready()] == [(1, "cd")]
    box.consumed(2, 5.0)
    assert [(r.id, r.text) for r in box.take_ready()] == [(2, "x")]


def test_results_pass_a_stalled_client():
    box = filled()
    box.push(Result(9), 3.0)
    assert box.take_ready() == [Result(9)]


def test_done_takes_what_was_kept_with_it():
    box = filled()
    box.push(Done(1, text="abc"), 3.0)
    kept, done = box.take_ready()
    assert (kept.text, kept.offset) == ("c", 2)
    assert done == Done(1, text="abc")
    assert box.unread == 3
    assert box.overdue(1e9) == ()


def test_a_restart_and_a_failure_void_what_was_kept():
    for reply in (Restarted(1, attempt=2), Failure(1, code="turn_failed")):
        box = filled()
        box.push(reply, 3.0)
        assert box.take_ready() == [reply]
        assert box.overdue(1e9) == ()


def test_logprobs_are_kept_with_their_tokens():
    box = Outbox(0)
    box.push(delta(1, 0, "a", logprobs=[[[97, -1.0]]]), 0.0)
    box.push(delta(1, 1, "b", logprobs=[[[98, -2.0]]]), 0.0)
    box.push(Done(1), 0.0)
    assert box.take_ready()[0].logprobs == [[[97, -1.0]], [[98, -2.0]]]


def test_the_deadline_runs_from_the_first_kept_delta_and_anew_from_each_reading():
    box = filled()
    assert box.overdue(31.9) == ()
    assert box.overdue(32.0) == (1,)
    box.push(delta(1, 3, "d"), 20.0)
    box.push(delta(2, 0, "x"), 21.0)
    box.consumed(1, 25.0)
    assert box.overdue(54.9) == ()
    assert box.overdue(55.0) == (2,)


def test_a_failure_after_the_deadline_frees_the_connection():
    box = filled()
    for request_id in box.overdue(100.0):
        box.push(Failure(request_id, code="slow_reader"), 100.0)
    assert [type(r) for r in box.take_ready()] == [Failure]
    assert box.overdue(1000.0) == ()


def test_reports_out_of_order_or_made_up_change_nothing_they_should_not():
    box = filled()
    box.consumed(0, 3.0)
    assert box.unread == 2
    box.consumed(10**9, 4.0)
    assert [r.text for r in box.take_ready()] == ["c"]
    assert box.unread == 1
    box.consumed(1, 5.0)
    assert box.unread == 1


def test_what_the_transport_had_no_room_for_goes_first():
    box = Outbox(9)
    for i, c in enumerate("abc"):
        box.push(delta(1, i, c), 0.0)
    ready = box.take_ready()
    box.push(delta(1, 3, "d"), 0.0)
    box.put_back(ready[1:])
    assert [r.text for r in box.take_ready()] == ["b", "c", "d"]


def test_memory_is_one_reply_for_each_request_of_a_client_that_never_reads():
    box = Outbox(10)
    for i in range(5000):
        box.push(delta(1, i, "x"), 0.0)
    assert len(box.take_ready()) == 10
    box.consumed(10, 1.0)
    (rest,) = box.take_ready()
    assert (rest.offset, len(rest.tokens), rest.text) == (10, 4990, "x" * 4990)
