"""Half a character in a request: an exception in the answer, or one that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders.gateway import HttpEngine, http_engine, tools_folder

HALF = '"a\\ud83d"'
CALL = f'[{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {HALF}}}}}]'
TEXT = f'[{{"type": "text", "text": {HALF}}}]'
SCHEMA = f'{{"type": {HALF}}}'
X = '"messages": [{"role": "user", "content": "x"}]'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
ADMIN = "/sessionkv/v1"
PLACES = [
    (CHAT, "messages[0].content", f'"messages": [{{"role": "user", "content": {HALF}}}]'),
    (CHAT, "messages[0].content", f'"messages": [{{"role": "user", "content": {TEXT}}}]'),
    (
        CHAT,
        "messages[1].tool_calls[0].function.arguments",
        '"messages": [{"role": "user", "content": "x"},'
        f' {{"role": "assistant", "content": null, "tool_calls": {CALL}}}]',
    ),
    (CHAT, "stop", f'{X}, "stop": {HALF}'),
    (CHAT, "user", f'{X}, "user": {HALF}'),
    (CHAT, "model", f'{X}, "model": {HALF}'),
    (CHAT, "prompt_cache_key", f'{X}, "prompt_cache_key": {HALF}'),
    (
        CHAT,
        "tools",
        f'{X}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters":'
        f" {SCHEMA}}}}}]",
    ),
    (
        CHAT,
        "response_format",
        f'{X}, "response_format": {{"type": "json_schema", "json_schema": {{"name": "n",'
        f' "schema": {{"enum": [{HALF}]}}}}}}',
    ),
    (COMPLETIONS, "prompt", f'"prompt": {HALF}'),
    (COMPLETIONS, "prompt[1]", f'"prompt": ["x", {HALF}]'),
    (COMPLETIONS, "stop", f'"prompt": "x", "stop": ["y", {HALF}]'),
    (COMPLETIONS, "user", f'"prompt": "x", "user": {HALF}'),
    (COMPLETIONS, "suffix", f'"prompt": "x", "suffix": {HALF}'),
    (RESPONSES, "input", f'"input": {HALF}'),
    (RESPONSES, "input[0]", f'"input": [{{"role": "user", "content": {HALF}}}]'),
    (
        RESPONSES,
        "input[0]",
        f'"input": [{{"type": "function_call", "call_id": "c", "name": "f", "arguments": {HALF}}}]',
    ),
    (
        RESPONSES,
        "input[0]",
        f'"input": [{{"type": "function_call_output", "call_id": "c", "output": {HALF}}}]',
    ),
    (RESPONSES, "instructions", f'"input": "x", "instructions": {HALF}'),
    (RESPONSES, "metadata", f'"input": "x", "metadata": {{"k": {HALF}}}'),
    (RESPONSES, "metadata", f'"input": "x", "metadata": {{{HALF}: "v"}}'),
    (RESPONSES, "user", f'"input": "x", "user": {HALF}'),
    (RESPONSES, "previous_response_id", f'"input": "x", "previous_response_id": {HALF}'),
    (RESPONSES, "conversation", f'"input": "x", "conversation": {HALF}'),
    (
        RESPONSES,
        "tools",
        f'"input": "x", "tools": [{{"type": "function", "name": "f", "parameters": {SCHEMA}}}]',
    ),
    (MESSAGES, "messages[0].content", f'"messages": [{{"role": "user", "content": {HALF}}}]'),
    (
        MESSAGES,
        "messages[0].content[0].text",
        f'"messages": [{{"role": "user", "content": {TEXT}}}]',
    ),
    (
        MESSAGES,
        "messages[1].content[0].input",
        '"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type":'
        f' "tool_use", "id": "1", "name": "f", "input": {{"k": {HALF}}}}}]}},'
        ' {"role": "user", "content": "y"}]',
    ),
    (MESSAGES, "system", f'{X}, "system": {HALF}'),
    (MESSAGES, "system", f'{X}, "system": {TEXT}'),
    (MESSAGES, "stop_sequences", f'{X}, "stop_sequences": [{HALF}]'),
    (MESSAGES, "tools", f'{X}, "tools": [{{"name": "f", "input_schema": {SCHEMA}}}]'),
    (MESSAGES, "model", f'{X}, "model": {HALF}'),
    (COUNT, "messages[0].content", f'"messages": [{{"role": "user", "content": {HALF}}}]'),
    (COUNT, "system", f'{X}, "system": {HALF}'),
    ("/v1/conversations", "metadata", f'"metadata": {{"k": {HALF}}}'),
    ("/v1/conversations", "items[0]", f'"items": [{{"role": "user", "content": {HALF}}}]'),
    (f"{ADMIN}/open", "session", f'"session": {HALF}'),
    (f"{ADMIN}/open", "system", f'"session": "a", "system": {HALF}'),
    (f"{ADMIN}/turn", "text", f'"session": "a", "text": {HALF}'),
    (f"{ADMIN}/fork", "name", f'"session": "a", "name": {HALF}'),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    with http_engine(runner={"text_dir": folder, "script": lambda ids: 97}) as engine:
        engine.post(f"{ADMIN}/open", {"session": "a"})
        yield engine


def check(answer: str) -> None:
    for leak in ("Traceback", "UnicodeEncodeError", "Error(", "/sessionkv/", "pydantic"):
        assert leak not in answer


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(
    ("path", "field", "sent"), PLACES, ids=[f"{path}-{field}" for path, field, _ in PLACES]
)
def test_the_answer_names_no_field(
    served: HttpEngine, path: str, field: str, sent: str, stream: str
) -> None:
    model = "" if field == "model" else '"model": "checksum", '
    limit = '"max_tokens": 2, ' if path == MESSAGES else ""
    body = f'{{{model}{limit}"stream": {stream}, {sent}}}'
    answer = served.http.post(path, content=body, headers={"content-type": "application/json"})
    by_name = field in ("model", "conversation")  # of what is not there
    assert answer.status_code == 400 or (by_name and answer.status_code == 404), answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(field), error
    check(answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/a%ED%A0%BD",
        "/v1/responses/resp_%ED%A0%BD",
        "/v1/responses/resp_%ED%A0%BD/input_items",
        "/v1/conversations/conv_%ED%A0%BD",
        "/v1/conversations/conv_%ED%A0%BD/items",
        f"{ADMIN}/session?session=%ED%A0%BD",
        f"{ADMIN}/sessions?prefix=%ED%A0%BD",
        f"{ADMIN}/tree?session=%ED%A0%BD",
        "/%ED%A0%BD",
    ],
)
def test_an_address_is_a_server_error(served: HttpEngine, path: str) -> None:
    """Half a character in the path or the query is read as the mark of one that is none."""
    answer = served.http.get(path)
    assert answer.status_code in (200, 400, 404), answer.text
    check(answer.text)


def test_headers_are_a_server_error(served: HttpEngine) -> None:
    body = {"model": "checksum", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for name in ("session_id", "x-session-id", "x-api-key", "anthropic-beta", "user-agent"):
        headers = {name.encode(): b"a\xed\xa0\xbd"}
        answer = served.post(CHAT, body, headers=headers)
        assert answer.status_code in (200, 400, 401), answer.text
        check(answer.text)
