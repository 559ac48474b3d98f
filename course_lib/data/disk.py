"""An emulated disk: on a learner's machine files are in memory, and no disk is ever waited for."""

import fcntl
import os
import struct
import tempfile
import time
import weakref

from course_lib.data.shards import TokenShards


class EmulatedDisk:
    """A disk with one queue: a read starts when those before it are done, and then takes
    `latency_s` + bytes / `bytes_per_s` seconds.

    Waiting sleeps, so that computing hides it where somebody reads ahead. The queue is shared by
    all threads, and by all processes on this machine that got the disk by pickling. It is an
    emulation: each window costs a latency, nothing is cached, and bytes are those of the tokens.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not (bytes_per_s > 0 and latency_s >= 0):
            raise ValueError(f"no disk gives {bytes_per_s} bytes/s after {latency_s} s")
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        handle, self._queue = tempfile.mkstemp(prefix="disk-")  # when the disk is free again
        os.close(handle)
        weakref.finalize(self, os.unlink, self._queue)  # not run by copies in other processes

    def mount(self, shards: TokenShards) -> TokenShards:
        """The same shards as if they lay on this disk; opened shards are read without checks."""
        return _Mounted(shards, self)

    def transfer(self, size_bytes: int) -> None:
        """Sleep until a read of so many bytes, queued now, would be done."""
        with open(self._queue, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (free,) = struct.unpack("d", file.read(8) or bytes(8))
            done = max(free, time.monotonic()) + self.latency_s + size_bytes / self.bytes_per_s
            file.seek(0)
            file.write(struct.pack("d", done))
        time.sleep(max(0.0, done - time.monotonic()))


class _Mounted(TokenShards):
    """Shards whose reads wait for a disk."""

    def __init__(self, shards: TokenShards, disk: EmulatedDisk) -> None:
        vars(self).update(vars(shards))
        self._own, self._disk = shards, disk

    def read(self, start: int, stop: int):
        """A copy of tokens start … stop - 1, when the disk has delivered them."""
        self._disk.transfer((stop - start) * self.dtype.itemsize)
        return super().read(start, stop)

    def __reduce__(self) -> tuple:
        return _Mounted, (self._own, self._disk)
