from sessionkv.text.stops import StopChecker, StopMatch


def run(stops, pieces, *, min_tokens=0, tail=""):
    checker = StopChecker(stops, min_tokens)
    shown = [checker.push(piece) for piece in pieces]
    return [*shown, checker.finish(tail)], checker.match


def test_possible_start_is_held_until_decided():
    assert run(["STOP"], ["aS", "T", "x", "b"]) == (["a", "", "STx", "b", ""], None)


def test_match_over_several_tokens_is_cut_off():
    shown, match = run(["STOP"], ["ab S", "TO", "P!"])
    assert shown == ["ab ", "", "", ""]
    assert match == StopMatch("STOP", start=3, token=2)


def test_start_counts_characters_of_the_whole_reply():
    assert run(["é!"], ["aéa", "bé", "!c"])[1] == StopMatch("é!", start=4, token=2)


def test_match_inside_one_token():
    assert run(["b"], ["abc"]) == (["a", ""], StopMatch("b", 1, 0))


def test_nothing_comes_out_after_a_match():
    checker = StopChecker(["b"])
    assert [checker.push("ab"), checker.push("c"), checker.finish("d")] == ["a", "", ""]


def test_the_match_complete_first_wins_however_the_text_is_cut():
    whole = run(["abcd", "bc"], ["xabcd"])
    single = run(["abcd", "bc"], list("xabcd"))
    assert whole[1].stop == single[1].stop == "bc"
    assert "".join(whole[0]) == "".join(single[0]) == "xa"


def test_of_those_complete_together_the_longest_wins():
    assert run(["c", "abc", "bc"], ["xabc"])[1] == StopMatch("abc", 1, 0)


def test_self_overlapping_stop():
    shown, match = run(["aab"], ["a", "a", "a", "b"])
    assert "".join(shown) == "a"
    assert match == StopMatch("aab", 1, 3)


def test_stop_inside_another_is_found_through_the_longer_prefix():
    assert run(["abab!", "ba?"], ["aba", "?"])[1] == StopMatch("ba?", 1, 1)


def test_held_tail_is_given_out_at_the_end():
    shown, match = run(["STOP"], ["a", "ST"])
    assert (shown, match) == (["a", "", "ST"], None)


def test_stop_completed_by_the_tail():
    shown, match = run(["T\ufffd"], ["aT"], tail="\ufffd")
    assert (shown, match) == (["a", ""], StopMatch("T\ufffd", 1, 0))


def test_match_must_lie_behind_the_first_min_tokens():
    shown, match = run(["b"], ["b", "ab", "ab"], min_tokens=2)
    assert (shown, match) == (["b", "ab", "a", ""], StopMatch("b", 4, 2))


def test_text_before_min_tokens_does_not_begin_a_match():
    assert run(["ab"], ["a", "b"], min_tokens=1) == (["a", "b", ""], None)
