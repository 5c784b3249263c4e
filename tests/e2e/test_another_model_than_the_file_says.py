"""Weights of a GGUF file that are read otherwise than they were written: seen over HTTP.

Rows permuted, a norm counted twice, an output layer of its own or another end token: the answers
would not be those of transformers, which reads the same file by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from sessionkv import EngineConfig, launch
from sessionkv.config import user_cache_dir
from sessionkv.model.prepare import PreparedModel, prepare_model
from tests.builders.apis import CHATS, Api
from tests.builders.gateway import Gateway, gateway

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM, QUESTION = "Be brief.", "Name three primary colours."
PROMPT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
COUNT = 12
END = 2


@pytest.fixture(scope="module")
def prepared(smollm2: str) -> PreparedModel:
    return prepare_model(smollm2, cache_dir=user_cache_dir(), offline=True)


@pytest.fixture(scope="module")
def tokenizer(prepared: PreparedModel) -> Tokenizer:
    return Tokenizer.from_file(str(prepared.text_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(prepared: PreparedModel, tokenizer: Tokenizer) -> list[int]:
    """What transformers say to the prompt, in float32, end tokens included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepared.folder, dtype=torch.float32).eval()
    output, embedded = model.get_output_embeddings(), model.get_input_embeddings()
    assert output.weight.data_ptr() == embedded.weight.data_ptr()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.no_grad():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
        )
    value: list[int] = said[0, ids.shape[1] :].tolist()
    return value


@pytest.fixture(scope="module")
def served(smollm2: str) -> Iterator[tuple[Gateway, str]]:
    config = EngineConfig(model=smollm2, offline=True, max_model_len=512)
    with launch(config=config) as process, gateway(process.endpoint) as http:
        yield http, http.http.get("/v1/models").json()["data"][0]["id"]


def test_completions(
    served: tuple[Gateway, str], expected: list[int], tokenizer: Tokenizer
) -> None:
    http, name = served
    body: dict[str, Any] = {"model": name, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 2}
    for _ in range(2):  # cold and warm
        (choice,) = http.post("/v1/completions", body).json()["choices"]
        tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in expected]
        assert choice["logprobs"]["tokens"] == tokens
    uniform = -math.log(tokenizer.get_vocab_size())
    values = choice["logprobs"]["token_logprobs"]
    assert sum(values) / len(values) > uniform / 2
    assert len({round(value, 3) for value in values}) > COUNT / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_chats_end_where_the_model_does(
    served: tuple[Gateway, str],
    expected: list[int],
    tokenizer: Tokenizer,
    api: Api,
    stream: bool,
) -> None:
    http, name = served
    system = {"role": "system", "content": SYSTEM}
    body = api.body(system, QUESTION, temperature=0, limit=COUNT) | {"model": name}
    said = api.say(http, body, stream=stream)
    until = expected.index(END) if END in expected else COUNT
    assert said.text == tokenizer.decode(expected[:until])
    assert said.usage[0] == len(tokenizer.encode(PROMPT).ids)
    assert (said.reason, said.usage[2]) == (
        ("stop", until + 1) if until < COUNT else ("length", COUNT)
    )
