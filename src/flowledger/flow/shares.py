"""What one rank holds along a dimension of a tensor that is cut over ranks."""

from collections.abc import Mapping

from flowledger.flow.dims import Dim
from flowledger.flow.mesh import Mesh, local_shape


def share(
    dim: Dim, at: int, placement: Mapping[str, str], bindings: Mapping[str, int], on: Mesh, rank: int, *, mesh: str
) -> int:
    """What `rank` holds of dimension number `at`, `dim`, whose symbols are bound; `mesh`: the name of `on`.

    Ranks that sample (`rollout`) share the prompts, and each has all G samples of its own: 5 prompts of 4 samples on 2
    ranks are 12 and 8. Ranks that train share the samples.
    """
    cutting = {axis: "Shard(0)" for axis, text in placement.items() if text == f"Shard({at})"}
    if cutting and mesh == "rollout" and "B_prompt" in dim.symbols:
        (prompts,) = local_shape((bindings["B_prompt"],), cutting, on, rank)
        return dim.resolve({**bindings, "B_prompt": prompts})
    return local_shape((dim.resolve(bindings),), cutting, on, rank)[0]
