from sessionkv.text.control import ControlMarks

MARKS = ControlMarks(["<s>", "<|a|>", "<|a|>b"])


def test_text_without_control_tokens_is_left_alone():
    assert MARKS.mark("plain < | > text") == "plain < | > text"
    assert MARKS.unmark("plain") == ("plain", [])


def test_marked_text_comes_back_with_its_places():
    raw = MARKS.mark("x<s>y<|a|>z")
    assert "<s>" not in raw
    assert "<|a|>" not in raw
    assert MARKS.unmark("<s>" + raw) == ("<s>x<s>y<|a|>z", [(4, 7), (8, 13)])


def test_longest_spelling_is_marked():
    assert MARKS.unmark(MARKS.mark("<|a|>b")) == ("<|a|>b", [(0, 6)])


def test_the_escape_character_itself_survives():
    text = "a\U0010fffd\U00100001b<s>\U0010fffd"
    assert MARKS.unmark(MARKS.mark(text))[0] == text


def test_escaped_text_keeps_its_control_tokens_real():
    text = "\U0010fffd\U00100001<s>"
    assert MARKS.unmark(MARKS.escape(text)) == (text, [(0, 1)])
    assert MARKS.first(MARKS.escape("<s>")) == "<s>"


def test_half_a_mark_is_left_as_it_is():
    assert MARKS.unmark("a\U0010fffd") == ("a\U0010fffd", [])
    assert MARKS.unmark("\U0010fffdb") == ("\U0010fffdb", [])


def test_values_are_marked_in_depth_keys_included():
    value = {"<s>": ["<s>", 1, None, {"k": "<s>"}], "n": 2.5}
    mark = MARKS.mark("<s>")
    assert MARKS.mark_value(value) == {mark: [mark, 1, None, {"k": mark}], "n": 2.5}


def test_first_sees_real_tokens_only():
    assert MARKS.first("<|a|>bc") == "<|a|>b"
    assert MARKS.first("x<s>") is None
    assert MARKS.first(MARKS.mark("<s>")) is None


def test_texts_part_at_a_real_control_token():
    assert MARKS.parts("x<s>", "y")
    assert MARKS.parts("x", "<s>y")
    assert not MARKS.parts("x", "y")
    assert not MARKS.parts(MARKS.mark("<s>"), "y")


def test_an_index_inside_a_real_control_token_cuts_it():
    raw = "a<s>b" + MARKS.mark("<s>") + "<|a|>b"
    last = len(raw) - 6
    assert [i for i in range(len(raw) + 1) if MARKS.cuts(raw, i)] == [
        2,
        3,
        *range(last + 1, len(raw)),
    ]


def test_no_control_tokens_at_all():
    marks = ControlMarks([])
    assert marks.mark("<s>") == "<s>"
    assert marks.first("") is None
    assert not marks.parts("a", "b")
