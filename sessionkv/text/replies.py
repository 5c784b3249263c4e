"""How a reply's sampled ids enter the log when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.text.detokenizer import Detokenizer
from sessionkv.text.encoder import Encoder


@dataclass(frozen=True, slots=True)
class ReplyEnding:
    """What of a reply stays: the first ``keep_n`` sampled ids, then ``replacement_ids``.

    Attributes:
        keep_n: Sampled ids that are kept.
        replacement_ids: Ids put behind them.
        closed: The log now ends with the template's own end of turn. Where it does not, the next
            turn's delta brings it.
    """

    keep_n: int
    replacement_ids: tuple[int, ...] = ()
    closed: bool = False

    def ids(self, sampled: Sequence[int]) -> tuple[int, ...]:
        """The reply as it stands in the log."""
        return (*sampled[: self.keep_n], *self.replacement_ids)


def close_reply(
    sampled: Sequence[int], eos_ids: frozenset[int], closing_id: int | None
) -> ReplyEnding:
    """Ending of a reply that no stop string cut.

    An end token at its end stands for the template's closing and becomes it; where the template
    has none, it goes. A reply that does not end in one (length, cancel) stays open as it is.
    """
    if not sampled or sampled[-1] not in eos_ids | {closing_id}:
        return ReplyEnding(len(sampled))
    if closing_id is None:
        return ReplyEnding(len(sampled) - 1)
    if sampled[-1] == closing_id:
        return ReplyEnding(len(sampled), closed=True)
    return ReplyEnding(len(sampled) - 1, (closing_id,), closed=True)


def tokens_of(sampled: Sequence[int], num_chars: int, detokenizer: Detokenizer) -> int | None:
    """How many of the first ids it takes to have so much text; None where it is not there yet.

    Args:
        sampled: All sampled ids.
        num_chars: At least one.
        detokenizer: Fresh, with the settings the text was made with.
    """
    have = 0
    for index, token_id in enumerate(sampled):
        have += len(detokenizer.push_one(token_id))
        if have >= num_chars:
            return index + 1
    return None


def cut_reply(
    sampled: Sequence[int], num_chars: int, detokenizer: Detokenizer, encoder: Encoder
) -> ReplyEnding:
    """Ending of a reply whose text is cut after ``num_chars`` characters. O(reply).

    Kept are the ids up to the last token boundary within the text that is also a boundary of
    characters; what is left of the text is encoded anew.

    Args:
        sampled: All sampled ids.
        num_chars: Characters of the reply's text to keep.
        detokenizer: Fresh, with the settings the text was made with.
        encoder: For the visible part of the token that is cut through.
    """
    keep_n = kept_chars = 0
    rest = ""
    for index, token_id in enumerate(sampled):
        rest += detokenizer.push_one(token_id)
        if kept_chars + len(rest) > num_chars:
            break
        if not detokenizer.pending:
            keep_n, kept_chars, rest = index + 1, kept_chars + len(rest), ""
            if kept_chars == num_chars:
                break
    else:
        rest += detokenizer.finish()
    return ReplyEnding(keep_n, encoder.encode_text_inside(rest[: num_chars - kept_chars]))
