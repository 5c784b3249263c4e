"""Responses of a real engine that is killed: they are there afterwards, and so is their cache."""

from __future__ import annotations

import signal
from typing import Any

import openai

from sessionkv import Client
from tests.integration.test_cli import Place, place  # noqa: F401 - a fixture

ON_DISK = ("--http", "127.0.0.1:0", "--disk-bytes", "64MiB")
ASK: dict[str, Any] = {"model": "checksum", "max_output_tokens": 8, "temperature": 0}


def _url(printed: list[str]) -> str:
    (url,) = (line.split()[1] for line in printed if line.startswith("http "))
    return f"{url}/v1"


def test_a_response_is_gone_on_from_after_kill_9(place: Place) -> None:  # noqa: F811
    with place.serving(*ON_DISK) as (process, printed):
        with openai.OpenAI(base_url=_url(printed), api_key="none", max_retries=0) as client:
            first = client.responses.create(input="one " * 50, instructions="Be brief.", **ASK)
            last = client.responses.create(
                input="two", previous_response_id=first.id, instructions="Be brief.", **ASK
            )
        with Client(place.endpoint) as engine:
            engine.flush()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with (
        place.serving(*ON_DISK) as (_, printed),
        openai.OpenAI(base_url=_url(printed), api_key="none", max_retries=0) as client,
    ):
        assert client.responses.retrieve(first.id).output == first.output
        again = client.responses.create(
            input="three", previous_response_id=last.id, instructions="Be brief.", **ASK
        )
        assert again.usage is not None
        assert again.usage.input_tokens_details.cached_tokens >= 200
        report: Any = again.to_dict()["sessionkv"]
        assert report["cache"]["disk_tokens"] > 0
        branch = client.responses.create(
            input="two", previous_response_id=first.id, instructions="Be brief.", **ASK
        )
        assert branch.output_text == last.output_text
