"""Blocks on their way between the disk and a device pool that the disk cannot reach.

They pass through a bounded piece of host memory, a piece of a transfer at a time: while one piece
is copied to the device the store reads the next ones, and while one is written the next is copied
out. The store answers pieces; the transfer is answered by one result when its last piece has ended.

Nothing here waits for the disk. Knows nothing of hashes, leases or sequences.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sessionkv.engine.copy_attempts import CopyAttempt
from sessionkv.engine.device_memory import DeviceMemory, reserve
from sessionkv.store.worker import Results, StoreWorker
from sessionkv.types import MoveOutcome, Tier, Transfer, TransferResult

STAGING_BYTES = 128 * 2**20
"""Of each direction: enough to keep a fast disk busy while pieces are copied."""
READ_PIECES = 8
"""Several pieces are read at a time, as one is soon copied and its memory soon free again."""
WRITE_PIECES = 2
"""As few as allow one to be filled while another is written: each costs a wait for the disk."""


class Staging:
    """Host memory of some blocks, handed out block by block. Not thread-safe."""

    def __init__(
        self, device: DeviceMemory, block_bytes: int, *, num_bytes: int, pieces: int
    ) -> None:
        """Reserve the memory.

        Args:
            device: What it is made quick for.
            block_bytes: Of one block.
            num_bytes: In all; at least two blocks are taken.
            pieces: Into how many pieces it is divided where it has as many blocks.
        """
        num_blocks = max(2, num_bytes // block_bytes)
        memory = reserve(num_blocks * block_bytes)
        device.pin(memory, block_bytes)
        self._free = [memory[i * block_bytes :][:block_bytes] for i in range(num_blocks)]
        self._piece_blocks = max(1, num_blocks // pieces)

    def take_piece(self, wanted: int) -> list[memoryview]:
        """Memory of a whole piece, or of ``wanted`` blocks where they are fewer; else nothing.

        Waiting until there is room for a whole one keeps pieces from becoming ever smaller.
        """
        count = min(wanted, self._piece_blocks)
        if count > len(self._free):
            return []
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, views: Sequence[memoryview]) -> None:
        """End the use of a piece."""
        self._free += views


@dataclass(slots=True)
class _Staged:
    """A transfer under way.

    Attributes:
        fence: What its copies come behind.
        begun: Moves that belong to a piece so far.
        begun_s: When the first piece was begun.
        outcomes: Of each move, once it has ended.
    """

    transfer: Transfer
    fence: object
    begun: int = 0
    begun_s: float = 0.0
    outcomes: dict[int, MoveOutcome] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.outcomes) == len(self.transfer.moves)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a transfer that the store works on.

    Attributes:
        moves: Which of the transfer's moves were given to the store.
        views: The memory of each.
        taken: All memory of the piece.
    """

    staged: _Staged
    moves: list[int]
    views: list[memoryview]
    taken: list[memoryview]


