"""Small tokenizers and chat templates of the kinds that real models have."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from sessionkv.config import LimitsConfig
from sessionkv.text.builtin import write_byte_text
from sessionkv.text.folder import TextFiles
from sessionkv.text.messages import Message, normalise
from sessionkv.text.model import TextModel

LIMITS = LimitsConfig()
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the user asks the assistant a question",
    "Be brief. Hello there, what is the weather in Oslo today? It is raining, take an umbrella.",
    "system user assistant tool one two three four five six seven eight nine ten stop word",
)

CHATML_DEFAULT_SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\nTools: ' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls %}"
    "{%- for call in message.tool_calls %}"
    '{{- \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}"
    "{%- else %}{{- message['content'] | trim }}{%- endif %}"
    "{{- '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

MISTRAL = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

THINK_DROPPING = (
    "{%- for message in messages -%}"
    "{%- set content = message.content -%}"
    "{%- if message.role == 'assistant' and not loop.last and '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

LAST_USER_SYSTEM = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' }}"
    "{%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- message.content + '[/INST]' }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)


@functools.cache
def chatml() -> TextModel:
    """The built-in byte tokenizer."""
    return _load("chatml")


@functools.cache
def chatml_words() -> TextModel:
    """ChatML with a default system message over a byte-level BPE with merges."""
    return _load("chatml_words")


@functools.cache
def think_dropping() -> TextModel:
    """A template that leaves out the thoughts of earlier replies."""
    return _load("think_dropping")


@functools.cache
def llama3() -> TextModel:
    """Byte-level BPE whose tokenizer and template both bring a BOS."""
    return _load("llama3")


@functools.cache
def mistral() -> TextModel:
    """Word marks, byte fallback, a space before every text, no system role."""
    return _load("mistral")


@functools.cache
def gemma() -> TextModel:
    """Word marks and byte fallback without the extra space; refuses the system role."""
    return _load("gemma")


@functools.cache
def last_user_system() -> TextModel:
    """A template that moves the system prompt to the last user message."""
    return build(byte_fallback(prefix=True), LAST_USER_SYSTEM, bos="<s>", eos=("</s>",))


@functools.cache
def smollm2() -> TextModel:
    """The default model's own; for tests marked ``model``."""
    return TextModel.load(smollm2_folder())


def smollm2_folder() -> Path:
    """The default model's text folder; for tests marked ``model``."""
    from sessionkv.config import DEFAULT_MODEL, user_cache_dir
    from sessionkv.model.prepare import prepare_model

    return prepare_model(DEFAULT_MODEL, cache_dir=user_cache_dir()).text_dir


ALL = {
    "chatml": chatml,
    "chatml_words": chatml_words,
    "think_dropping": think_dropping,
    "llama3": llama3,
    "mistral": mistral,
    "gemma": gemma,
}


def with_template(template: str | None) -> TextModel:
    """The built-in tokenizer with another template."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_byte_text(folder)
        path = folder / "chat_template.jinja"
        path.unlink()
        if template is not None:
            path.write_text(template)
        return TextModel.load(folder)


def build(
    tokenizer: Tokenizer,
    template: str | None,
    *,
    bos: str | None,
    eos: tuple[str, ...],
    add_bos: bool = False,
) -> TextModel:
    """A model from a tokenizer and a template, through the files."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), tokenizer, template, bos=bos, eos=eos, add_bos=add_bos)
        return TextModel.load(Path(name))


def write(
    folder: Path,
    tokenizer: Tokenizer,
    template: str | None,
    *,
    bos: str | None,
    eos: tuple[str, ...],
    add_bos: bool = False,
) -> None:
    """A text folder from a tokenizer and a template."""
    facts: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None if bos is None else tokenizer.token_to_id(bos),
        "bos_token": bos,
        "eos_token": eos[0],
        "eos_token_ids": [tokenizer.token_to_id(token) for token in eos],
        "add_bos": add_bos,
        "special_tokens": {},
        "max_model_len": 4096,
    }
    files = TextFiles.make(tokenizer_json=tokenizer.to_str(), chat_template=template, facts=facts)
    files.write(folder)


def write_folder(name: str, folder: Path) -> Path:
    """The text folder of one of :data:`ALL`, for a whole engine; returns the folder."""
    if name == "chatml":
        write_byte_text(folder)
    elif name == "llama3":
        specials = (
            "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
        )  # fmt: skip
        write(
            folder, byte_level(specials), LLAMA3, bos=specials[0], eos=specials[1:2], add_bos=True
        )
    elif name == "mistral":
        write(folder, byte_fallback(prefix=True), MISTRAL, bos="<s>", eos=("</s>",), add_bos=True)
    elif name == "gemma":
        tokenizer = byte_fallback(prefix=False, more=("<start_of_turn>", "<end_of_turn>"))
        write(folder, tokenizer, GEMMA, bos="<s>", eos=("<end_of_turn>", "</s>"), add_bos=True)
    else:
        templates = {"chatml_words": CHATML_DEFAULT_SYSTEM, "think_dropping": THINK_DROPPING}
        write_words(folder, templates[name])
    return folder


def write_words(folder: Path, template: str) -> Path:
    """The byte-level BPE of ChatML with a template; returns the folder."""
    tokenizer = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    write(folder, tokenizer, template, bos=None, eos=("<|im_end|>", "<|endoftext|>"))
    return folder


def byte_level(specials: tuple[str, ...], vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE trained on the corpus, with thoughts' tags as ordinary additions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in ("<think>", "</think>")])
    return tokenizer


def byte_fallback(*, prefix: bool, more: tuple[str, ...] = ()) -> Tokenizer:
    """A BPE over characters with word marks; other characters become byte tokens."""
    mark = normalizers.Replace(" ", "\u2581")
    parts = [normalizers.Prepend("\u2581"), mark] if prefix else [mark]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(parts)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    words = (w if prefix else f" {w}" for line in CORPUS for w in line.split())
    tokenizer.train_from_iterator(words, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learnt["vocab"]]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    result = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    result.normalizer = normalizers.Sequence(parts)
    result.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    specials = ("<unk>", "<s>", "</s>", *more)
    result.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in specials])
    return result


def read(*items: dict[str, Any] | str) -> tuple[Message, ...]:
    """Messages from maps; a plain text is a user message."""
    maps = [{"role": "user", "content": i} if isinstance(i, str) else i for i in items]
    return normalise(maps, LIMITS)


def reply(text: TextModel, content: str, *, closed: bool = True) -> tuple[int, ...]:
    """Ids a model might sample for a text, with an end token when closed."""
    ids = text.encoder.encode_text_inside(content)
    return (*ids, min(text.eos_ids)) if closed else ids


def _load(name: str) -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return TextModel.load(write_folder(name, Path(folder)))
