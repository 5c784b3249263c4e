"""What may happen to the files of a store behind its back, as changes to their bytes.

``HARMS`` names every kind. Each takes the files (path below the store -> bytes, changed in place)
and those of an earlier time, and says what it did. Nothing here knows a file's format but that
segment files are ``segment-*.kv`` with slots of one size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096

Files = dict[str, bytearray]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a harm works on.

    Attributes:
        files: To be harmed.
        earlier: The same store at an earlier time.
        slot_bytes: Size of a record in a segment file.
    """

    files: Files
    earlier: Mapping[str, bytes]
    slot_bytes: int

    def segments(self) -> list[str]:
        return [name for name in sorted(self.files) if name.endswith(".kv")]

    def others(self) -> list[str]:
        return [name for name in sorted(self.files) if not name.endswith(".kv")]

    def any_file(self, rng: random.Random) -> str:
        """Segment files half of the time, whatever their number."""
        segments = self.segments()
        return rng.choice(segments if segments and rng.random() < 0.5 else self.others())


def read_files(folder: Path, pattern: str) -> dict[str, bytes]:
    """The regular files below ``folder`` that match."""
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write_files(folder: Path, files: Mapping[str, bytes | bytearray]) -> None:
    """Make the files what they are to be; those not named are left alone."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(data)


def flip_bits(rng: random.Random, scene: Scene) -> str:
    """One bit, or some."""
    count = rng.choice((1, 1, 1, 2, 8, 64))
    names = []
    for _ in range(count):
        name = scene.any_file(rng)
        if data := scene.files[name]:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            names.append(name)
    return f"{count} bits of {sorted(set(names))}"


def truncate(rng: random.Random, scene: Scene) -> str:
    """A file ends early, at any byte or at a page."""
    name = scene.any_file(rng)
    size = rng.randrange(len(scene.files[name]) + 1)
    if rng.random() < 0.5:
        size -= size % PAGE
    del scene.files[name][size:]
    return f"{name} ends at {size}"


def zero_range(rng: random.Random, scene: Scene) -> str:
    """A stretch was never written."""
    name, start, end = _stretch(rng, scene)
    scene.files[name][start:end] = bytes(end - start)
    return f"{name} is zero from {start} to {end}"


def garbage(rng: random.Random, scene: Scene) -> str:
    """A stretch holds something else."""
    name, start, end = _stretch(rng, scene)
    scene.files[name][start:end] = rng.randbytes(end - start)
    return f"{name} is random from {start} to {end}"


def grow(rng: random.Random, scene: Scene) -> str:
    """A file goes on where it should end."""
    name = scene.any_file(rng)
    size = rng.choice((1, 100, PAGE, scene.slot_bytes))
    scene.files[name] += rng.choice((bytes(size), rng.randbytes(size)))
    return f"{name} has {size} bytes more"


def swap_slots(rng: random.Random, scene: Scene) -> str:
    """Two records, or parts of them, change places."""
    name, first, second = _two_slots(rng, scene)
    # All of it, the header alone, the payload alone.
    low, high = rng.choice(((0, scene.slot_bytes), (0, PAGE), (PAGE, scene.slot_bytes)))
    data, size = scene.files[name], high - low
    a, b = first + low, second + low
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return f"{name} has {size} bytes at {a} and {b} swapped"


def copy_slot(rng: random.Random, scene: Scene) -> str:
    """A record lies where another should."""
    name, first, second = _two_slots(rng, scene)
    data, size = scene.files[name], scene.slot_bytes
    data[second : second + size] = data[first : first + size]
    return f"{name} has the record at {first} at {second} too"


def swap_pages(rng: random.Random, scene: Scene) -> str:
    """Two pages of a file change places."""
    name = rng.choice(scene.others())
    data = scene.files[name]
    pages = range(0, len(data) - PAGE + 1, PAGE)
    if len(pages) < 2:
        return f"{name} has no two pages"
    a, b = rng.sample(pages, 2)
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
    return f"{name} has the pages at {a} and {b} swapped"


def stale_file(rng: random.Random, scene: Scene) -> str:
    """A file is as it was at an earlier time."""
    name = rng.choice(sorted(scene.earlier.keys() & scene.files.keys()))
    scene.files[name][:] = scene.earlier[name]
    return f"{name} is an earlier one"


def stale_range(rng: random.Random, scene: Scene) -> str:
    """A page or record is as it was at an earlier time: a write that was lost."""
    name = rng.choice(sorted(scene.earlier.keys() & scene.files.keys()))
    data, old = scene.files[name], scene.earlier[name]
    size = scene.slot_bytes if name.endswith(".kv") else PAGE
    start = rng.randrange(max(1, min(len(data), len(old)) // size)) * size
    part = old[start : start + size]
    data[start : start + len(part)] = part
    return f"{name} is an earlier one at {start}"


def remove_file(rng: random.Random, scene: Scene) -> str:
    """A file is not there."""
    name = scene.any_file(rng)
    del scene.files[name]
    return f"{name} is gone"


HARMS: Mapping[str, Callable[[random.Random, Scene], str]] = {
    made.__name__: made
    for made in (
        flip_bits,
        truncate,
        zero_range,
        garbage,
        grow,
        swap_slots,
        copy_slot,
        swap_pages,
        stale_file,
        stale_range,
        remove_file,
    )
}

NEED_SEGMENTS = frozenset({"swap_slots", "copy_slot"})


def _stretch(rng: random.Random, scene: Scene) -> tuple[str, int, int]:
    name = scene.any_file(rng)
    size = len(scene.files[name])
    start = rng.randrange(size + 1)
    length = rng.choice((1, 8, 100, PAGE, 3 * PAGE, size))
    if rng.random() < 0.5:
        start -= start % PAGE
    return name, start, min(size, start + length)


def _two_slots(rng: random.Random, scene: Scene) -> tuple[str, int, int]:
    name = rng.choice(scene.segments())
    starts = range(0, len(scene.files[name]) - scene.slot_bytes + 1, scene.slot_bytes)
    if len(starts) < 2:
        return name, 0, 0
    first, second = rng.sample(starts, 2)
    return name, first, second
