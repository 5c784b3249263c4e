from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from sessionkv.errors import ModelBroken, ModelNotFound, ModelUnsupported
from sessionkv.model.prepare import prepare_model
from sessionkv.model.progress import Progress
from sessionkv.model.spec import load_spec
from sessionkv.model.weights import WeightFiles
from tests.builders.tiny_models import hugging_face_model, save_model, write_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hugging_face_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def test_a_folder_is_prepared(model: Path, tmp_path: Path) -> None:
    prepared = prepare_model(str(model), cache_dir=tmp_path / "cache", offline=True)
    assert (prepared.name, prepared.folder) == (str(model), model)
    assert prepared.spec == load_spec(model)
    assert len(prepared.fingerprint) == 64
    info = json.loads((prepared.text_dir / "text.json").read_text())
    assert info["vocab_size"] == 128
    assert {path.name for path in prepared.text_dir.iterdir()} == {
        "tokenizer.json",
        "chat_template.jinja",
        "text.json",
    }


def test_bytes_are_read_once_while_files_do_not_change(model: Path, tmp_path: Path) -> None:
    def prepare() -> tuple[str, list[Progress]]:
        events: list[Progress] = []
        cache = tmp_path / "cache"
        return prepare_model(
            str(model), cache_dir=cache, progress=events.append
        ).fingerprint, events

    first, events = prepare()
    assert events[-1].stage == "fingerprint"
    assert events[-1].done == events[-1].total > 0
    assert prepare() == (first, [])


