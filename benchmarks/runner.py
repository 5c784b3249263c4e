"""The runner alone, without engine or sockets, against transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.peer import TransformersPeer, random_tokens
from benchmarks.report import Options, Row, median_row, ratio_row

ABOUT = "the model's runner by itself: decode at 200 and 2,000, 8 together, prefill, next turn"
BLOCK_SIZE = 16
NUM_BLOCKS = 400
DECODED = 16
STREAMS = 8
CHUNK = 256
NEXT_TURN = 45


class _Sequences:
    """Drives a runner as the scheduler would: chunks of a prompt, then one token a step each."""

    def __init__(self, options: Options) -> None:
        from sessionkv.config import user_cache_dir
        from sessionkv.engine.model_runner import ModelRunner
        from sessionkv.model.prepare import prepare_model

        self.runner = ModelRunner(
            prepare_model(options.model, cache_dir=user_cache_dir()),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=4096,
            threads=options.threads,
            mirror_bytes=2**30,
        )
        self._steps = 0
        self._next_id = 0

    def start(self, tokens: Sequence[int], blocks: Sequence[int], *, cached: int = 0) -> int:
        """Prefill from ``cached`` on, in chunks; the table covers 64 tokens more."""
        from sessionkv.types import SamplingParams, SequenceStart

        self._next_id += 1
        begin = SequenceStart(
            self._next_id, tuple(blocks[: (len(tokens) + 64) // BLOCK_SIZE + 1]), cached, tokens,
            len(tokens), SamplingParams(temperature=0.0), frozenset(),
        )  # fmt: skip
        starts = (begin,)
        for at in range(cached, len(tokens), CHUNK):
            end = min(at + CHUNK, len(tokens))
            self.step({self._next_id: (at, tokens[at:end])}, starts, sample=end == len(tokens))
            starts = ()
        return self._next_id

    def step(
        self, new: dict[int, tuple[int, Sequence[int]]], starts: tuple = (), *, sample: bool = True
    ) -> dict[int, int]:
        """One plan; the sampled ids."""
        from sessionkv.types import SequenceStep, StepPlan

        self._steps += 1
        steps = tuple(SequenceStep(i, at, ids, (), sample) for i, (at, ids) in new.items())
        output = self.runner.execute(StepPlan(self._steps, starts, steps))
        return {i: token.token_id for i, token in output.sampled.items()}

    def end(self, seq_ids: Sequence[int]) -> None:
        from sessionkv.types import StepPlan

        self._steps += 1
        self.runner.execute(StepPlan(self._steps, ends=tuple(seq_ids)))

    def decode_rate(self, lengths: dict[int, int]) -> float:
        """Tokens a second of all sequences together, after one step to warm up."""
        last = dict.fromkeys(lengths, 5)
        for turn in range(DECODED + 1):
            if turn == 1:
                begun = time.perf_counter()
            last = self.step({i: (n + turn, [last[i]]) for i, n in lengths.items()})
        return len(lengths) * DECODED / (time.perf_counter() - begun)


def measure(options: Options) -> list[Row]:
    """Turn about in one process; the first sample warms up."""
    peer, ours = TransformersPeer(options), _Sequences(options)
    found: dict[str, list[float]] = {}
    blocks = list(range(NUM_BLOCKS))

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for sample in range(-1, options.repeats):
        if sample == 0:
            found.clear()
        for context in (200, 2000):
            tokens = random_tokens(context, context + sample)
            peer.reset()
            begun = time.perf_counter()
            first = peer.feed(tokens)
            add(f"prefill {context} theirs", time.perf_counter() - begun)
            add(f"decode {context} theirs", peer.decode_rate(first, DECODED))
            begun = time.perf_counter()
            seq_id = ours.start(tokens, blocks)
            add(f"prefill {context} ours", time.perf_counter() - begun)
            add(f"decode {context} ours", ours.decode_rate({seq_id: context}))
            ours.end([seq_id])
            more = [*tokens, *random_tokens(NEXT_TURN, sample)]
            peer.rewind(context)
            add(f"next turn {context} theirs", peer.first_token_s(more[context:]))
            begun = time.perf_counter()
            ours.end([ours.start(more, blocks, cached=context)])
            add(f"next turn {context} ours", time.perf_counter() - begun)
        streams = {}
        for i in range(STREAMS):
            tokens = random_tokens(200, 1000 * sample + i)
            streams[ours.start(tokens, blocks[i * 40 : i * 40 + 40])] = 200
        add("together", ours.decode_rate(streams))
        ours.end(list(streams))
    return _rows(found)


def _rows(found: dict[str, list[float]]) -> list[Row]:
    rows: list[Row] = []
    bounds = {("decode", 200): (">=", 1.5), ("decode", 2000): (">=", 1.3)}
    bounds |= {("prefill", 2000): ("<=", 1.0), ("next turn", 2000): ("<=", 0.8)}
    for kind, unit in (("decode", "tok/s"), ("prefill", "s"), ("next turn", "s")):
        for context in (200, 2000):
            pair = [
                median_row(f"{kind} at {context:,}, {who}", found[f"{kind} {context} {key}"], unit)
                for who, key in (("runner", "ours"), ("transformers", "theirs"))
            ]
            bound = bounds.get((kind, context))
            rows += [*pair, ratio_row(f"{kind} at {context:,}, ratio", *pair, bound=bound)]
    eight = median_row(f"{STREAMS} together at 200", found["together"], "tok/s")
    rows += [eight, ratio_row(f"{STREAMS} together / one", eight, rows[0], bound=(">=", 3.0))]
    return rows
