"""What ranks print, in rank order and never mixed, so that a stored notebook stays the same."""

import sys
import tempfile
from collections.abc import Iterable
from typing import TextIO

_IN_MEMORY_BYTES = 1 << 20


class Printer:
    """Prints the lines of rank 0 as they come, then those of rank 1, and so on.

    What comes before its turn waits: in memory, from a megabyte on in a temporary file. A rank's
    standard error follows its standard output, for how the two interleave is a matter of chance.
    Of a line that was drawn over (a progress bar) the last state remains.
    """

    def __init__(self, world_size: int) -> None:
        self._turn = 0
        self._finished = [False] * world_size
        self._tail = b""  # of the rank whose turn it is: a line without its end
        self._waiting = [
            [tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) for _stream in range(2)]  # noqa: SIM115
            for _rank in range(world_size)
        ]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take what a rank wrote to its standard output (stream 0) or error (1)."""
        if rank == self._turn and stream == 0:
            self._print(rank, data, sys.stdout)
        else:
            self._waiting[rank][stream].write(data)

    def finish(self, rank: int) -> None:
        """Note that a rank's function is done: if it was its turn, the next rank's comes."""
        self._finished[rank] = True
        while self._turn < len(self._finished) and self._finished[self._turn]:
            self._print_rest(self._turn)
            self._turn += 1
            if self._turn < len(self._finished):
                self._print_waiting(self._turn, 0, sys.stdout)

    def close(self, leave_out: Iterable[int] = ()) -> None:
        """Print everything that is left, finished or not, but of the ranks in `leave_out`."""
        for rank, streams in enumerate(self._waiting):
            if rank not in leave_out:
                self._print_rest(rank)
            for stream in streams:
                stream.close()
        sys.stdout.flush()

    def _print_rest(self, rank: int) -> None:
        for stream, target in enumerate((sys.stdout, sys.stderr)):
            self._print_waiting(rank, stream, target)
            self._print(rank, b"\n" if self._tail else b"", target)
            target.flush()  # before the other stream goes on

    def _print_waiting(self, rank: int, stream: int, target: TextIO) -> None:
        waiting = self._waiting[rank][stream]
        waiting.seek(0)
        while data := waiting.read(1 << 16):
            self._print(rank, data, target)
        waiting.seek(0)
        waiting.truncate()

    def _print(self, rank: int, data: bytes, target: TextIO) -> None:
        *lines, self._tail = (self._tail + data).split(b"\n")
        texts = (line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1] for line in lines)
        target.write("".join(f"[rank {rank}] {text}\n" for text in texts))
