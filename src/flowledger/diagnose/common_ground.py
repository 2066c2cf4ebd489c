"""What a plan and a run have to have in common before they are compared, and where their settings part."""

from collections.abc import Iterator
from typing import NamedTuple

from flowledger.diagnose.planned import Planned
from flowledger.flow.dims import parse_dim
from flowledger.flow.errors import BadInput
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger

OWN_LOOPS = "own"  # a loop of one's own, told of in its own lines: of no framework, so any plan may be meant
MODEL = ("L", "H", "A", "K", "D", "F", "V", "E")  # symbols that a model decides
# Symbol of a length that data decide -> where a run of flowledger's own loop has its limit.
LIMITS = {"S_prompt": ("data", "max_prompt_tokens"), "S_resp": ("rollout", "max_response_tokens")}


class Setting(NamedTuple):
    """One setting that plan and run do not share."""

    name: str
    planned: int
    recorded: int


def check(planned: Planned, ledger: Ledger) -> None:
    """Raises BadInput where the two are not of one job: another framework or model; or where nothing was recorded."""
    of_one_job(planned, ledger)
    if not ledger.rows("SELECT step FROM spans WHERE step IS NOT NULL AND source <> 'plan' LIMIT 1"):
        failed = ledger.rows("SELECT message FROM findings WHERE verdict = 'fail' LIMIT 1")
        why = f"; {failed[0]['message']}" if failed else ""
        raise BadInput(f"{ledger.directory.path} has no step to compare with the plan{why}")


def of_one_job(planned: Planned, ledger: Ledger) -> None:
    """Raises BadInput where a run is of another framework or model than the plan, or is a plan itself."""
    path, manifest = ledger.directory.path, ledger.directory.manifest
    if manifest.level == "plan":
        raise BadInput(f"{path} is a plan that was written down, not a run; give a run that was recorded")
    if manifest.framework not in (planned.summary.framework, OWN_LOOPS):
        raise BadInput(
            f"the plan is of {planned.summary.framework} and {path} of {manifest.framework}: plan the launch that was recorded"
        )
    if other := [f"{name} is {a} in the plan and {b} in the run" for name, a, b in _symbols(planned, manifest, MODEL)]:
        raise BadInput(f"plan and run are of different models: {', '.join(other)}; plan with the run's model (--model)")


def parted(planned: Planned, manifest: Manifest) -> list[Setting]:
    """Settings that both name and that differ: the mesh, prompts and samples, the limits of lengths."""
    mesh = [
        Setting(f"mesh.{axis}", degree, manifest.mesh[axis])
        for axis, degree in planned.summary.mesh.items()
        if manifest.mesh.get(axis, degree) != degree
    ]
    sizes = [text for text in planned.sizes if not parse_dim(text).symbols & {*MODEL, *planned.summary.mesh, "P"}]
    limits = [Setting(symbol, *pair) for symbol, pair in limits_parted(planned, manifest).items()]
    return [*mesh, *_symbols(planned, manifest, sizes), *limits]


def limits_parted(planned: Planned, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Symbol -> the limit in the plan and in the run, where both are known and differ."""
    found: dict[str, tuple[int, int]] = {}
    for symbol, (section, key) in LIMITS.items():
        told, has = planned.sizes.get(symbol), (manifest.config.get(section) or {}).get(key)
        if told is not None and has is not None and told != has:
            found[symbol] = told, has
    return found


def _symbols(planned: Planned, manifest: Manifest, texts: tuple[str, ...] | list[str]) -> Iterator[Setting]:
    """Dimensions whose symbols the run binds, where their planned sizes are others."""
    bound = manifest.bindings
    for text in texts:
        dim, told = parse_dim(text), planned.sizes.get(text)
        if told is not None and dim.symbols and dim.symbols <= bound.keys() and dim.resolve(bound) != told:
            yield Setting(text, told, dim.resolve(bound))
