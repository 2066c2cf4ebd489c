"""Do verl launches compose here as Hydra composes them, and which does a check predict to fail?

    python benchmarks/verl_launches.py --cases FILE [--verl-source DIR] [--defaults DIR] [--version head] [--json]

FILE: one JSON object a line: `script`, `launches` (`module`, `config_name`, `overrides`, `hydra`: version -> `composes` or
`refused: …`). Every leaf is held against real Hydra: for 0.9.1 over the configuration trees of verl itself where they are
there (`--verl-source`: the folder `verl` of an unzipped wheel, else an installed verl), else over flowledger's table of
defaults (then it is overrides and interpolations that are compared). `--defaults`: a folder with resolved leaves in
`verl_defaults_<version>_<fsdp|megatron>.json`, against which the table itself is held. Without hydra-core nothing is
compared leaf by leaf. Exit code 1 where a launch or a leaf differs.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from flowledger.config.dotted import flat
from flowledger.config.verl.compose import compose
from flowledger.config.verl.launch import Launch
from flowledger.config.verl.read import read
from flowledger.flow.errors import BadInput
from flowledger.plan.checks import check
from flowledger.tables import models, verl

CASES = Path(__file__).resolve().parent.parent / "tests/data/verl/launches.jsonl"
EXPERIMENTAL = {"one_step_off": "one_step_off_policy", "fully_async": "fully_async_policy"}
REFERENCE = {"dp": "fsdp", "megatron": "megatron"}


@dataclass(kw_only=True)
class Score:
    """One version's figures; `faults` says what differs."""

    launches: int = 0
    resolved: int = 0
    refused: int = 0
    values: int = 0
    wrong: int = 0
    truth: str = "none"
    faults: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("launches", "resolved", "refused", "values", "wrong", "truth")}


class Hydra:
    """Real Hydra's composition of a launch."""

    def __init__(self, source: Path | None) -> None:
        self.source = source

    def leaves(self, launch: Launch, version: str) -> dict[str, Any]:
        from hydra import compose as hydra_compose
        from hydra import initialize, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from omegaconf import OmegaConf

        name, directory, overrides = self._place(launch, version)
        GlobalHydra.instance().clear()
        start = (
            initialize(None, version_base=None)
            if directory is None
            else initialize_config_dir(str(directory), version_base=None)
        )
        with start:
            composed = hydra_compose(name, overrides)
        return flat(OmegaConf.to_container(composed, resolve=True))

    def _place(self, launch: Launch, version: str) -> tuple[str, Path | None, list[str]]:
        overrides = [text for text, _ in launch.overrides]
        if self.source is None:
            return self._stored(launch, version, overrides)
        mode = verl.mode_of(launch.config)
        trees = self.source / "trainer/config"
        if mode not in EXPERIMENTAL:
            return launch.config, trees, overrides
        own = self.source / "experimental" / EXPERIMENTAL[mode] / "config"
        return launch.config, own, [*overrides, f"hydra.searchpath=[file://{trees}]"]

    def _stored(self, launch: Launch, version: str, overrides: list[str]) -> tuple[str, Path | None, list[str]]:
        """The table's tree as one configuration in Hydra's own store; the engine is chosen by its name."""
        from hydra.core.config_store import ConfigStore

        chosen = next((text.partition("=")[2] for text in overrides if text.startswith("model_engine=")), None)
        name = f"{launch.config}-{version}-{chosen}"
        if f"{name}.yaml" not in ConfigStore.instance().repo:
            ConfigStore.instance().store(name=name, node=verl.defaults(version, launch.config, chosen))
        return name, None, [text for text in overrides if not text.startswith("model_engine=")]


def launches(cases: Path) -> Iterator[tuple[str, Launch, Mapping[str, str]]]:
    """(script, launch, what Hydra does by version) of every line."""
    for line in cases.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for one in row["launches"]:
            overrides = tuple((text, f"{row['script']}#{number}") for number, text in enumerate(one["overrides"], 1))
            launch = Launch(one["module"], one.get("config_name"), overrides, where=row["script"])
            yield row["script"], launch, one["hydra"]


def score(cases: Path, version: str, hydra: Hydra | None) -> Score:
    """Every launch of one version: composed, refused, and leaf by leaf."""
    found = Score(truth=_truth(hydra))
    for script, launch, outcomes in launches(cases):
        if version not in outcomes:
            continue
        found.launches += 1
        expected = outcomes[version]
        try:
            leaves = compose(launch, version).leaves
        except BadInput as error:
            _refusal(found, script, expected, str(error))
            continue
        if expected != "composes":
            found.faults.append(f"{script}: composes, but Hydra says {expected}")
            continue
        found.resolved += 1
        if hydra is not None:
            _compare(found, script, leaves, hydra.leaves(launch, version))
    return found


