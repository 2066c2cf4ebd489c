"""What planned shapes are resolved with: sizes, meshes, dtypes, and the ranks that hold alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowledger.config.engine import Mesh as Asked
from flowledger.flow.axes import DENSE
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Mesh, mesh
from flowledger.plan.engines import Engines
from flowledger.plan.shards import Shards

# mesh (`train`, `rollout`), rank -> sizes that no even cut gives: tokens of its rows, slots of its cache
Local = Callable[[str, int], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that hold shards of equal shape: one pipeline stage. `first` stands for all of them."""

    name: str
    first: int
    count: int
    layers: tuple[int, ...]  # of the model, on each of these ranks
    is_first: bool = True  # holds the embedding
    is_last: bool = True  # holds the head
    outer_elements: int = 0  # parameters of the rank that no layer owns: embedding, final norm, head
    layer_elements: Mapping[int, int] | None = None  # parameters of each of its layers on the rank, before dp cuts them
    part: str = ""  # which ranks of the class, where they sample unequal shares: `ranks 0-2`

    @property
    def label(self) -> str:
        """Its name, and which of its ranks."""
        return self.name if not self.part else self.part if self.name == "all" else f"{self.name}, {self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What shapes are resolved with."""

    stages: tuple[str, ...]  # that this configuration runs
    bindings: Mapping[str, int]
    mesh: Mesh
    dtypes: Mapping[str, str]  # role -> dtype that its model computes in; `param/<role>`: in which it is stored
    packed: bool = True  # the model sees packed tokens
    unused: frozenset[tuple[str, str]] = frozenset()  # (stage, tensor) that the settings leave out: a KL of weight 0
    unwritten: frozenset[tuple[str, str]] = frozenset()  # …, that the stage only reads: a mask without rejection
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # tensor that nobody makes -> the one that is read as it
    rollout: Mesh | None = None  # of the ranks that train and sample, where each samples with all of the weights
    engines: Engines | None = None  # that sample, where a framework has some
    shards: Mapping[str, Shards] = field(default_factory=dict)  # role -> its parameters, where the cut of each is known
    local: Local | None = None
    sequence_parallel: bool = False  # norms and residuals are cut over tp too
    classes: tuple[RankClass, ...] = ()  # pipeline stages of the model at work, where they are not the actor's
    of_stage: Mapping[str, "Setting"] = field(default_factory=dict)  # stage -> its own, where it differs

    def at(self, stage: str) -> "Setting":
        """What the shapes of a stage are resolved with."""
        return self.of_stage.get(stage, self)

    def mesh_of(self, named: str) -> Mesh:
        """The mesh of a stage or tensor that says `train` or `rollout`."""
        if named != "rollout":
            return self.mesh
        return self.engines.on if self.engines is not None else self.rollout or self.mesh


def trains_on(asked: Asked, dp: int, *, folds: bool) -> Mesh:
    """The mesh of a model that trains. `folds`: experts lie over dp, cp and tp, as Megatron has them; etp null means tp.

    Where ep does not divide what it lies over, which the rules refuse, it is not known how experts are dealt.
    """
    dense = {axis: getattr(asked, axis) for axis in DENSE} | {"dp": dp}
    if asked.ep == 1 and asked.etp is None:
        return mesh(**dense)
    try:
        return mesh(**dense, ep=asked.ep, **({"etp": asked.etp or asked.tp} if folds else {}))
    except BadInput:
        return mesh(**dense)
