"""JSON that the token limit cut is no whole answer, and a warm prompt changes nothing of it."""

from __future__ import annotations

import json
from typing import Any

from tests.builders.gateway import MODEL, http_engine

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def test_cut_is_length_and_the_grammar_begins_with_the_first_token_cold_or_warm() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    plain: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Which?"}]}
    asked = plain | {"response_format": form, "temperature": 0}
    with http_engine() as served:
        cold = served.post(CHAT, asked).json()
        assert json.loads(cold["choices"][0]["message"]["content"]).keys() == {"kind", "legs"}
        assert cold["choices"][0]["finish_reason"] == "stop"
        served.post(CHAT, plain | {"max_tokens": 5})
        warm = served.post(CHAT, asked).json()
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert warm["choices"] == cold["choices"]
        cut = served.post(CHAT, asked | {"max_tokens": 4}).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cold["choices"][0]["message"]["content"].startswith(cut["message"]["content"])