def test_fingerprint_depends_on_the_tensors_not_on_their_files(model: Path, tmp_path: Path) -> None:
    sharded = save_model(hugging_face_model("llama"), tmp_path / "sharded", shard="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    other = save_model(hugging_face_model("llama", seed=8), tmp_path / "other")
    found = [
        prepare_model(str(path), cache_dir=tmp_path / "cache").fingerprint
        for path in (model, sharded, other)
    ]
    assert found[0] == found[1] != found[2]


def test_shards_hold_the_same_weights(model: Path, tmp_path: Path) -> None:
    sharded = save_model(hugging_face_model("llama"), tmp_path / "sharded", shard="50KB")
    spec = load_spec(model)
    layers = [WeightFiles(folder, spec).layer(1) for folder in (model, sharded)]
    assert torch.equal(layers[0].qkv, layers[1].qkv)
    assert torch.equal(layers[0].gate_up, layers[1].gate_up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_element_types_are_converted(dtype: torch.dtype, model: Path) -> None:
    path = model / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    files = WeightFiles(model, load_spec(model))
    assert torch.equal(files.embedding(), tensors["model.embed_tokens.weight"].float())
    assert files.embedding().dtype == torch.float32


def test_integer_weights_are_refused(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    save_file({name: t.to(torch.int8) for name, t in load_file(path).items()}, path)
    with pytest.raises(ModelUnsupported, match="element type I8"):
        prepare_model(str(model), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, model: Path, tmp_path: Path) -> None:
    (model / name).unlink()
    with pytest.raises(ModelBroken, match=str(model / name)):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


def test_a_hub_that_cannot_be_reached_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"^some/model could not be fetched from the hub"):
        prepare_model("some/model", cache_dir=tmp_path)
    assert caplog.text == ""
    logging.getLogger("huggingface_hub.utils").warning("as before")
    assert "as before" in caplog.text


def test_a_folder_of_other_things_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"^no model in {tmp_path}: config.json is missing$"):
        prepare_model(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(keep: int, model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelBroken, match=str(path)):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


def test_a_header_that_lies_is_refused(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ModelBroken, match="damaged at x"):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = save_model(hugging_face_model("llama"), tmp_path / "sharded", shard="50KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelBroken, match=str(gone)):
        prepare_model(str(sharded), cache_dir=tmp_path / "cache")


def test_a_missing_tensor_is_named(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelBroken, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


def test_a_config_that_contradicts_the_weights_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    with pytest.raises(ModelBroken, match=r"has shape \[80, 48\]; config.json wants \[81, 48\]"):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


def test_weights_in_another_format_are_refused(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="safetensors"):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("ref", ["no-such-model", "/no/such/folder", "x/y/z"])
def test_an_unknown_reference_lists_what_is_possible(ref: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        prepare_model(ref, cache_dir=tmp_path)


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nothing\.gguf does not exist"):
        prepare_model(str(tmp_path / "nothing.gguf"), cache_dir=tmp_path)


def gguf_header(architecture: str, *, num_keys: int = 1) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    key = string("general.architecture") + struct.pack("<I", 8) + string(architecture)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, num_keys) + key


def test_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_header("mamba"))
    with pytest.raises(ModelUnsupported, match="architecture mamba"):
        prepare_model(str(path), cache_dir=tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"hello")
    with pytest.raises(ModelBroken, match="is no GGUF file"):
        prepare_model(str(path), cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf_header("llama"), r"x\.gguf has no llama\.block_count"),
        (gguf_header("llama", num_keys=2), r"x\.gguf could not be converted"),
    ],
    ids=["incomplete", "truncated"],
)
def test_a_damaged_gguf_file_is_named_and_leaves_nothing(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelBroken, match=words):
        prepare_model(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_offline_says_how_to_give_a_folder(tmp_path: Path) -> None:
    for ref in ("smollm2-135m", "nobody/no-such-model"):
        with pytest.raises(ModelNotFound, match="give a local folder with"):
            prepare_model(ref, cache_dir=tmp_path, offline=True)


def test_text_of_a_model_without_template_or_bos(model: Path, tmp_path: Path) -> None:
    write_tokenizer(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 3]}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    text_dir = prepare_model(str(model), cache_dir=tmp_path / "cache").text_dir
    info = json.loads((text_dir / "text.json").read_text())
    assert not (text_dir / "chat_template.jinja").exists()
    assert (info["bos_token"], info["bos_token_id"], info["add_bos"]) == (None, None, False)
    assert info["eos_token_ids"] == [2, 3, 5, 9]
    assert info["special_tokens"] == {"t1": 1, "t2": 2}


@pytest.mark.parametrize(("setting", "expected"), [(True, True), (False, False), (None, False)])
def test_adding_bos_follows_the_setting(
    setting: bool | None, expected: bool, model: Path, tmp_path: Path
) -> None:
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if setting is not None:
        settings["add_bos_token"] = setting
    path.write_text(json.dumps(settings))
    text_dir = prepare_model(str(model), cache_dir=tmp_path / "cache").text_dir
    info = json.loads((text_dir / "text.json").read_text())
    assert (info["bos_token_id"], info["add_bos"]) == (1, expected)


def test_adding_bos_follows_the_tokenizer_without_a_setting(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = str(model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="t1 $A", special_tokens=[("t1", 1)]
    )
    tokenizer.save(path)
    text_dir = prepare_model(str(model), cache_dir=tmp_path / "cache").text_dir
    assert json.loads((text_dir / "text.json").read_text())["add_bos"] is True


def test_a_named_default_template_is_taken(model: Path, tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text_dir = prepare_model(str(model), cache_dir=tmp_path / "cache").text_dir
    assert (text_dir / "chat_template.jinja").read_text() == "yes"


def test_a_broken_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelBroken, match=str(model / "tokenizer.json")):
        prepare_model(str(model), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("ref", ["SmolLM2-135M-Instruct", "SmolLM2-135M", "SMOLLM2-135m-instruct"])
def test_the_packaged_model_answers_to_the_names_that_people_give_it(
    ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFound, match="is not here yet and offline is set"):
        prepare_model(ref, cache_dir=tmp_path / "cache", offline=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ref).mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):  # a folder of that name
        prepare_model(ref, cache_dir=tmp_path / "cache", offline=True)
