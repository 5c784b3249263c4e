"""Everything the front needs of a model's text: templates, token ids, replies.

Built from a *text folder* (``tokenizer.json``, ``chat_template.jinja``, ``text.json``). Keeps no
conversation: each call gets what it needs and gives a value back. Knows nothing of engine,
sockets, sessions' storage. One thread.

The life of a session in its terms, every id in the log exactly as sampled::

    text = TextModel.load(folder)
    root = text.root("Be brief.", None, now_s=time.time())     # root.ids are the root node's
    log = [*root.ids]

    new = normalise([{"role": "user", "content": "Hi"}], limits)
    log += text.delta(root, new, first=True, closed=False)     # ends with the generation prompt

    stream = text.reply_stream(stops, min_tokens=0)
    shown = [stream.push(token_id).text for token_id in sampled]
    if stream.stop is not None:
        ending = text.cut_at_stop(sampled, stream.stop.start)
    else:
        shown.append(stream.finish().text)
        ending = text.close_reply(sampled)                      # end token, length or cancel
    log += ending.ids(sampled)                                  # sampled[:keep_n] + replacement_ids

    log += text.delta(root, more, first=False, closed=ending.closed)

Where ``root.append_only`` is False the template rewrites what came before; then the whole prompt
comes from :meth:`TextModel.full`, or from :func:`sessionkv.text.follow.follow_ids`, which keeps
the sampled ids of replies wherever their text still stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from sessionkv.errors import InvalidRequest, TemplateRefused
from sessionkv.text.control import ControlMarks
from sessionkv.text.conversation import ChatRenderer
from sessionkv.text.detokenizer import Detokenizer, unfinished
from sessionkv.text.encoder import Encoder
from sessionkv.text.folder import TextFacts, TextFiles, read_text
from sessionkv.text.habits import find_habits
from sessionkv.text.messages import Message
from sessionkv.text.output import ReplyStream
from sessionkv.text.replies import ReplyEnding, close_reply, cut_reply, tokens_of
from sessionkv.text.reply_style import find_reply_style
from sessionkv.text.root import (
    RootText,
    behind_reply,
    first_turn,
    root_text,
    why_not_append_only,
)
from sessionkv.text.spelling import Speller
from sessionkv.text.stops import StopChecker
from sessionkv.text.template import ChatTemplate
from sessionkv.text.vocabulary import Vocabulary
from sessionkv.types import utf8_bytes
from sessionkv.types.reply_style import ReplyStyle

PROMPT_TAIL_TOKENS = 4
"""As many ids end a prompt that matter to its reply's text: no character has more bytes, and no
token fewer than one."""


class TextModel:
    """Templates, tokenising and detokenising of one model. One thread; keeps no conversation.

    Attributes:
        facts: Digests, BOS rule, vocabulary size, longest sequence.
        vocab_size: Ids from here on do not exist.
        max_token_bytes: No token stands for more bytes of text.
        eos_ids: Every id that ends a reply.
        closing_id: The template's own end of turn; None where it has no single one.
        reply_style: How the model writes tool calls and reasoning.
        encoder: Encodes raw text.
        speller: Spells ids as raw text.
        append_only: Whether plain sessions (no system prompt, no tools) only grow; see
            :class:`~sessionkv.text.root.RootText` for the answer that counts.
        append_only_reason: Why not, ``""`` where they do.
    """

    def __init__(self, facts: TextFacts, tokenizer: Tokenizer, template: str | None) -> None:
        """Try tokenizer and template out; :meth:`load` is the usual way in.

        Raises:
            ModelUnsupported: The tokenizer's decoder is of an unknown kind.
            ModelBroken: The template is not a Jinja template.
        """
        self.facts = facts
        self.vocab_size = facts.vocab_size
        self.eos_ids = frozenset(facts.eos_token_ids)
        self._vocabulary = Vocabulary(tokenizer)
        self.max_token_bytes = self._vocabulary.max_token_bytes
        self._marks = marks = ControlMarks(self._vocabulary.control)
        self.encoder = Encoder(tokenizer, self._vocabulary, marks)
        self.speller = Speller(self._vocabulary, marks)
        self._renderer: ChatRenderer | None = None
        self.closing_id: int | None = None
        self.reply_style = ReplyStyle()
        if template is not None:
            chat = ChatTemplate(template, bos_token=facts.bos_token, eos_token=facts.eos_token)
            habits = find_habits(chat, marks)
            self._renderer = ChatRenderer(chat, marks, habits)
            self.closing_id = self._vocabulary.control.get(habits.closing_token)
            self.reply_style = find_reply_style(self._renderer, template)
        plain = self.root(None, None, now_s=0.0)
        self.append_only, self.append_only_reason = plain.append_only, plain.reason

    @classmethod
    def load(cls, source: Path | TextFiles) -> TextModel:
        """Read a text folder, or what one would hold.

        Raises:
            ModelBroken: Files are missing, unreadable or contradict each other.
            ModelUnsupported: The tokenizer is of an unknown kind.
        """
        return cls(*read_text(source))

    @property
    def renderer(self) -> ChatRenderer:
        """The chat template.

        Raises:
            TemplateRefused: The model has none.
        """
        if self._renderer is None:
            raise TemplateRefused("the model has no chat template; send a prompt or tokens")
        return self._renderer

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a raw prompt: no template, control tokens as spelled, the tokenizer's BOS rule.

        With the rule on there is exactly one BOS at the start, whether it was spelled or not.

        Raises:
            InvalidRequest: A lone surrogate.
        """
        utf8_bytes("prompt", text)
        ids = self.encoder.encode(self._marks.escape(text))
        bos = self.facts.bos_token_id
        if self.facts.add_bos and bos is not None and ids[:1] != (bos,):
            return (bos, *ids)
        return ids

    def check_tokens(self, ids: Sequence[int], *, field: str = "tokens") -> None:
        """Check ids that a client sent. Good ones cost one pass in C.

        Raises:
            InvalidRequest: Naming the position of the first that is not in the vocabulary.
        """
        size = self.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < size):
            return
        at = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < size)
        raise InvalidRequest(f"{field}[{at}]", ids[at], f"a token id from 0 to {size - 1}")

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Bytes that each id stands for, control tokens spelled out."""
        return [self._vocabulary.shown[token_id] for token_id in ids]

    def calls_tool(self, reply: str) -> bool:
        """Whether a reply's text holds a tool call as the template writes one. A likely guess."""
        calling = "" if self._renderer is None else self._renderer.habits.calling
        return bool(calling) and calling in reply

    def root(self, system: str | None, tools_json: str | None, *, now_s: float) -> RootText:
        """What a session with this system prompt and these tools starts with.

        Renders a dozen short conversations; once a session. The same arguments give the same
        root. Never refuses: what the template cannot take shows at the first turn.

        Args:
            system: From :func:`~sessionkv.text.messages.check_system`.
            tools_json: From :func:`~sessionkv.text.messages.freeze_tools`.
            now_s: Wall-clock seconds, where the template's clock then stands.
        """
        root = RootText(system, tools_json, now_s)
        if self._renderer is None:
            return replace(root, reason="the model has no chat template")
        raw = root_text(self._renderer, root)
        reason = why_not_append_only(self._renderer, root)
        return replace(
            root, ids=self.encoder.encode(raw), raw=raw, append_only=not reason, reason=reason
        )

    def delta(
        self, root: RootText, new: Sequence[Message], *, first: bool, closed: bool
    ) -> tuple[int, ...]:
        """Ids that new messages append to a session's log, up to the generation prompt.

        Args:
            root: The session's; for any turn but the first it must be ``append_only``.
            new: What the client sent.
            first: The log is ``root.ids`` so far. Costs O(system prompt and new messages).
            closed: The log's last reply ended closed. Costs O(new messages).

        Raises:
            TemplateRefused: With the template's own words.
            ValueError: The root is not append-only.
        """
        if first:
            return self.encoder.encode_behind(first_turn(self.renderer, root, new), root.ids)
        if not root.append_only:
            raise ValueError(f"the session's template needs whole conversations: {root.reason}")
        raw = behind_reply(self.renderer, root, new)
        habits = self.renderer.habits
        if not closed:
            return self.encoder.encode_inside(raw)
        if not habits.closing or not raw.startswith(habits.closing):
            raise TemplateRefused("the chat template closes the reply in another way here")
        closing = self._vocabulary.control[habits.closing_token]
        return self.encoder.encode_behind(raw[len(habits.closing) :], (closing,))

    def full(
        self, root: RootText, messages: Sequence[Message], *, generation: bool = True
    ) -> tuple[int, ...]:
        """Ids of a whole conversation behind the root's messages. O(its length).

        For conversations without a session, ``RootText(None, tools_json, now_s)`` is root enough.

        Raises:
            TemplateRefused: With the template's own words.
        """
        return self.encoder.encode(self.raw(root, messages, generation=generation))

    def replay(self, root: RootText, messages: Sequence[Message]) -> tuple[tuple[int, ...], bool]:
        """Ids of a finished conversation as a log, and whether it ends closed. O(its length).

        For a log whose ids belong to another tokenizer: the next delta goes on from here.

        Raises:
            TemplateRefused: With the template's own words.
        """
        raw = self.raw(root, messages, generation=False)
        closing = self.renderer.habits.closing
        end = raw.rfind(closing) if closing else -1
        if end < 0:
            return self.encoder.encode(raw), False
        return self.encoder.encode(raw[: end + len(closing)]), True

    def raw(self, root: RootText, messages: Sequence[Message], *, generation: bool = True) -> str:
        """As :meth:`full`, but the raw text (see :mod:`sessionkv.text.control`)."""
        return self.renderer.render(
            (*root.messages, *messages),
            root.tools_json,
            now_s=root.now_s,
            generation=generation,
        )

    def decode(self, ids: Sequence[int], *, continues: bool = False, special: bool = False) -> str:
        """Text of ids.

        Args:
            ids: Any; those the tokenizer does not have are empty.
            continues: The text stands behind other text: a leading space is kept.
            special: Spell control tokens out instead of leaving them away.
        """
        table = self._vocabulary.shown if special else self._vocabulary.visible
        strip = self._vocabulary.strips_space and not continues
        detokenizer = Detokenizer(table, strip_space=strip)
        return detokenizer.push(ids) + detokenizer.finish()

    def reply_stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        continues: bool = False,
        prompt: Sequence[int] = (),
    ) -> ReplyStream:
        """Makes the text of one reply from its sampled ids.

        Args:
            stops: Stop strings.
            min_tokens: Stop strings count only in the text after this many tokens.
            continues: The reply goes on from the prompt's text (raw prompts and tokens): a
                leading space is kept.
            prompt: The prompt's ids, only the last four are looked at: where they end inside a
                character, the reply's first ids may finish it.
        """
        detokenizer = self._detokenizer(continues, prompt)
        return ReplyStream(detokenizer, StopChecker(stops, min_tokens) if stops else None)

    def close_reply(self, sampled: Sequence[int]) -> ReplyEnding:
        """How a reply enters the log that ended by an end token, by length or by cancel."""
        return close_reply(sampled, self.eos_ids, self.closing_id)

    def cut_at_stop(
        self,
        sampled: Sequence[int],
        num_chars: int,
        *,
        continues: bool = False,
        prompt: Sequence[int] = (),
    ) -> ReplyEnding:
        """How a reply enters the log whose text ends after ``num_chars``. O(reply).

        Args:
            sampled: All sampled ids.
            num_chars: :attr:`StopMatch.start <sessionkv.text.stops.StopMatch.start>`.
            continues: As given to :meth:`reply_stream`.
            prompt: As given to :meth:`reply_stream`.
        """
        return cut_reply(sampled, num_chars, self._detokenizer(continues, prompt), self.encoder)

    def tokens_of(
        self,
        sampled: Sequence[int],
        num_chars: int,
        *,
        continues: bool = False,
        prompt: Sequence[int] = (),
    ) -> int | None:
        """How many ids it takes for the first characters of a reply; None where it has fewer.

        Arguments as for :meth:`cut_at_stop`. O(reply).
        """
        return tokens_of(sampled, num_chars, self._detokenizer(continues, prompt))

    def _detokenizer(self, continues: bool, prompt: Sequence[int]) -> Detokenizer:
        tail = b"".join([self._vocabulary.shown[i] for i in prompt[-PROMPT_TAIL_TOKENS:]])
        return Detokenizer(
            self._vocabulary.visible,
            strip_space=self._vocabulary.strips_space and not continues,
            before=unfinished(tail),
        )
