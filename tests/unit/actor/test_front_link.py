"""What front and core say to each other arrives as it was said, whichever way it goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from sessionkv.actor.front_link import (
    FRAMES_AT_ONCE,
    FrontEnd,
    FrontEnded,
    FrontStarted,
    StartFront,
    link_codec,
)
from sessionkv.actor.front_setup import FrontSetup
from sessionkv.config import LimitsConfig
from sessionkv.engine import messages as m
from sessionkv.errors import ConnectionLost, NeverFits, SessionKVError, TurnFailed
from sessionkv.ipc import messages as wire
from sessionkv.ipc.frames import FrameSocket
from sessionkv.ipc.records import RecordCodec
from sessionkv.text.builtin import byte_text
from sessionkv.types import (
    BlockHash,
    CacheReport,
    FinishReason,
    MissReason,
    MissReport,
    NodeRecord,
    SamplingParams,
    TokenLogprob,
)
from sessionkv.types.access import Access, ApiKey, TenantQuota
from sessionkv.types.portable import PortableSession

REPORT = CacheReport(
    prompt_tokens=9,
    device_tokens=4,
    host_tokens=0,
    disk_tokens=0,
    computed_tokens=5,
    ttft_ms=1.5,
    miss=MissReport(MissReason.EVICTED, token=4, expected="a", found="\ud800"),
    miss_tokens={"evicted": 5},
)
NODE = NodeRecord(
    node_id=2, parent_id=None, kind="root", token_ids=b"", num_incoming_tokens=0, num_messages=0,
    incoming_blob=b"{}", reply_blob=b"", finish_reason="", closed=False, sampling_blob=b"",
    tokenizer_digest="t", template_digest="", chain_hash=BlockHash(bytes(32)), created_s=1.25,
)  # fmt: skip
SAMPLING = SamplingParams(
    seed=2**64 - 1, stop=("a", "é"), stop_token_ids=(7,), logit_bias={3: -1.5}, max_tokens=None
)
MESSAGES: tuple[Any, ...] = (
    m.SubmitTurn(1, "local", "s", (1, 2, 2**32 - 1), 0, b"\0", b"", SAMPLING, frozenset({7, 9}),
                 deadline_s=0.5, claim=m.KeyClaim("k", b"\xff" * 32)),
    m.SubmitTurn(2, "local", None, None, 1, b"", b"", SamplingParams(), frozenset()),
    m.TurnRendered(1, (4, 5), 7, b"x", 2, MissReport(MissReason.HISTORY_EDITED, turn=1)),
    m.TurnRendered(1, (), 7, b"x", 2),
    m.PathWanted(3),
    m.TurnRefused(4, TurnFailed("no", why="x", figures=(1, 2))),
    m.StopAt(5, 17),
    m.Verdict(6, 3, (1,), True, FinishReason.LENGTH, b"r", b"", calls_tool=True),
    m.CancelTurn(7, keep=True),
    m.CancelTurn(8, error=NeverFits(9, 3)),
    m.OpenSession(9, "local", "s", None, b"", b"{}", "keep", 5),
    m.ImportSessions(10, "local", (NODE,), (PortableSession("s", 2, "keep", 1.0, 2.0),)),
    m.Call(11, "local", wire.Flush(3)),
    m.PublicPrefixes(((1, 2), (3,))),
    m.NewAccess(Access((ApiKey("a", b"d" * 32, "t", True, TenantQuota(1, None, 3, 4)),), ("p",))),
    m.Call(12, "local", wire.Export(4, session="s", nodes=(1, 2))),
    m.Call(13, "local", wire.List(5, prefix="x\ud800")),
    m.Drain(2.5, abandoned=True),
    m.RenderTurn(1, 2, b"root", 3, 1, True, "follow", 5.5,
                 path=(m.NodeText(2, "root", b"", b"", (), 0, False),
                       m.NodeText(3, "chat", b"i", b"r", (1, 2, 3), 2, True))),
    m.StepTokens((m.TurnTokens(1, 0, (5,), (), ends_turn=True),
                  m.TurnTokens(2, 4, (6,), ((TokenLogprob(6, -0.5), TokenLogprob(8, -2.0)),)))),
    m.StepTokens(()),
    m.TurnFinished(1, 4, FinishReason.STOP, 7, None, 9, REPORT),
    m.TurnCommitted(1),
    m.TurnProgress(2, 9, 4, 2, 1, 5),
    m.TurnReplayed(2, b"whole"),
    m.TurnDropped(3, TurnFailed("gone")),
    m.CallDone(4, {"sessions": ({"name": "s", "pin": None},), 5: (1.5, b"x", True)}),
    m.CallDone(5, error=TurnFailed("no")),
    m.CoreStopped(),
    m.CoreStopped(TurnFailed("x"), m.DrainReport(1, 2, 3, 4.5)),
    m.CoreStopped(None, m.DrainReport(1, 2, 3, 4.5, 6), (7, 8)),
    FrontStarted(TurnFailed("x")),
    FrontStarted(),
    FrontEnded(),
    StartFront("ipc:///x", FrontSetup(byte_text(), "checksum", 1, 9, LimitsConfig(drain_s=3.5))),
)  # fmt: skip


def plain(value: Any) -> Any:
    """Comparable, with errors by what they say."""
    if isinstance(value, SessionKVError):
        return type(value), value.to_wire()
    if dataclasses.is_dataclass(value):
        return type(value), {
            item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)
        }
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    frame = link_codec().encode([message])
    (back,) = link_codec().decode(frame)
    assert plain(back) == plain(message)


def test_every_message_of_the_engine_is_tried() -> None:
    kinds = {*get_args(m.FrontMessage), *get_args(m.CoreMessage)}
    assert kinds <= {type(message) for message in MESSAGES}


def test_lists_come_as_tuples_and_one_batch_stays_one() -> None:
    sent = [m.StepTokens((m.TurnTokens(1, 0, [5], []),)), m.TurnCommitted(1), m.TurnCommitted(2)]
    assert link_codec().decode(link_codec().encode(sent)) == [
        m.StepTokens((m.TurnTokens(1, 0, (5,), ()),)),
        *sent[1:],
    ]
    assert link_codec().decode(link_codec().encode([])) == []


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """Remembers which of its kind were checked."""

    checked: ClassVar[list[tuple[int, ...]]] = []
    numbers: tuple[int, ...]
    at: int = 0

    def __post_init__(self) -> None:
        self.checked.append(self.numbers)


def test_what_was_checked_when_it_was_made_is_not_checked_again() -> None:
    codec = RecordCodec([Checked])
    made = [Checked((1, 2), 3), Checked(())]
    Checked.checked.clear()
    assert codec.decode(codec.encode(made)) == made
    assert Checked.checked == []


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """Fields as the records of the codec may have them, and one as they may not."""

    where: Path
    either: int | Path


def test_what_could_not_be_read_back_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="cannot be"):
        RecordCodec([Told])


def test_the_front_takes_a_bounded_number_of_batches_in_their_order() -> None:
    ours, theirs = FrameSocket.pair()
    codec = link_codec()
    with ours, FrameSocket(theirs) as front_side:
        front = FrontEnd(front_side, link_codec(), silence_s=60.0)
        assert front.is_empty
        assert front.take() == []
        count = FRAMES_AT_ONCE + 5
        for number in range(count):
            ours.send(codec.encode([m.TurnCommitted(2 * number), m.TurnCommitted(2 * number + 1)]))
        first = front.take()
        assert len(first) == 2 * FRAMES_AT_ONCE
        assert not front.is_empty
        rest = front.take()
        assert front.is_empty
        assert [message.turn_id for message in (*first, *rest)] == list(range(2 * count))
        front.send([m.PathWanted(1), m.StopAt(2, 3)])
        (frame,) = ours.receive()
        assert codec.decode(frame) == [m.PathWanted(1), m.StopAt(2, 3)]
        ours.close()
        with pytest.raises(ConnectionLost):
            front.take()


def test_an_empty_frame_is_a_sign_of_life() -> None:
    ours, theirs = FrameSocket.pair()
    with ours, FrameSocket(theirs) as front_side:
        front = FrontEnd(front_side, link_codec(), silence_s=0.0)
        silent = FrontEnd(front_side, link_codec(), silence_s=-1.0)
        assert silent.is_silent
        before = front._heard_s
        ours.send(link_codec().encode([]))
        assert front.take() == []
        assert front._heard_s > before


def test_tokens_of_a_step_are_what_they_were_and_not_only_equal() -> None:
    sent = m.StepTokens((m.TurnTokens(2, 4, (6,), ((TokenLogprob(6, -0.5),),), True),))
    ((tokens,),) = (back.turns for back in link_codec().decode(link_codec().encode([sent])))
    assert type(tokens) is m.TurnTokens
    assert tokens.logprobs[0][0].logprob == -0.5
    assert tokens.ends_turn
