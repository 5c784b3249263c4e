"""Where each tensor of a safetensors folder lies, found and checked without reading weights.

Reads only the headers (format: https://github.com/huggingface/safetensors). A file that is
missing, truncated or contradicts its header is found here, before anything is allocated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from sessionkv.errors import ModelBroken, ModelUnsupported
from sessionkv.model.spec import read_json

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 * 1024**2


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: ``nbytes`` bytes from ``offset`` of ``path``, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by name.

    Raises:
        ModelBroken: A file of the index is missing, or there are no weights.
        ModelUnsupported: The weights are there in another format only.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(read_json(index).get("weight_map", {}).values())
        files = sorted(folder / str(name) for name in names)
    else:
        files = [folder / "model.safetensors"]
    missing = [path for path in files if not path.is_file()]
    if files and not missing:
        return files
    if not index.exists() and any(folder.glob("*.bin")):
        raise ModelUnsupported(f"{folder} has no safetensors weights, only .bin files")
    path = missing[0] if missing else index
    raise ModelBroken(f"{path} is missing", path=str(path))


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder by name. Cost: one header per file.

    Raises:
        ModelBroken: Naming the file that is missing, truncated or damaged.
        ModelUnsupported: An element type the decoder cannot read.
    """
    found: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        found.update(_read_header(path))
    return found


def _read_header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelBroken(f"{path} is no safetensors file or is truncated", path=str(path))
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelBroken(f"{path} has a damaged header: {error}", path=str(path)) from None
    header.pop("__metadata__", None)
    return {
        name: _entry(name, value, path=path, base=8 + length, size=size)
        for name, value in header.items()
    }


def _entry(name: str, value: dict[str, object], *, path: Path, base: int, size: int) -> TensorEntry:
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ModelBroken(f"{path} has a damaged header at {name}", path=str(path))
    if dtype not in ELEMENT_BYTES:
        raise ModelUnsupported(
            f"{path}: {name} has element type {dtype}; supported: {', '.join(ELEMENT_BYTES)}"
        )
    start, end = offsets
    if end - start != math.prod(shape) * ELEMENT_BYTES[str(dtype)] or base + end > size:
        raise ModelBroken(f"{path} is truncated or damaged at {name}", path=str(path))
    return TensorEntry(name, str(dtype), tuple(shape), path, base + start, end - start)
