"""The engine's end: turns may finish, blocks of sessions are written, and what was left is told.

Both share one bound. Blocks are asked for as soon as the drain begins, so that they are written
while the last turns run; the most wanted first. Copies under way at the bound get a moment more,
so that what is reported as not written is exact. A journal that answers nothing is given up a
while after the bound: what it was given may be stored or not, and nobody is told either. Core
thread only.
"""

from __future__ import annotations

import logging

from sessionkv.engine.commits import Commits
from sessionkv.engine.durability import DurabilityDesk
from sessionkv.engine.messages import Drain, DrainReport
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.turns import TurnDesk
from sessionkv.errors import EngineClosed

_log = logging.getLogger(__name__)

LAST_MOVES_S = 2.0
"""How long past the bound copies under way are waited for."""
COMMIT_GRACE_S = 5.0
"""How long past the bound the journal is waited for. A disk that is only busy answers by then."""


class Drainer:
    """Ends an engine. Nothing happens before :meth:`begin`.

    Attributes:
        report: What was left undone; None until the drain is over.
    """

    def __init__(
        self, parts: CoreParts, turns: TurnDesk, commits: Commits, writes: DurabilityDesk
    ) -> None:
        self._parts = parts
        self._turns = turns
        self._commits = commits
        self._writes = writes
        self._writes_at_end = parts.config.cache.durability != "off"
        self._drain_s = self._begun_s = 0.0
        self._until_s: float | None = None
        self._turns_ended = False
        self._dropped_turns = 0
        self.report: DrainReport | None = None

    @property
    def begun(self) -> bool:
        """Whether the engine is ending."""
        return self._until_s is not None

    def begin(self, ask: Drain, now: float) -> None:
        """No more turns; everything is to be over ``ask.drain_s`` from now.

        Asked again it may end sooner, never later.
        """
        if self._until_s is None:
            self._turns.draining = True
            self._drain_s, self._begun_s = ask.drain_s, now
            self._until_s = now + ask.drain_s
            self._request_blocks()
        self._until_s = min(self._until_s, now + ask.drain_s)
        if ask.abandoned and not self._turns_ended:
            self._end_turns(now)

    def is_done(self, now: float) -> bool:
        """Whether nothing is left to wait for; ends turns and writing when their time is over."""
        if self._until_s is None:
            return False
        in_time = now < self._until_s
        if len(self._turns.active) > len(self._writes) and in_time:
            return False
        if not self._turns_ended:
            self._end_turns(now)
        if self._commits and now < self._until_s + COMMIT_GRACE_S:
            return False  # of turns that are acknowledged by it; the journal answers each
        if not in_time:
            self._parts.kv.drop_requests()
        if self._parts.kv.dirty_count() and now < self._until_s + LAST_MOVES_S:
            return False
        self._writes.answer_all(now)
        unwritten = self._parts.kv.num_retained_dirty() if self._writes_at_end else 0
        self.report = DrainReport(
            dropped_turns=self._dropped_turns,
            unwritten_blocks=unwritten,
            unwritten_bytes=unwritten * self._parts.runner.geometry.block_bytes,
            drain_s=min(self._drain_s, round(now - self._begun_s, 1)),
            unanswered_commits=len(self._commits),
        )
        if self._commits:
            _log.error(
                "the journal in %s has not answered %d %s %.1f s after the drain; they are given "
                "up, and may be stored or not",
                self._parts.config.store or "the engine's temporary folder",
                len(self._commits),
                "commit" if len(self._commits) == 1 else "commits",
                now - self._until_s,
            )
        return True

    def _end_turns(self, now: float) -> None:
        """Drop what still runs; what the last turns left is to be written too."""
        self._turns_ended = True
        before = len(self._turns.active)
        self._turns.drop_all(EngineClosed("the engine is shutting down"), now)
        self._dropped_turns = before - len(self._turns.active)
        self._request_blocks()

    def _request_blocks(self) -> None:
        if self._writes_at_end:
            self._parts.kv.request_retained()


def log_undone(report: DrainReport) -> None:
    """Warn of what a drain left undone, where no person is told otherwise."""
    if report.unwritten_blocks:
        _log.warning(
            "%d blocks (%.1f MiB) of sessions are not on disk after %g s; their turns are in the "
            "journal, and the next turns of these sessions compute them again",
            report.unwritten_blocks,
            report.unwritten_bytes / 2**20,
            report.drain_s,
        )
    if report.dropped_turns:
        noun = "turn" if report.dropped_turns == 1 else "turns"
        _log.warning("%d %s did not end within %g s", report.dropped_turns, noun, report.drain_s)
