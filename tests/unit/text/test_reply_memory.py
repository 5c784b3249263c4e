from sessionkv.text.reply_memory import PromptDigest, ReplyMemory


def take(memory, tenant, raw, *ends):
    return list(memory.take(tenant, raw, ends))


def test_a_reply_is_found_by_the_text_before_it():
    memory = ReplyMemory()
    memory.put("a", "one", (1, 2))
    memory.put("a", "one two", (3,))
    assert take(memory, "a", "one two three", 3, 7, 9) == [(1, 2), (3,), ()]


def test_tenants_do_not_find_each_others_replies():
    memory = ReplyMemory()
    memory.put("a", "bc", (1,))
    assert take(memory, "ab", "c", 1) == take(memory, "b", "bc", 2) == [()]


def test_the_latest_reply_counts():
    memory = ReplyMemory()
    memory.put("a", "x", (1,))
    memory.put("a", "x", (2, 3))
    assert len(memory) == 1
    assert take(memory, "a", "x", 1) == [(2, 3)]


def test_least_recently_used_goes_first():
    memory = ReplyMemory(max_entries=2)
    memory.put("a", "1", (1,))
    memory.put("a", "2", (2,))
    take(memory, "a", "1", 1)
    memory.put("a", "3", (3,))
    assert [take(memory, "a", raw, 1)[0] for raw in "123"] == [(1,), (), (3,)]


def test_bytes_are_bounded_and_exact():
    memory = ReplyMemory(max_bytes=1000)
    memory.put("a", "1", range(100))
    one = memory.num_bytes
    assert one == 300 + 400
    memory.put("a", "2", range(10))
    assert memory.num_bytes == 340
    assert take(memory, "a", "1", 1) == [()]
    memory.put("a", "3", range(1000))
    assert (len(memory), memory.num_bytes) == (1, 340)


def test_digest_does_not_depend_on_the_steps():
    digest = PromptDigest("t")
    first = digest.extended("é")
    assert digest.extended("xy") == PromptDigest("t").extended("éxy")
    assert first == PromptDigest("t").extended("é")
