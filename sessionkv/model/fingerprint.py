"""What weights are, whatever file they came from: a digest over the digests of all tensors.

The digest of unchanged files is remembered under path, size, modification time and inode of each,
so that only the first start reads all bytes.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sessionkv.errors import ModelBroken
from sessionkv.model.files import write_atomically
from sessionkv.model.progress import Progress, ProgressSink, no_progress
from sessionkv.model.tensor_files import TensorEntry, list_tensors, weight_files

_TAG = b"sessionkv weights 2\n"
_CHUNK_BYTES = 4 * 1024**2
_MOST_THREADS = 8
"""One hashes about 1.3 GB a second, and so many of them are as fast as most memory and disks."""


def weights_fingerprint(folder: Path, memory: Path, *, progress: ProgressSink = no_progress) -> str:
    """Digest of a safetensors folder: names, element types, shapes and bytes, by name.

    Args:
        folder: Model folder.
        memory: Folder in which digests of unchanged files are remembered.
        progress: Told of the bytes read, when they have to be.

    Raises:
        ModelBroken: Naming the file that is missing, truncated or damaged.
    """
    remembered = memory / _files_key(weight_files(folder))
    if remembered.is_file():
        return remembered.read_text(encoding="ascii").strip()
    tensors = list_tensors(folder)
    digest = _digest([tensors[name] for name in sorted(tensors)], progress)
    write_atomically(remembered, digest.encode("ascii"))
    return digest


def _files_key(files: list[Path]) -> str:
    """Name under which the digest of exactly these files, unchanged, is remembered."""
    key = hashlib.sha256(_TAG)
    for path in files:
        stat = path.stat()
        key.update(
            f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode()
        )
    return key.hexdigest()


def _digest(entries: list[TensorEntry], progress: ProgressSink) -> str:
    digest = hashlib.sha256(_TAG)
    total, done = sum(entry.nbytes for entry in entries), 0
    # Reading and hashing both let other threads run.
    threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        for entry, content in zip(entries, threads.map(_content, entries), strict=True):
            digest.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\n".encode() + content)
            done += entry.nbytes
            progress(Progress("fingerprint", done, total, "bytes"))
    finally:
        threads.shutdown(cancel_futures=True)
    return digest.hexdigest()


def _content(entry: TensorEntry) -> bytes:
    """Digest of one tensor's bytes."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(entry.nbytes, _CHUNK_BYTES)))
    with entry.path.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        left = entry.nbytes
        while left:
            count = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
            if not count:
                raise ModelBroken(f"{entry.path} is truncated", path=str(entry.path))
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
