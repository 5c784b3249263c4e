"""Branches of one conversation, edited, forked, made anew: each goes on from its own past."""

import pytest

from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle

SHORT = greedy(5)


class Branch:
    """A session and the ids its log must have."""

    def __init__(self, session, log, ends):
        self.session, self.log, self.ends = session, log, ends

    def turn(self, ids):
        shared = len(self.log)
        prompt = [*self.log, *ids]
        result = self.session.turn(tokens=ids, sampling=SHORT)
        assert list(result.tokens) == oracle(prompt, SHORT)
        # All that was computed of the past is found: the last token sampled has no KV yet.
        assert result.cache.cached_tokens >= max(0, shared - 1)
        self.log = [*prompt, *result.tokens]
        self.ends.append((result.node, len(self.log)))
        return result


@pytest.mark.parametrize("tiered", [False, True])
def test_each_branch_goes_on_as_if_alone(tmp_path, tiered):
    config = engine_config(blocks=512)
    if tiered:
        config = engine_config(tmp_path, blocks=40, host_blocks=40, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        trunk = Branch(engine.open("trunk"), [], [])
        for i in range(6):
            trunk.turn(tokens(7, start=20 * i))
        branches = [trunk]
        for at in (0, 2, 4):
            node, end = trunk.ends[at]
            name = f"fork{at}"
            branches.append(
                Branch(trunk.session.fork(name, node=node), trunk.log[:end], trunk.ends[: at + 1])
            )
            edited = trunk.session.fork(f"edit{at}")
            edited.rewind(5 - at)
            branches.append(Branch(edited, trunk.log[:end], trunk.ends[: at + 1]))
        for round_ in range(3):
            for number, branch in enumerate(branches):
                branch.turn([200 + number, *tokens(4, start=round_)])
        again = branches[2]
        last = again.turn([9])
        again.session.rewind()
        again.log = again.log[: again.ends[-2][1]]
        repeated = again.turn([9])
        assert repeated.tokens == last.tokens
        engine.assert_ledger()


def test_a_partial_hit_goes_to_the_longest_branch_that_is_true():
    with open_engine(engine_config(blocks=256)) as engine:
        base = tokens(8)
        for tail in ([1, 2, 3], [1, 2, 9], [1, 7]):
            engine.generate(tokens=[*base, *tail], sampling=greedy(1))
        for tail, cached in (([1, 2, 9, 5], 11), ([1, 7, 7], 10), ([1, 2, 5], 10), ([4], 8)):
            prompt = [*base, *tail]
            result = engine.generate(tokens=prompt, sampling=SHORT)
            assert list(result.tokens) == oracle(prompt, SHORT)
            assert result.cache.device_tokens == cached
        engine.assert_ledger()
