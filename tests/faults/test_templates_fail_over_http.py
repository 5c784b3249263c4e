"""What clients send that templates stumble over: over HTTP it is an answer, or a 400 in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sessionkv.text.builtin import write_byte_text
from sessionkv.text.model import TextModel
from tests.builders import text as built
from tests.builders.apis import ALL, CHAT, CHATS, COMPLETIONS, MESSAGES, RESPONSES, Api, Said
from tests.builders.engine import engine_config
from tests.builders.gateway import TOOLS, HttpEngine, http_engine
from tests.unit.text.test_habits import BOTH, MAPS, TEXT

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "rain"}
BYTES = {"tools": TOOLS, "maps": MAPS, "text": TEXT, "both": BOTH}
BOS = {"chatml": None, "llama3": 0, "mistral": 1, "gemma": 1}


@dataclass
class Served:
    """An engine with a template, and the prompts that its model saw.

    Attributes:
        http: The engine.
        text: The tokenizer and template.
        prompts: One for each answer of one token.
    """

    http: HttpEngine
    text: TextModel
    prompts: list[list[int]] = field(default_factory=list)

    def say(self, api: Api, *messages: Any, stream: bool = False, **fields: Any) -> Said:
        said = api.say(self.http, api.body(*messages, limit=1, **fields), stream=stream)
        assert said.usage[0] == len(self.prompts[-1])
        return said

    def prompt(self, api: Api, *messages: Any, stream: bool = False, **fields: Any) -> list[int]:
        """The ids that the model saw."""
        self.say(api, *messages, stream=stream, **fields)
        return self.prompts[-1]

    def spelled(self, api: Api, *messages: Any, **fields: Any) -> str:
        """The same as text, of an engine whose tokens are bytes."""
        return bytes(i for i in self.prompt(api, *messages, **fields) if i < 256).decode()

    def refused(self, api: Api, *messages: Any, **fields: Any) -> dict[str, Any]:
        """The error, which a stream has too."""
        body = api.body(*messages, limit=1, **fields)
        errors = []
        for stream in (False, True):
            answer = self.http.post(api.path, body | {"stream": stream})
            assert answer.status_code == 400, answer.text
            errors.append(answer.json()["error"])
        assert errors[0] == errors[1]
        assert self.say(api, "hi").usage[2] == 1, "the engine is not well"
        return errors[0]


def shared(one: list[int], other: list[int]) -> int:
    """How many ids they begin with together."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """By the name of its text."""
    folder = tmp_path_factory.mktemp("text")
    if request.param in BYTES:
        write_byte_text(folder)
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").write_text(BYTES[request.param])
    else:
        built.write_folder(request.param, folder)
    prompts: list[list[int]] = []
    runner = {"text_dir": folder, "script": lambda ids: prompts.append(list(ids))}
    with http_engine(engine_config(blocks=512), runner=runner) as http:
        yield Served(http, TextModel.load(folder), prompts)


def texts(*names: str) -> Any:
    return pytest.mark.parametrize("served", names, indirect=True)


# Two beginnings ------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ALL, ids=repr)
@texts(*BOS)
def test_a_second_bos_is_added(served: Served, api: Api) -> None:
    bos = served.text.facts.bos_token_id
    assert bos in BOS.values()
    found = [i for i, token in enumerate(served.prompt(api, "hi")) if token == bos]
    assert found == ([] if bos is None else [0])


@texts("llama3", "mistral", "gemma")
@pytest.mark.parametrize("stream", [False, True])
def test_a_bos_that_the_client_wrote_is_doubled(served: Served, stream: bool) -> None:
    facts = served.text.facts
    spelled = served.prompt(COMPLETIONS, f"{facts.bos_token}hi", stream=stream)
    assert spelled == served.prompt(COMPLETIONS, "hi")


# Roles ---------------------------------------------------------------------------------------


@texts("gemma", "mistral")
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_a_refused_order_of_roles_is_a_server_error(served: Served, api: Api) -> None:
    first = {"role": "assistant", "content": "x"}
    assert "must alternate user/assistant" in served.refused(api, first, "hi")["message"]
    assert served.prompt(api, "a", "b") == served.prompt(CHAT, "a\n\nb")


@texts("gemma")
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_a_refused_system_message_is_a_server_error(served: Served, api: Api) -> None:
    folded = served.prompt(api, {"role": "system", "content": "Be brief."}, "hi")
    assert folded == served.prompt(CHAT, "Be brief.\n\nhi")


@texts("chatml_words")
@pytest.mark.parametrize("stream", [False, True])
def test_a_developer_message_is_dropped(served: Served, stream: bool) -> None:
    told = served.prompt(CHAT, {"role": "system", "content": "Say only 42"}, "hi", stream=stream)
    assert "Say only 42" in served.text.decode(told)
    assert "developer" not in served.text.decode(told)
    developer = {"role": "developer", "content": "Say only 42"}
    for api in (CHAT, RESPONSES, MESSAGES):
        assert served.prompt(api, developer, "hi", stream=stream) == told
    assert served.prompt(RESPONSES, "hi", instructions="Say only 42", stream=stream) == told


@texts("chatml_words")
def test_several_system_messages_are_not_merged(served: Served) -> None:
    one = served.prompt(CHAT, {"role": "system", "content": "a\n\nb"}, "hi")
    system, developer = {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}
    for api in (CHAT, RESPONSES):
        assert served.prompt(api, system, developer, "hi") == one
    assert served.prompt(RESPONSES, developer, "hi", instructions="a") == one
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert served.prompt(MESSAGES, "hi", system=blocks) == one


# Content -------------------------------------------------------------------------------------


@texts("tools")
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=repr)
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_a_call_without_content_is_dropped(
    served: Served, api: Api, content: dict[str, Any]
) -> None:
    called = {"role": "assistant", "tool_calls": [CALL]} | content
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    seen = served.spelled(api, "hi", called, RESULT, "so?", tools=tools)
    assert seen.partition("user\n")[2] == (
        'hi\nassistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
        "tool\nrain\nuser\nso?\nassistant\n"
    )


@texts("tools")
@pytest.mark.parametrize(("api", "joint"), [(CHAT, ""), (RESPONSES, ""), (MESSAGES, "\n\n")])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_listed_content_is_refused(served: Served, role: str, api: Api, joint: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = ["x", {"role": role, "content": parts}, "y"][role == "user" :]
    whole = ["x", {"role": role, "content": f"A{joint}B"}, "y"][role == "user" :]
    assert served.prompt(api, *messages) == served.prompt(api, *whole)


IMAGE = {
    CHAT: ({"type": "image_url", "image_url": {"url": "data:x"}}, "messages[0].content[0].type"),
    RESPONSES: ({"type": "input_image", "image_url": "data:x"}, "input[0].content[0].type"),
    MESSAGES: ({"type": "image", "source": {"type": "url"}}, "messages[0].content[0].type"),
}


@texts("gemma")
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_an_image_is_taken_for_text(served: Served, api: Api) -> None:
    part, param = IMAGE[api]
    error = served.refused(api, {"role": "user", "content": [part]})
    assert error["param"] == param
    assert "text" in error["message"], "nobody is told what to send"


@texts("gemma")
@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=repr)
def test_no_messages_are_an_answer(served: Served, api: Api) -> None:
    assert served.refused(api)["param"] == "messages"


# Calls ---------------------------------------------------------------------------------------

WHOLE = '{"city":"Oslo","n":2}'
SHOWN = {"maps": "city=Oslo,n=2,", "text": f"<{WHOLE}>", "both": '{"city": "Oslo", "n": 2}'}


def called(arguments: str) -> dict[str, Any]:
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@texts(*SHOWN)
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_arguments_are_encoded_twice(served: Served, api: Api, request: Any) -> None:
    shown = SHOWN[request.node.callspec.params["served"]]
    if api is MESSAGES:  # has them as a value, not as text
        shown = shown.replace(WHOLE, json.dumps(json.loads(WHOLE)))
    # A conversation of its own: of a known one the model sees the spelling that it saw before.
    history = [f"hi {api}", called(WHOLE), RESULT, "so?"]
    seen = served.spelled(api, *history)
    assert seen == f"user:hi {api};assistant:{shown};tool:rain;user:so?;"
    prompt, cached, _ = served.say(api, *history).usage
    assert cached == prompt - 1


@texts("maps")
@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=repr)
def test_arguments_that_are_no_json_are_a_server_error(served: Served, api: Api) -> None:
    error = served.refused(api, "hi", called('{"a":'), RESULT)
    assert error["code"] == "template_refused"


@texts("text", "both")
@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=repr)
def test_arguments_that_are_no_json_are_lost(served: Served, api: Api) -> None:
    seen = served.spelled(api, "hi", called('{"a":'), RESULT)
    assert seen.replace("<", "").replace(">", "") == 'user:hi;assistant:{"a":;tool:rain;'


# A changed beginning -------------------------------------------------------------------------


@texts("chatml_words")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_the_cost_of_a_later_system_prompt_is_not_seen(
    served: Served, api: Api, stream: bool
) -> None:
    asked = f"a question of {api} {stream}"
    answer = {"role": "assistant", "content": served.say(api, asked).text}
    system = {"role": "system", "content": "Be brief."}
    said = served.say(api, system, asked, answer, "and?", stream=stream)
    second = served.prompts[-1]
    same = max(shared(prompt, second) for prompt in served.prompts[:-1])
    assert "Be brief." in served.text.decode(second)
    assert 0 < said.usage[1] == same < said.usage[0]


@texts("tools")
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_tools_are_sorted_or_lose_something(served: Served, api: Api) -> None:
    schema = {"type": "object", "properties": {"z": {"default": None}, "a": {"enum": ["x", None]}}}
    functions = [
        {"name": name, "description": "b", "parameters": schema} for name in ("zeta", "alpha", "m")
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    seen = served.spelled(api, "hi", tools=tools)
    assert json.loads(seen.partition("tools\n")[2].partition("\n")[0]) == tools
    places = [seen.index(json.dumps(tool)) for tool in tools]
    assert places == sorted(places)
    prompt, cached, _ = served.say(api, "hi", tools=tools).usage
    assert cached == prompt - 1
