"""Collectives: the operations in which all ranks of a group take part, and what they cost.

Every byte that a run sends is known by kind, group and purpose. Each function starts the
operation and returns a `Handle`; `handle.wait()` gives the result.

    with count_traffic() as traffic:
        handle = all_reduce(gradient, mesh.group("dp"), "gradients")
        ...  # compute: the transfer goes on meanwhile
        handle.wait()

Read `operations` (what the library uses) and `traffic` (the counters), `rings` (how the operations
are built from messages between two ranks), `autograd` (their derivatives), `cost` (how long they
take on which wire), `emulation` (a slow wire on one machine), `failures` (ranks that die, hang or
call different operations).
"""

from course_lib.collectives.cost import (
    ETHERNET_1G,
    ETHERNET_10G,
    ETHERNET_100G,
    LINKS,
    NVLINK_4,
    Link,
    fit,
    sent_bytes,
    time_of,
)
from course_lib.collectives.emulation import EmulatedLink, measure_gloo, scaled
from course_lib.collectives.failures import CollectiveError, DisagreementError, check_agreement
from course_lib.collectives.operations import (
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange,
    reduce_scatter,
)
from course_lib.collectives.traffic import Call, Traffic, Transfer, count_traffic

__all__ = [
    "ETHERNET_1G", "ETHERNET_10G", "ETHERNET_100G", "LINKS", "NVLINK_4",
    "Call", "CollectiveError", "DisagreementError", "EmulatedLink", "Handle", "Link", "Traffic",
    "Transfer", "all_gather", "all_reduce", "all_to_all", "broadcast", "check_agreement",
    "count_traffic", "exchange", "fit", "measure_gloo", "reduce_scatter", "scaled", "sent_bytes",
    "time_of",
]  # fmt: skip
