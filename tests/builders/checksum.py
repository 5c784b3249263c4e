"""The cold oracle of the checksum runner: what a fresh engine without any cache answers."""

from collections.abc import Sequence

from sessionkv.engine.checksum_runner import Vocabulary, extend, first_state, next_token
from sessionkv.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def tokens(count: int, *, start: int = 0) -> list[int]:
    """The invented token ids T(n), optionally from a later point of the same row."""
    return [(7 * i + 3) % 90 + 5 for i in range(start, start + count)]


def cold_oracle(
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    vocab_size: int = 512,
    fingerprint: str = "checksum",
    never_sample: frozenset[int] = frozenset(),
) -> list[int]:
    """Up to ``count`` tokens after ``prompt``, fewer where a stop id ends them."""
    state = first_state(fingerprint)
    for position, token_id in enumerate(prompt):
        state = extend(state, token_id, position)
    output: list[int] = []
    while len(output) < count:
        token_id = next_token(
            state,
            Vocabulary(vocab_size, never_sample),
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            num_output_tokens=len(output),
        )
        state = extend(state, token_id, len(prompt) + len(output))
        output.append(token_id)
        if token_id in stop_token_ids and len(output) >= sampling.min_tokens:
            break
    return output