class StagedMoves:
    """Transfers of one direction, DISK to DEVICE or back. Used by one thread."""

    def __init__(
        self,
        device: DeviceMemory,
        staging: Staging,
        store: StoreWorker,
        *,
        inbox: Results,
        reply_to: Results,
    ) -> None:
        """Nothing is under way.

        Args:
            device: The pool.
            staging: Used by nobody else.
            store: Reads and writes the pieces.
            inbox: Takes one result for each transfer.
            reply_to: Takes the store's results, to be given to :meth:`take_in` on this thread.
        """
        self._device, self._staging, self._store = device, staging, store
        self._inbox, self._reply_to = inbox, reply_to
        self._piece_ids = itertools.count()
        self._unbegun: deque[_Staged] = deque()
        self._pieces: dict[int, _Piece] = {}
        self._answered_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._unbegun and not self._pieces

    def submit(self, transfer: Transfer, fence: object) -> None:
        """Queue a transfer, to be begun by :meth:`begin`."""
        self._unbegun.append(_Staged(transfer, fence))

    def begin(self) -> None:
        """Begin pieces while there is memory for them. Waits for copies from the device."""
        while self._unbegun:
            staged = self._unbegun[0]
            count = len(staged.transfer.moves)
            taken = self._staging.take_piece(count - staged.begun)
            if not taken and staged.begun < count:
                return
            moves = list(range(staged.begun, staged.begun + len(taken)))
            if not staged.begun:
                staged.begun_s = time.monotonic()
            staged.begun += len(taken)
            if staged.begun == count:
                self._unbegun.popleft()
            self._begin_piece(staged, moves, taken)

    def take_in(self, result: TransferResult) -> None:
        """The store has done a piece. Waits for its copy to the device."""
        piece = self._pieces.pop(result.transfer_id)
        outcomes = dict(zip(piece.moves, result.outcomes, strict=True))
        if piece.staged.transfer.src is Tier.DISK:
            self._copy_in(piece, outcomes)
        self._end_piece(piece, outcomes)

    def refuse_rest(self) -> int:
        """Answer what is under way: what has not ended is not done. How many transfers."""
        rest = {id(staged): staged for staged in self._unbegun}
        rest |= {id(piece.staged): piece.staged for piece in self._pieces.values()}
        self._unbegun.clear()
        self._pieces.clear()
        for staged in rest.values():
            self._answer(staged)
        return len(rest)

    def _begin_piece(self, staged: _Staged, moves: list[int], taken: list[memoryview]) -> None:
        transfer, views, lost = staged.transfer, list(taken), list[int]()
        if transfer.src is Tier.DEVICE:
            copies = [(transfer.moves[i].src, view) for i, view in zip(moves, views, strict=True)]
            arrived = CopyAttempt(self._device.copy_out, copies, staged.fence).wait()
            lost = [i for i, has in zip(moves, arrived, strict=True) if not has]
            views = list(itertools.compress(views, arrived))
            moves = list(itertools.compress(moves, arrived))
        piece = _Piece(staged, moves, views, taken)
        if not moves:
            self._end_piece(piece, dict.fromkeys(lost, MoveOutcome.IO_ERROR))
            return
        staged.outcomes |= dict.fromkeys(lost, MoveOutcome.IO_ERROR)
        piece_id = next(self._piece_ids)
        self._pieces[piece_id] = piece
        part = tuple(transfer.moves[i] for i in moves)
        job = Transfer(piece_id, transfer.src, transfer.dst, part)
        self._store.transfer(job, views, reply_to=self._reply_to)

    def _copy_in(self, piece: _Piece, outcomes: dict[int, MoveOutcome]) -> None:
        """Copy to the device what was read; what fails is noted in ``outcomes``."""
        moves = piece.staged.transfer.moves
        copies = {
            i: (moves[i].dst, view)
            for i, view in zip(piece.moves, piece.views, strict=True)
            if outcomes[i] is MoveOutcome.OK
        }
        attempt = CopyAttempt(self._device.copy_in, list(copies.values()), piece.staged.fence)
        for i, has_arrived in zip(copies, attempt.wait(), strict=True):
            if not has_arrived:
                outcomes[i] = MoveOutcome.IO_ERROR

    def _end_piece(self, piece: _Piece, outcomes: dict[int, MoveOutcome]) -> None:
        self._staging.give_back(piece.taken)
        piece.staged.outcomes |= outcomes
        if piece.staged.is_done:
            self._answer(piece.staged)

    def _answer(self, staged: _Staged) -> None:
        now_s = time.monotonic()
        # Pieces of the transfer before may still have been under way when this one began.
        elapsed_s = now_s - max(staged.begun_s or now_s, self._answered_s)
        self._answered_s = now_s
        count = len(staged.transfer.moves)
        outcomes = tuple(staged.outcomes.get(i, MoveOutcome.IO_ERROR) for i in range(count))
        self._inbox.put(TransferResult(staged.transfer.transfer_id, outcomes, elapsed_s))
