"""How long a collective takes: the alpha-beta model, fitted to measurements.

One message of S bytes takes alpha + S / beta: alpha is the latency (s), beta the bandwidth
(bytes/s). A collective is a number of steps, each one message a rank, one after the other. On a
ring, every rank sends to its right neighbor and receives from its left at once:

    reduce-scatter, all-gather, all-to-all: n - 1 steps, (n - 1) / n x S bytes a rank
    all-reduce (the first two in turn):     2 (n - 1) steps, 2 (n - 1) / n x S bytes
    broadcast (a binomial tree):            log2 n steps, rounded up, S bytes each

S is the payload: the whole tensor, not one rank's piece. No all-reduce sends less than the ring
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009); trees need fewer steps.
NCCL chooses its algorithm by the same model, with constants measured by its makers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Link:
    """A wire in one direction: each message takes latency_s + its bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self):
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"a link needs a latency >= 0 and a bandwidth > 0, got {self}")


# Bandwidths are the standards' line rates in one direction: IEEE 802.3 for Ethernet (bits / 8);
# 900 GB/s in both directions together for NVLink 4 (NVIDIA H100 data sheet). Latencies depend on
# more than the wire. NVLink and 100 GbE: what NCCL assumes for one step of a ring over NVLink and
# over a network (tuning.cc, ring, "Simple" protocol, in the versions that know NVLSTree; 9.6 us
# for the network before). 1 and 10 GbE: an assumption, typical of TCP through the kernel.
ETHERNET_1G = Link(50e-6, 0.125e9)
ETHERNET_10G = Link(50e-6, 1.25e9)
ETHERNET_100G = Link(14.0e-6, 12.5e9)
NVLINK_4 = Link(3.4e-6, 450e9)
LINKS = {
    "1 GbE": ETHERNET_1G, "10 GbE": ETHERNET_10G, "100 GbE": ETHERNET_100G, "NVLink 4": NVLINK_4,
}  # fmt: skip

_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


def time_of(kind: str, payload_bytes: float, ranks: int, link: Link) -> float:
    """Seconds that a collective of this payload takes, from the arrival of the last rank."""
    moved = sent_bytes(kind, payload_bytes, ranks)
    return steps(kind, ranks) * link.latency_s + moved / link.bytes_per_s


def steps(kind: str, ranks: int) -> int:
    """Number of messages that follow one another."""
    if kind in ("send", "receive"):
        return 1
    if kind == "broadcast":
        return (ranks - 1).bit_length()  # log2, rounded up
    return _rounds(kind) * (ranks - 1)


def sent_bytes(
    kind: str, payload_bytes: float, ranks: int, rank: int | None = None, element_bytes: int = 1
) -> float:
    """Bytes that one rank sends: that of a broadcast's root, of all ranks alike in the others.

    rank: then exactly that rank's, where elements of so many bytes don't divide into equal chunks.
    """
    if kind == "send":
        return payload_bytes
    if kind == "broadcast":
        return _children(rank or 0, ranks) * payload_bytes
    if rank is None:
        return _rounds(kind) * (ranks - 1) / ranks * payload_bytes
    # Reduce-scatter sends all chunks but its own, all-gather all but its right neighbor's.
    elements = payload_bytes // element_bytes
    kept = {"all_gather": [rank + 1], "all_reduce": [rank, rank + 1]}.get(kind, [rank])
    return sum(elements - chunk_size(elements, ranks, c % ranks) for c in kept) * element_bytes


def chunk_size(elements: int, ranks: int, chunk: int) -> int:
    """Elements in a chunk where the first chunks take one more each (torch.tensor_split)."""
    return elements // ranks + (chunk < elements % ranks)


def fit(sizes: Sequence[float], times: Sequence[float], kind: str = "send", ranks: int = 2) -> Link:
    """The link that explains measured times (s) of a collective with payloads of sizes (bytes).

    Relative errors count, so that microseconds weigh as much as seconds, and absolute ones, not
    squares, so that a few messages that were held up count little. Needs two sizes that differ.
    """
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    if len(set(sizes)) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise ValueError("fit needs times > 0 of at least two different sizes")
    moved = [sent_bytes(kind, size, ranks) for size in sizes]
    terms = np.column_stack((np.full(len(sizes), steps(kind, ranks)), moved)) / times[:, None]
    weights = np.ones(len(sizes))
    for _ in range(50):  # least squares, weighed anew: ends at the least absolute error
        root = np.sqrt(weights)
        latency_s, s_per_byte = np.linalg.lstsq(terms * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(abs(terms @ [latency_s, s_per_byte] - 1), 1e-6)
    if s_per_byte <= 0:
        raise ValueError("the times do not grow with the sizes: measure larger messages")
    return Link(max(float(latency_s), 0.0), 1 / float(s_per_byte))


def _rounds(kind: str) -> int:
    """Passes around the ring: 2 of an all-reduce, 1 of the others."""
    if kind not in _ROUNDS:
        raise ValueError(f"unknown kind {kind!r}; use send, broadcast, {', '.join(_ROUNDS)}")
    return _ROUNDS[kind]


def _children(place: int, ranks: int) -> int:
    """Ranks to which a place of the binomial tree sends: place + 1, 2, 4 ... beyond its own bit."""
    return sum(place < 1 << bit < ranks - place for bit in range((ranks - 1).bit_length()))
