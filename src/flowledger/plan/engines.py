"""The inference engines of a framework as a mesh: which of their ranks holds which weights, and how many samples run at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from flowledger.config.schema import RunConfig
from flowledger.flow.mesh import Mesh, mesh
from flowledger.plan.engine_weights import stages_of
from flowledger.plan.weights import weights
from flowledger.tables.models import Architecture

IN_PROCESS = ("flowledger", "hf")  # no engine: the ranks that train sample by themselves


@dataclass(frozen=True, slots=True)
class Engines:
    """All replicas together. `on`: dp counts replicas, tp and pp cut one of them."""

    architecture: Architecture
    on: Mesh

    def stages(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(first rank, ranks, layers) of each pipeline stage."""
        degree = self.on.degree("pp")
        for stage in range(degree):
            held = (layer for layer in range(self.architecture.layers) if self._stage(layer) == stage)
            yield self.on.rank({"pp": stage}), self.on.size // degree, tuple(held)

    def elements(self, layer: int | None) -> int:
        """P: the weights of a layer, or (null) of what no layer owns. What tp does not cut (norms) is counted as if it did."""
        return sum(one.numel for one in weights(self.architecture) if one.layer == layer)

    def of_heads(self) -> Mesh:
        """The mesh for what is cut by key-value heads: more ranks of tp than heads hold copies."""
        tp, heads = self.on.degree("tp"), max(1, self.architecture.kv_heads)
        if tp <= heads or tp % heads:
            return self.on
        return mesh(dp=self.on.degree("dp"), pp=self.on.degree("pp"), tp=heads, cp=tp // heads)

    def _stage(self, layer: int) -> int:
        return stages_of(layer, self.architecture.layers, self.on.degree("pp"))


def replicas(config: RunConfig) -> int:
    """How many engines sample side by side, each with all of the weights: ranks of data parallelism inside of one count too."""
    serving = config.rollout.serving
    cut = serving.mesh.tp * serving.mesh.pp
    return max(1, (serving.gpus or config.hardware.world) // cut)


def engines(config: RunConfig, architecture: Architecture) -> Engines | None:
    """None where the ranks that train sample by themselves."""
    serving = config.rollout.serving
    if serving.engine in IN_PROCESS:
        return None
    on = mesh(dp=replicas(config), tp=serving.mesh.tp, pp=serving.mesh.pp)
    return Engines(architecture, on)
