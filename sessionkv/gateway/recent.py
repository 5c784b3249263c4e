"""Which earlier exchange a request goes on from although its client has changed something in it.

Only to be told of: what a request may reuse is found by its whole content, whatever is found here.
Rests on memory, so after a restart less is known, and what is not known is no change.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from sessionkv.gateway.transcript import Message, Said, Transcript

Key = TypeVar("Key")

MAX_LABELS = 1_000
"""Conversations that are remembered by name or by how they begin."""
MAX_ANSWERS = 20_000
"""Answers by which exchanges are remembered."""
_SURE_BYTES = 120
"""Answers that say so much, JSON around them included, are not given twice by chance."""
_MOST_TRIES = 4


@dataclass(frozen=True, slots=True)
class Known:
    """An exchange.

    Attributes:
        name: Its session.
        root: Digest of its system prompt and tools.
        label: Digest of the client's name of the conversation, or of how it begins.
        digests: Of its conversation up to each message, the answer included.
        answers: Its answers by themselves.
    """

    name: str
    root: str
    label: bytes
    digests: tuple[str, ...]
    answers: frozenset[bytes]

    def parted_from(self, transcript: Transcript) -> bool:
        """Whether the two differ before either ends."""
        if self.root != transcript.root:
            return True
        digests = transcript.all_digests()
        return any(one != other for one, other in zip(self.digests, digests, strict=False))


class Recent:
    """Exchanges of one caller. One event loop."""

    def __init__(self) -> None:
        """Know of none."""
        self._labels: OrderedDict[bytes, Known] = OrderedDict()
        self._answers: OrderedDict[bytes, Known] = OrderedDict()

    def put(self, name: str, transcript: Transcript, reply: Message, label: str | None) -> None:
        """The exchange of that name is the last one of its conversation. O(messages)."""
        said, digest = transcript.with_answer(reply)
        answers = [*(item.digest for item in _answers(transcript)), said.digest]
        known = Known(
            name,
            transcript.root,
            _label(transcript, label),
            (*transcript.all_digests(), digest),
            frozenset(answers),
        )
        _put(self._labels, known.label, known, most=MAX_LABELS)
        for answer in answers:
            _put(self._answers, answer, known, most=MAX_ANSWERS)

    def changed(self, transcript: Transcript, label: str | None) -> Known | None:
        """The exchange that a request goes on from and differs from; None where there is none.

        An answer that was given here says which conversation it is, whatever was changed around it.
        Without one it takes the client's own name of the conversation, and the same system prompt
        and tools: helpers share the name and have others.
        """
        answers = _answers(transcript)
        known = self._answered(transcript, label, answers)
        if known is None:
            known = self._labels.get(_label(transcript, label))
            if known is not None and not answers:
                known = known if label and known.root == transcript.root else None
        return known if known is not None and known.parted_from(transcript) else None

    def _answered(
        self, transcript: Transcript, label: str | None, answers: Sequence[Said]
    ) -> Known | None:
        """The last exchange with the newest answer of these that was given here."""
        tries = _MOST_TRIES
        for said in reversed(answers):
            known = self._answers.get(said.digest)
            if known is None:
                continue
            if known.label == _label(transcript, label):
                return known
            if sum(item.size for item in answers if item.digest in known.answers) >= _SURE_BYTES:
                return known
            tries -= 1
            if not tries:
                break
        return None


def _label(transcript: Transcript, label: str | None) -> bytes:
    """Of a fixed size: a conversation may begin with a whole file."""
    text = label or transcript.opening  # not yet checked: surrogates may stand in it
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _answers(transcript: Transcript) -> list[Said]:
    return [said for said in transcript.said if said.is_answer]


def _put(table: OrderedDict[Key, Known], key: Key, known: Known, *, most: int) -> None:
    table[key] = known
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
