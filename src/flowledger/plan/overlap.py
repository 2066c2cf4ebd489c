"""When communication hides behind work: T_compute(chunk) >= T_comm(chunk), on a device and its links.

A ring of pieces: while one is worked on, the next is on its way; a step lasts as long as the slower of the two, so that each
piece that travels leaves max(0, T_comm - T_compute) uncovered. A piece takes latency + bytes / bandwidth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from flowledger.tables.constants import constant
from flowledger.tables.gpus import Gpu
from flowledger.tables.operators import FAILURES

FASTEST_PCIE = 128e9  # 5.0 x16, both directions; a bridge of two devices is no faster, and others go over PCIe there
LONGEST_CHUNK = 2**40  # a break-even beyond it is none

SHARES = {"matmul": "matmul_share", "attention": "attention_share", "memory": "memory_share"}

# Kind -> how often it goes round a ring of its ranks; the others reach every peer in one step, sends posted together.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins two devices, as one of them sees it."""

    name: str  # node, network
    bytes_per_s: float  # reached, in one direction
    start_s: float  # of a message
    step_s: float  # of each hop

    def seconds(self, size: float) -> float:
        """How long so many bytes take from one to the other."""
        return self.start_s + self.step_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The links of a group of ranks, of which `together` share a node."""

    ranks: int
    together: int
    node: Link
    network: Link

    @property
    def name(self) -> str:
        """node, or network where the ranks lie on several."""
        return "node" if self.together == self.ranks else "network"

    def seconds(self, kind: str, size: float) -> float:
        """How long a collective takes in which each rank sends so many bytes."""
        return self.latency_s(kind) + size / self.bytes_per_s(kind)

    def latency_s(self, kind: str) -> float:
        """What one of no bytes takes. Of the hops round a ring as few as there are nodes go over the network."""
        within, between = self.node.step_s, 0.0 if self.name == "node" else self.network.step_s
        if kind not in ROUNDS:
            return self.node.start_s + max(within, between)
        nodes = -(-self.ranks // self.together)
        return self.node.start_s + ROUNDS[kind] * ((self.ranks - nodes) * within + (nodes - 1) * between)

    def bytes_per_s(self, kind: str) -> float:
        """At which a rank sends. Rings go through the adapters of all ranks of a node; an exchange takes both links at once."""
        inside, outside = self.node.bytes_per_s, self.network.bytes_per_s
        if self.name == "node":
            return inside
        if kind in ROUNDS:
            return min(inside, self.together * outside)
        if kind != "all_to_all":
            return outside
        peers = self.ranks - 1
        return peers / max((self.together - 1) / inside, (self.ranks - self.together) / outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one device, and its links. `dtype`: in which it multiplies."""

    gpu: Gpu
    gpus_per_node: int
    world: int
    dtype: str = "bfloat16"

    def rate(self, name: str) -> float:
        """What is reached of the peak: FLOP/s for `matmul` and `attention`, bytes/s for `memory`."""
        peak = self.gpu.hbm_bytes_per_s if name == "memory" else self.gpu.flops(self.dtype)
        return peak * constant(SHARES[name])

    def seconds(self, rate: str, work: float) -> float:
        """How long so much work takes at that rate."""
        return work / self.rate(rate)

    def route(self, stride: int, ranks: int) -> Route:
        """The links of a group whose ranks lie `stride` apart, of the group that lies over the most nodes.

        Groups begin at multiples of stride*ranks, nodes at multiples of their devices: between two borders of either kind
        there are at least gcd of the two.
        """
        span = stride * ranks
        alone = self.world <= self.gpus_per_node or self.gpus_per_node % span == 0
        together = ranks if alone else min(ranks, max(1, gcd(self.gpus_per_node, span) // stride))
        return Route(ranks=ranks, together=together, node=self.node, network=self.network)

    @property
    def node(self) -> Link:
        """Between devices of a node."""
        both = self.gpu.link_bytes_per_s
        step = constant("pcie_latency_s" if both <= FASTEST_PCIE else "link_latency_s")
        return Link(name="node", bytes_per_s=both / 2 * constant("link_share"), start_s=self._start, step_s=step)

    @property
    def network(self) -> Link:
        """Between nodes, one adapter a device."""
        speed = constant("network_bytes_per_s") * constant("link_share")
        return Link(name="network", bytes_per_s=speed, start_s=self._start, step_s=constant("network_latency_s"))

    @property
    def _start(self) -> float:
        return constant("collective_latency_s")


def _nothing(_: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Work and transfer of a piece of so many tokens, and how many pieces there are."""

    compute_s: Callable[[int], float]
    comm_s: Callable[[int], float]
    steps: int  # pieces that travel while another is worked on
    wait_s: Callable[[int], float] = _nothing  # of pieces that travel while nothing is

    def hides(self, chunk: int) -> bool:
        """T_compute(chunk) >= T_comm(chunk)."""
        return self.compute_s(chunk) >= self.comm_s(chunk)

    def exposed_s(self, chunk: int) -> float:
        """Seconds of communication that no work covers."""
        return self.wait_s(chunk) + exposed_s(self.compute_s(chunk), self.comm_s(chunk), self.steps)

    def break_even(self) -> int | None:
        """The smallest chunk that hides; None where none does.

        Transfers grow with the chunk, work at least as fast: what hides at one size hides at every greater one.
        """
        low, high = 0, 1
        while not self.hides(high):
            if high >= LONGEST_CHUNK:
                return None
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.hides(middle) else (middle, high)
        return high


def exposed_s(compute_s: float, comm_s: float, steps: int) -> float:
    """Seconds of `steps` transfers that as many steps of work leave uncovered."""
    return steps * max(0.0, comm_s - compute_s)


def failing(*, chunks: bool, context: str, pipelined: bool, holds: bool | None) -> list[str]:
    """Which of FAILURES there are. `holds`: the inequality; None where no device says."""
    met = (chunks, context != "whole", pipelined, holds is not False)
    return [name for name, fine in zip(FAILURES, met, strict=True) if not fine]
