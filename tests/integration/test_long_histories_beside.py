"""A history of 2,048 blocks is admitted and fetched while another sequence decodes."""

from itertools import pairwise
from typing import Any

from benchmarks.keeping import KeepingFront
from sessionkv.cache.manager import KVCacheManager
from sessionkv.engine.build import BuiltEngine
from sessionkv.engine.checksum_runner import ChecksumRunner
from sessionkv.engine.core import Core
from sessionkv.engine.messages import (
    CancelTurn,
    OpenSession,
    StepTokens,
    SubmitTurn,
    TurnFinished,
)
from sessionkv.engine.runner import LaterResult
from sessionkv.engine.scheduler.admission import MOST_BLOCKS
from sessionkv.types import StepPlan, Tier, Transfer
from tests.builders.engine import Building, engine_config, greedy, oracle

BLOCKS = 2048
HISTORIES = [
    [(7 * i + 13 * number) % 50 + number for i in range(4 * BLOCKS)] for number in range(3)
]
NEW = [3, 1, 4, 1, 5]
STREAM = 9


def evicted_from_device(kv: KVCacheManager) -> int:
    return kv.usage().counters.evicted.get(Tier.DEVICE, 0)


class Front(KeepingFront):
    """Three histories one after the other, then a stream, and beside it the first one's next turn.

    That is asked when all that is next to go has been copied; the stream ends after it.

    Attributes:
        evicted_before: Blocks dropped from the device before that turn was asked; None until then.
        tokens: What each turn sampled.
        cache: Of the next turn, its report.
    """

    def __init__(self, built: BuiltEngine) -> None:
        super().__init__(turns=5)
        self._kv = built.parts.kv
        self.evicted_before: int | None = None
        self.tokens: dict[int, list[int]] = {}
        self.cache: Any = None

    def begin(self, inbox: Any) -> None:
        self.inbox = inbox
        for number in range(3):
            inbox.put(OpenSession(number, "local", f"s{number}", None, None, b"", None))
        self._ask(0, "s0", HISTORIES[0], 1)

    def _ask(self, turn_id: int, session: str | None, prompt: list[int], count: int) -> None:
        self.inbox.put(
            SubmitTurn(turn_id, "local", session, prompt, 0, b"", b"", greedy(count), frozenset())
        )

    def put(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, StepTokens):
                for turn in message.turns:
                    self.tokens.setdefault(turn.turn_id, []).extend(turn.token_ids)
                decoded = len(self.tokens.get(STREAM, ()))
                is_due = decoded >= 20 and not self._kv.ledger().transfers_in_flight
                if is_due and self.evicted_before is None:
                    self.evicted_before = evicted_from_device(self._kv)
                    self._ask(3, "s0", NEW, 3)
            elif isinstance(message, TurnFinished) and message.turn_id < 3:
                following = message.turn_id + 1
                if following < 3:
                    self._ask(following, f"s{following}", HISTORIES[following], 1)
                else:
                    self._ask(STREAM, None, [1, 2, 3], 9_000)
            elif isinstance(message, TurnFinished) and message.turn_id == 3:
                self.cache = message.cache
                self.inbox.put(CancelTurn(STREAM, keep=True))
        super().put(messages)


def test_decoding_goes_on_between_the_parts_of_an_admission_and_of_its_loads() -> None:
    launches: list[tuple[StepPlan, int, int]] = []
    begun = 0

    class Counting(ChecksumRunner):
        def launch(self, plan: StepPlan) -> LaterResult:
            if front.evicted_before is not None and not front.cache:
                launches.append((plan, evicted_from_device(built.parts.kv), begun))
            return super().launch(plan)

    def submit(transfer: Transfer) -> None:
        nonlocal begun
        begun += len(transfer.moves) if transfer.dst is Tier.DEVICE else 0
        carry_out(transfer)

    config = engine_config(blocks=2 * BLOCKS + 200, host_blocks=4 * BLOCKS, max_model_len=10_000)
    building = Building(runner_type=Counting, plans_ahead=True, full_read=False)
    built = building(config)
    carry_out = built.parts.mover.submit
    built.parts.mover.submit = submit
    try:
        front = Front(built)
        front.begin(built.inbox)
        Core(built.parts, built.inbox, front).run()
    finally:
        built.resources.close()

    joined = next(at for at, (plan, _, _) in enumerate(launches) if len(plan.steps) == 2)
    assert all(plan.steps[0].seq_id == STREAM for plan, _, _ in launches)
    by_launch = [counts for _, *counts in launches[: joined + 1]]
    pairs = [*pairwise([[front.evicted_before, 0], *by_launch])]
    evicted, loads = ([after[i] - before[i] for before, after in pairs] for i in (0, 1))
    assert sum(evicted) > BLOCKS - 200
    assert max(evicted) <= 2 * MOST_BLOCKS + 1  # and one that the stream took
    assert sum(loads) > BLOCKS - 200
    assert max(loads) <= MOST_BLOCKS
    prompt = [*HISTORIES[0], *front.tokens[0], *NEW]
    assert front.tokens[3] == oracle(prompt, greedy(3))
    assert front.tokens[STREAM] == oracle([1, 2, 3], greedy(len(front.tokens[STREAM])))
    assert front.cache.host_tokens == 4 * sum(loads)
    assert front.cache.computed_tokens == len(NEW) + 1
    built.parts.kv.check()
