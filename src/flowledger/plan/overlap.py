"""When communication hides behind work: T_compute(chunk) >= T_comm(chunk), on a device and a link.

A ring of pieces: while one is worked on, the next is on its way; a step lasts as long as the slower of the two, so that each
piece that travels leaves max(0, T_comm - T_compute) uncovered. A piece takes latency + bytes / bandwidth.
"""

from collections.abc import Callable
from dataclasses import dataclass

from flowledger.tables.constants import constant
from flowledger.tables.gpus import Gpu
from flowledger.tables.operators import FAILURES

FASTEST_PCIE = 128e9  # 5.0 x16, both directions; a bridge of two devices is no faster, and others go over PCIe there
LONGEST_CHUNK = 2**40  # a break-even beyond it is none

SHARES = {"matmul": "matmul_share", "attention": "attention_share", "memory": "memory_share"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the ranks of a group, as one rank sees it."""

    name: str  # node, network
    bytes_per_s: float  # reached, in one direction
    start_s: float  # of a message
    step_s: float  # of each hop

    def seconds(self, size: float, hops: int = 1) -> float:
        """How long so many bytes take on the wire of one rank."""
        return self.latency_s(hops) + size / self.bytes_per_s

    def latency_s(self, hops: int = 1) -> float:
        """What a message of no bytes takes."""
        return self.start_s + hops * self.step_s


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device, and its links."""

    gpu: Gpu
    gpus_per_node: int

    def rate(self, name: str) -> float:
        """What is reached of the peak: FLOP/s for `matmul` and `attention`, bytes/s for `memory`."""
        peak = self.gpu.hbm_bytes_per_s if name == "memory" else self.gpu.matrix_flops
        return peak * constant(SHARES[name])

    def seconds(self, rate: str, work: float) -> float:
        """How long so much work takes at that rate."""
        return work / self.rate(rate)

    def link(self, stride: int, degree: int) -> Link:
        """The link of a group whose ranks lie `stride` apart: of the node where all of them are in one, else the network."""
        share, start = constant("link_share"), constant("collective_latency_s")
        if stride * degree > self.gpus_per_node:
            speed, step = constant("network_bytes_per_s"), constant("network_latency_s")
            return Link(name="network", bytes_per_s=speed * share, start_s=start, step_s=step)
        both = self.gpu.link_bytes_per_s
        step = constant("pcie_latency_s" if both <= FASTEST_PCIE else "link_latency_s")
        return Link(name="node", bytes_per_s=both / 2 * share, start_s=start, step_s=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Work and transfer of a piece of so many tokens, and how many pieces there are."""

    compute_s: Callable[[int], float]
    comm_s: Callable[[int], float]
    steps: int  # pieces that travel while another is worked on
    waits: int = 0  # pieces that travel while nothing is

    def hides(self, chunk: int) -> bool:
        """T_compute(chunk) >= T_comm(chunk)."""
        return self.compute_s(chunk) >= self.comm_s(chunk)

    def exposed_s(self, chunk: int) -> float:
        """Seconds of communication that no work covers."""
        comm = self.comm_s(chunk)
        return self.waits * comm + exposed_s(self.compute_s(chunk), comm, self.steps)

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
