"""Stored and imported bytes: whatever they are, reading them gives a value or one error."""

from __future__ import annotations

import json

import pytest

from sessionkv.errors import InvalidRequest, SessionDamaged
from sessionkv.text.messages import Message, dump_messages
from sessionkv.text.stored import check_blobs, read_messages, read_reply, read_root
from tests.builders.store import node

NONSENSE = [
    b"\xff",
    b"5",
    b"[" * 100_000,
    b"[1]",
    b'{"a":' * 100_000,
    b"no json",
    b'"x"',
    b"9" * 5000,
]
SPLIT = json.dumps([{"role": "user", "content": "\ud800"}]).encode()
REPLY = b'{"content":"ok","role":"assistant"}'


def test_what_was_written_is_read_back() -> None:
    messages = (Message("user", "hi"), Message("assistant", "ho"))
    assert read_messages(1, dump_messages(messages)) == messages
    assert read_messages(1, b"") == ()
    assert read_reply(1, REPLY) == Message("assistant", "ok")
    assert read_root(1, b"") == read_root(1, b"{}") == (None, None)
    assert read_root(1, b'{"system":"s","tools":"[{}]"}') == ("s", "[{}]")


@pytest.mark.parametrize("blob", [*NONSENSE, b"{}", b"null", SPLIT])
def test_messages_that_cannot_be_read_are_one_error(blob: bytes) -> None:
    with pytest.raises(SessionDamaged, match="the messages of turn 7 cannot be read"):
        read_messages(7, blob)


@pytest.mark.parametrize("blob", [*NONSENSE, b"", b"{}", b'{"content":1}', SPLIT[1:-1]])
def test_a_reply_that_cannot_be_read_is_one_error(blob: bytes) -> None:
    with pytest.raises(SessionDamaged, match="the reply of turn 7 cannot be read"):
        read_reply(7, blob)


@pytest.mark.parametrize(
    "blob",
    [
        *NONSENSE,
        b'{"system":5}',
        b'{"system":"\\ud800"}',
        b'{"tools":5}',
        b'{"tools":"[5]"}',
        b'{"tools":"["}',
        b'{"tools":"[{\\"a\\":NaN}]"}',
        json.dumps({"tools": "[" * 100_000}).encode(),
    ],
)
def test_a_root_that_cannot_be_read_is_one_error(blob: bytes) -> None:
    with pytest.raises(SessionDamaged, match="of turn 7 cannot be read"):
        read_root(7, blob)


@pytest.mark.parametrize("kind", ["chat", "raw"])
@pytest.mark.parametrize("blob", NONSENSE)
def test_every_blob_of_every_kind_is_checked(kind: str, blob: bytes) -> None:
    whole = {"incoming_blob": b"", "reply_blob": REPLY, "sampling_blob": b"{}"}
    check_blobs(node(2, 1, kind=kind, **whole))
    for name in whole:
        with pytest.raises(InvalidRequest, match="turn 2 "):
            check_blobs(node(2, 1, kind=kind, **{**whole, name: blob}))
    with pytest.raises(InvalidRequest, match="turn 1 "):
        check_blobs(node(1, incoming_blob=blob))
