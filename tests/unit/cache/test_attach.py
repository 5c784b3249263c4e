from sessionkv.cache.attach import attach_session
from sessionkv.cache.chain import TokenChain
from sessionkv.cache.turns import NewNode
from sessionkv.types import BlockHash
from tests.builders.tree import TENANT, B, Sessions, snapshot

ROOT_HASH = BlockHash(b"r" * 32)


def grow(s, name, delta):
    """A turn as the engine makes it: the last token has no KV yet."""
    head = s.tree.head(TENANT, name)
    log = [*s.tree.tokens_of(head.node_id), *delta]
    chain = TokenChain(ROOT_HASH, B, tenant=TENANT, token_ids=log)
    tail = chain.tail_record(len(log) - 1)
    new = NewNode("raw", delta, 1, chain.hashes, tail.key if tail else None, num_unwritten_tokens=1)
    return s.commit(s.tree.append_turn(TENANT, name, new, base_id=head.node_id, now=2.0))


def attach(s, root):
    """Attach hashes to what lacks them; how many sessions that were."""
    attached = 0
    for head in s.tree.unattached():
        attach_session(s.tree, head, root, B)
        attached += 1
    return attached


def test_a_loaded_tree_retains_what_it_did_before():
    s = Sessions()
    s.open("a")
    grow(s, "a", range(11))
    s.commit(s.tree.fork(TENANT, "a", "b", now=3.0))
    grow(s, "a", range(50, 57))
    grow(s, "b", [9])
    s.open("empty")
    s.commit(s.tree.pin(TENANT, "b", tier="host", now=4.0))
    warm = snapshot(s.tree)
    s.tree = s.whole_tree(attached=False)
    assert [attach(s, ROOT_HASH) for _ in range(2)] == [3, 0]
    # The fork's turn has no head on it any more, so its tail is of no use and stays unknown.
    assert snapshot(s.tree) == warm


def test_another_identity_shares_no_block_with_the_first():
    s = Sessions()
    s.open("a")
    change = grow(s, "a", range(9))
    before = set(s.tree.keys_of(change.node_id))
    s.tree = s.whole_tree(attached=False)
    attach(s, BlockHash(b"x" * 32))
    assert len(before) == 2
    assert not before & set(s.tree.keys_of(change.node_id))
