"""The digest of weights, against one that is made in the plainest way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sessionkv.model.fingerprint import weights_fingerprint
from sessionkv.model.progress import Progress

TENSORS = {
    "b": np.arange(3, dtype=np.float32),
    "a": np.arange(1_100_000, dtype=np.float32),  # read in two turns
    "c": np.zeros((2, 0), np.float32),
}


def test_names_types_shapes_and_bytes_are_in_it_by_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = hashlib.sha256(b"sessionkv weights 2\n")
    for name in sorted(TENSORS):
        tensor = TENSORS[name]
        expected.update(f"{name}\0F32\0{tensor.shape}\n".encode())
        expected.update(hashlib.sha256(tensor.tobytes()).digest())
    seen: list[Progress] = []
    memory = tmp_path / "memory"
    found = weights_fingerprint(tmp_path, memory, progress=seen.append)
    assert found == expected.hexdigest()
    assert [event.done for event in seen] == [4_400_000, 4_400_012, 4_400_012]
    assert {(event.stage, event.total) for event in seen} == {("fingerprint", 4_400_012)}
    seen.clear()
    assert weights_fingerprint(tmp_path, memory, progress=seen.append) == found
    assert not seen  # remembered
