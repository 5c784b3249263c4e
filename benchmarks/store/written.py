"""How many bytes a piece of work made the process, and the device below it, write."""

from __future__ import annotations

import os
from pathlib import Path


class Written:
    """Counts from entering to leaving, which waits until all of it is on disk.

    Attributes:
        factor: Bytes that this process gave the system to write, over the payload's.
        device_factor: Bytes that the device wrote, whoever for, over the payload's: the file
            system's journal is among them. 0 where it keeps no count.
    """

    def __init__(self, folder: Path, payload_bytes: int) -> None:
        """Count nothing yet."""
        self.factor = 0.0
        self.device_factor = 0.0
        self._folder = folder
        self._payload_bytes = payload_bytes
        self._before = (0, 0)

    def __enter__(self) -> Written:
        os.sync()
        self._before = self._counts()
        return self

    def __exit__(self, *_: object) -> None:
        os.sync()
        own, device = (
            after - before for after, before in zip(self._counts(), self._before, strict=True)
        )
        self.factor = own / self._payload_bytes
        self.device_factor = device / self._payload_bytes

    def _counts(self) -> tuple[int, int]:
        lines = dict(
            line.split(": ") for line in Path("/proc/self/io").read_text().strip().split("\n")
        )
        # Not write_bytes: that counts whole large pages of the cache where a part was written.
        own = int(lines["wchar"])
        number = self._folder.stat().st_dev
        path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        device = int(path.read_text().split()[6]) * 512 if path.exists() else 0
        return own, device
