from __future__ import annotations

import pytest

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest
from sessionkv.ipc import messages as m
from sessionkv.ipc.validate import check_request

LIMITS = LimitsConfig()


def test_what_comes_out_shares_nothing_mutable_with_what_went_in():
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    tokens = [1, 2]
    turn = check_request(m.Turn(1, session="a", messages=[message]), LIMITS)
    raw = check_request(m.Turn(2, session="a", tokens=tokens), LIMITS)
    message["content"][0]["text"] = "changed"
    tokens.append(3)
    assert turn.messages == ({"role": "user", "content": [{"type": "text", "text": "x"}]},)
    assert raw.tokens == (1, 2)


def test_objects_are_checked_as_frames_are():
    with pytest.raises(InvalidRequest) as caught:
        check_request(m.Turn(7, session="a", text="\ud800"), LIMITS)
    assert caught.value.details["field"] == "text"
    assert caught.value.request_id == 7


def test_depth_is_bounded_without_a_frame():
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        check_request(m.Open(1, session="a", tools=[{"f": deep}]), LIMITS)


def test_a_self_containing_value_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="nested deeper"):
        check_request(m.Open(1, session="a", tools=[{"f": loop}]), LIMITS)


def test_the_number_of_messages_is_bounded():
    messages = [{"role": "user", "content": "x"}] * 4097
    with pytest.raises(InvalidRequest, match="at most 4096"):
        check_request(m.Generate(1, messages=messages), LIMITS)


@pytest.mark.parametrize(
    "request_of", [lambda name: m.Open(1, session=name), lambda name: m.Info(1, session=name)]
)
def test_an_empty_name_is_refused_as_what_it_is(request_of):
    with pytest.raises(InvalidRequest, match=r"^session is ''; allowed: 1 to 4096 bytes$"):
        check_request(request_of(""), LIMITS)
    with pytest.raises(InvalidRequest, match=r"^session is '4097 bytes long'; allowed: 1 to 4096"):
        check_request(request_of("x" * 4097), LIMITS)


@pytest.mark.parametrize("given", [{}, {"text": "a", "tokens": (1,)}])
def test_a_turn_with_none_or_two_of_its_kinds_is_told_to_give_one(given):
    with pytest.raises(
        InvalidRequest, match=r"^give exactly one of text, messages and tokens$"
    ) as caught:
        check_request(m.Turn(1, session="a", **given), LIMITS)
    assert caught.value.details["field"] == "text | messages | tokens"
