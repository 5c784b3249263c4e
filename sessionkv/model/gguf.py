"""GGUF files: checked by their header, converted once in a child process, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sessionkv.errors import ModelBroken, ModelUnsupported
from sessionkv.model.files import make_folder_once
from sessionkv.model.progress import Progress, ProgressSink
from sessionkv.model.spec import FAMILIES

_MAGIC = b"GGUF"
_STRING = 8
_FORMAT = "v1"


def file_key(path: Path) -> str:
    """Name of this very file, unchanged: path, size, modification time and inode."""
    stat = path.stat()
    text = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepared_folder(
    name: str, cache_dir: Path, fetch: Callable[[Path], Path], *, progress: ProgressSink
) -> Path:
    """The converted folder of that name, made now if it is not there.

    Args:
        name: Names the content: the same name is the same weights.
        cache_dir: Where prepared models live.
        fetch: Gives the GGUF file, putting it into the scratch folder it is handed if need be.
        progress: Told of the stages.

    Raises:
        ModelBroken: The file is damaged.
        ModelUnsupported: The decoder cannot compute this model.
    """

    def make(scratch: Path, lock: int) -> Path:
        source = fetch(scratch)
        check_gguf(source)
        folder = scratch / "folder"
        folder.mkdir()
        _convert(source, folder, lock=lock, progress=progress)
        return folder

    target = cache_dir / "models" / f"{name}-{_FORMAT}"
    return make_folder_once(target, cache_dir / "locks", make, progress=progress)


def check_gguf(path: Path) -> None:
    """Read the header: is this GGUF, of an architecture the decoder can compute?

    Raises:
        ModelBroken: It is not GGUF.
        ModelUnsupported: Naming the architecture.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelBroken(f"{path} is no GGUF file", path=str(path))
        file.seek(24)  # version, number of tensors, number of keys
        key, kind = _string(file), int.from_bytes(file.read(4), "little")
        if key != "general.architecture" or kind != _STRING:
            return  # by convention it is the first key; the conversion itself finds it elsewhere
        architecture = _string(file)
    if architecture not in FAMILIES:
        raise ModelUnsupported(
            f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}",
            architecture=architecture,
        )


def _string(file: BinaryIO) -> str:
    length = int.from_bytes(file.read(8), "little")
    return file.read(min(length, 256)).decode("utf-8", "replace")


def _convert(source: Path, folder: Path, *, lock: int, progress: ProgressSink) -> None:
    """Run the child, which inherits the lock, so that no second one can start while it lives."""
    command = [sys.executable, "-m", "sessionkv.model.convert", str(source.resolve()), str(folder)]
    refusal: dict[str, str] = {}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, pass_fds=(lock,), text=True
        ) as child,
    ):
        for line in child.stdout or ():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if "done" in event:
                progress(Progress("convert", event["done"], event["total"], "steps"))
            else:
                refusal = event
        code = child.wait()
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    if refusal.get("code") == ModelUnsupported.code:
        raise ModelUnsupported(refusal["message"])
    if refusal:
        raise ModelBroken(refusal["message"], path=str(source))
    if code != 0:
        reason = lines[-1] if lines else f"the conversion ended with code {code}"
        raise ModelBroken(f"{source} could not be converted: {reason}", path=str(source))
