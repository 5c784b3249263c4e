"""Ids of turns: unique, ascending from parent to child, and counted by each tenant for itself."""

from sessionkv.types.node_ids import NodeIds, first_of, number_of, row_for, row_of


def test_each_tenant_counts_its_own() -> None:
    ids = NodeIds([1], first_number=1)
    given = [(tenant, ids.reserve(tenant)) for tenant in ("local", "a", "a", "b", "local", "a")]
    assert [number_of(node_id) for _, node_id in given] == [1, 1, 2, 1, 2, 3]
    assert len({node_id for _, node_id in given}) == len(given)
    assert [row_of(node_id) for _, node_id in given] == [row_for(tenant) for tenant, _ in given]
    assert (row_for("local"), given[0][1], given[4][1]) == (0, 1, 2)
    assert all(0 < node_id < 2**63 for _, node_id in given)


def test_rows_begin_above_what_all_were_given_from_one() -> None:
    ids = NodeIds([57], first_number=43)
    assert (number_of(ids.reserve("a", 3)), number_of(ids.reserve("a"))) == (43, 46)
    assert (ids.reserve("local"), number_of(ids.reserve("b"))) == (57, 43)
    again = NodeIds(ids.next_ids.values(), first_number=43)
    assert (number_of(again.reserve("a")), again.reserve("local")) == (47, 58)


def test_what_was_given_is_known() -> None:
    ids = NodeIds([5], first_number=3)
    node_id = ids.reserve("a")
    assert [ids.was_given(n) for n in (0, 1, 4, 5)] == [False, True, True, False]
    assert [ids.was_given(n) for n in (node_id, node_id + 1)] == [True, False]
    assert not ids.was_given(first_of(row_for("b")) + 1)
    assert not ids.was_given(first_of(row_for("a")))


def test_a_tenants_row_is_the_same_in_every_process() -> None:
    assert row_for("acme") == 1 + 0x822B33AD87C148A0 % (2**23 - 1)
