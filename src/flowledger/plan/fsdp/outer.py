"""What stands outside the layers: which units FSDP makes of embedding, final norm and head, and when they are gathered.

`Engine.outside` names the grouping of FSDP2 (torchtitan, accelerate 1.15: tail; verl 0.9.1: head; AReaL: embedding; NeMo-RL:
root). A head that is tied to the embedding is in the root with it wherever it is, and FSDP1 and ZeRO have one root.
"""

from dataclasses import dataclass

from flowledger.plan.fsdp.traffic import Traffic
from flowledger.plan.fsdp.units import Unit, joined, outer_units
from flowledger.plan.job import Job
from flowledger.plan.logits import inside, is_own

FOREVER = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Instants of a pass that decide about what stands outside the layers; without gradients the later ones are its last."""

    copied: int  # the first layer is copied out of its buffer
    asked: int  # the head's unit is
    returned: int  # the model's forward ends
    again: int  # backward asks for the head
    normed: int  # the final norm's backward is done
    ended: int  # the embedding's is
    released: int  # its parameters are given back


class Outer:
    """The units outside the layers of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.first, self.last = outer_units(job)
        engine = job.engine
        self.has_root = engine.outside in (
            "head",
            "embedding",
            "root",
        )  # parameters in the root, were it the norm alone
        if job.architecture.tied or engine.strategy != "fsdp2" or engine.outside == "root":
            both = joined(self.first, self.last) if self.first and self.last else self.first or self.last
            self.root, self.start, self.tail = both, None, None
        elif engine.outside == "embedding":
            self.root, self.start, self.tail = self.last, self.first, None
        else:
            self.root, self.start, self.tail = None, self.first, self.last

    @property
    def gives_back(self) -> bool:
        """Whether what the head needs is given back after forward: where a framework asks for it of each unit it makes."""
        engine = self.job.engine
        asked = engine.outside in ("head", "embedding") or is_own(engine)
        return engine.strategy == "fsdp2" and asked and engine.reshard_after_forward

    @property
    def regathers(self) -> bool:
        """Whether the head is gathered a second time for backward."""
        return self.gives_back and self.job.gradients

    def gather(self, traffic: Traffic, at: Moments) -> None:
        """The gathers of a pass."""
        if self.start:
            self._embedding(traffic, self.start, at)
        if self.root:
            traffic.flat(self.root, 0, 0 if self.start else at.copied)
            self._head(traffic, self.root, 0, at.ended, at)
        if self.tail:
            traffic.flat(self.tail, at.asked, at.returned)
            self._head(traffic, self.tail, at.asked, at.normed, at)
            if self.gives_back and inside(self.job) and self.job.engine.logits.chunk_tokens:  # anew for each chunk
                traffic.flat(self.tail, at.asked + 1, at.asked + 1)

    def _head(self, traffic: Traffic, unit: Unit, born: int, dies: int, at: Moments) -> None:
        traffic.whole(unit, born, at.returned if self.gives_back else dies)
        if self.regathers:
            traffic.flat(unit, at.again, at.again)
            traffic.whole(unit, at.again, dies)

    def _embedding(self, traffic: Traffic, unit: Unit, at: Moments) -> None:
        """The embedding as a unit of its own; its buffer lives until the first layer's copy-out."""
        traffic.flat(unit, 0, at.copied)
        if not self.job.engine.reshard_after_forward:
            traffic.whole(unit, 0, at.released)
            return
        traffic.whole(unit, 0, max(0, at.copied - 1))
        if self.job.gradients:
            traffic.whole(unit, at.ended, at.released)
