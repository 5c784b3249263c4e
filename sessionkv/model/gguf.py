"""GGUF files: checked by their header, converted once in a child process, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sessionkv.errors import ModelBroken, ModelUnsupported
from sessionkv.model.files import exclusive_lock
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

    Safe when several processes ask at once (one works, the others wait) and when one is killed in
    the middle (the next starts over; nothing half-made is ever under the final name).

    Args:
        name: Names the content: the same name is the same weights.
        cache_dir: Where prepared models live.
        fetch: Gives the GGUF file, putting it into the scratch folder it is handed if need be.
        progress: Told of the stages.

    Raises:
        ModelBroken: The file is damaged.
        ModelUnsupported: The decoder cannot compute this model.
    """
    target = cache_dir / "models" / f"{name}-{_FORMAT}"
    if target.is_dir():
        return target
    with exclusive_lock(cache_dir / "locks" / f"{name}.lock", progress) as lock:
        if target.is_dir():
            return target
        for left_over in target.parent.glob(f".tmp-{name}-*"):
            shutil.rmtree(left_over)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".tmp-{name}-"))
        try:
            source = fetch(draft)
            check_gguf(source)
            folder = draft / "folder"
            folder.mkdir()
            _convert(source, folder, lock=lock, progress=progress)
            folder.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


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