def _truth(hydra: Hydra | None) -> str:
    if hydra is None:
        return "none (hydra-core is not installed)"
    return "hydra over verl's own trees" if hydra.source else "hydra over flowledger's table"


def _refusal(found: Score, script: str, expected: str, said: str) -> None:
    keys = [re.search(r"'([^']+)'", text) for text in (expected, said)]
    if expected != "composes" and keys[0] and keys[1] and keys[0].group(1) == keys[1].group(1):
        found.refused += 1
    else:
        found.faults.append(f"{script}: refused ({said}), but Hydra says {expected}")


def _compare(found: Score, script: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in ours.keys() | theirs.keys():
        found.values += 1
        mine, other = json.dumps(ours.get(key, "absent")), json.dumps(theirs.get(key, "absent"))
        if mine != other:
            found.wrong += 1
            found.faults.append(f"{script}: {key} = {mine}, Hydra's is {other}")


def held_against(defaults: Path, version: str, found: Score) -> None:
    """The table of one version against resolved leaves from elsewhere."""
    for engine, name in REFERENCE.items():
        file = defaults / f"verl_defaults_{version}_{name}.json"
        if file.exists():
            ours = compose(Launch(overrides=((f"model_engine={engine}", ""),)), version).leaves
            _compare(found, f"defaults {engine}", ours, json.loads(file.read_text(encoding="utf-8")))


def predicted(cases: Path, version: str) -> list[list[str]]:
    """[script, rule, when] of every check that says the run stops; a launch that Hydra refuses stops at launch."""
    rows: list[list[str]] = []
    for script, launch, _ in launches(cases):
        try:
            config = read(launch, version=version).config
        except BadInput as error:
            rows.append([script, "composition" if "Could not" in str(error) else "reading", "launch"])
            continue
        for finding in check(config, models.find(config.model.path), None):
            if finding.verdict == "fail":
                rows.append([script, finding.id, finding.fires_at or "runtime"])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--verl-source", type=Path, help="the folder verl of an unzipped wheel of 0.9.1")
    parser.add_argument("--defaults", type=Path, help="a folder of verl_defaults_<version>_<backend>.json")
    parser.add_argument("--version", default=verl.HEAD, help="of the predicted failures")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    scores = {version: score(asked.cases, version, _hydra(asked, version)) for version in verl.versions()}
    if asked.defaults:
        for version, found in scores.items():
            held_against(asked.defaults, version, found)
    failures = predicted(asked.cases, asked.version)
    if asked.json:
        print(json.dumps({**{name: one.figures() for name, one in scores.items()}, "predicted_failures": failures}))
    else:
        _show(scores, failures)
    return int(any(found.faults for found in scores.values()))


def _hydra(asked: argparse.Namespace, version: str) -> Hydra | None:
    """Hydra over verl's own trees for 0.9.1 where they are at hand, else over the table; None without hydra-core."""
    if importlib.util.find_spec("hydra") is None:
        return None
    source: Path | None = asked.verl_source.resolve() if asked.verl_source else None
    installed = importlib.util.find_spec("verl") if source is None else None
    if installed and installed.origin and _installed_version() == "0.9.1":
        source = Path(installed.origin).parent
    if source:  # the wheel's folder, the package in it, or its trainer/config
        places = (source / "verl", source, source.parent.parent)
        source = next((place for place in places if (place / "trainer/config/ppo_trainer.yaml").is_file()), None)
        if source is None:
            raise SystemExit(f"{asked.verl_source} holds no trainer/config/ppo_trainer.yaml of verl")
    return Hydra(source if version == "0.9.1" else None)


def _installed_version() -> str:
    from importlib.metadata import version

    return version("verl")


def _show(scores: Mapping[str, Score], failures: Sequence[Sequence[str]]) -> None:
    for version, found in scores.items():
        print(f"verl {version}: {found.resolved} resolved and {found.refused} refused of {found.launches}; ", end="")
        print(f"{found.wrong} of {found.values} values differ ({found.truth})")
        for fault in found.faults[:20]:
            print(f"  {fault}")
    print(f"predicted failures: {len(failures)}")
    for script, rule, when in failures:
        print(f"  {script}: {rule} ({when})")


if __name__ == "__main__":
    sys.exit(main())
