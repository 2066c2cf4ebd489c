"""verl's configuration, from a launch script, overrides, a YAML file or a resolved dump, as one RunConfig."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowledger.config.dotted import flat
from flowledger.config.foreign import Reading
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import gap_of
from flowledger.config.verl import batches, installed, trainers
from flowledger.config.verl.compose import Composed, compose
from flowledger.config.verl.correction import correction
from flowledger.config.verl.engines import engine
from flowledger.config.verl.launch import ASSUMED, Launch, of_command, of_file
from flowledger.config.verl.roles import ACTOR, CRITIC, REF, strategy
from flowledger.config.verl.words import put_rows
from flowledger.config.yaml_text import COMMAND_LINE
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables import rules, verl

GAE = "gae"


def read(
    source: Launch | Launched | str | Path | None,
    overrides: Sequence[str] = (),
    *,
    assume: Mapping[str, str] | None = None,
    version: str | None = None,
) -> Reading:
    """The RunConfig of one launch.

    `source`: a command line, a Launch, a YAML or JSON file (overrides, a part, or a resolved dump), or None for the
    overrides alone. `assume`: dotted keys that stand where the launch says nothing, and environment variables.
    `version`: `0.9.1`, `head`, or None for the installed verl, else head. An installed verl of that version composes by
    itself through Hydra. Raises BadInput.
    """
    there, release, notes = _release(version)
    assume = assume or {}
    launch = _launch(source)
    given = tuple((text, COMMAND_LINE) for text in overrides)
    launch = replace(launch, overrides=(*launch.overrides, *given))
    launch, used = _assumed(launch, assume)
    environment = {**launch.environment, **assume}
    composed = compose(launch, release, environment) if there is None else installed.compose(launch, there, environment)
    reading = _reading(composed, launch, assume, notes if there else [*notes, *launch.left_out])
    if isinstance(source, Launched):  # the script was read with these as its variables
        used |= set(source.assumed)
    names = tuple(f"{key}={assume[key]}" for key in assume if key in used or _in_text(launch, key))
    return replace(reading, assumed=names)


def _launch(source: Launch | Launched | str | Path | None) -> Launch:
    if isinstance(source, Launch):
        return source
    if isinstance(source, Launched):
        return of_command(source)
    return Launch() if source is None else of_file(Path(source))


def _release(version: str | None) -> tuple[installed.Installed | None, str, list[str]]:
    """The installed verl where its own files compose, else the version whose defaults count; and what to say of it."""
    there = installed.installed()
    if there is not None and version in (None, there.version):
        return there, there.version, [f"composed by verl {there.version}'s own configuration files through Hydra"]
    if version is not None:
        if version not in verl.versions():
            known = verl.versions()
            raise BadInput(f"--verl {version}: only {' and '.join(known)} are known{nearest(version, known)}")
        return None, version, []
    try:
        release = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return None, verl.HEAD, []
    if release in verl.versions():
        return None, release, [f"verl {release} is installed: its defaults count"]
    nearer = verl.HEAD if rules.holds_for(">0.9.1", release) else "0.9.1"
    told = f"verl {release} is installed; its defaults are not known here, those of {nearer} are taken"
    return None, nearer, [told]


def _assumed(launch: Launch, assume: Mapping[str, str]) -> tuple[Launch, set[str]]:
    """The launch with assumed keys forced in where it does not set them itself."""
    whole = [
        text for text, _ in launch.overrides if gap_of(text) is None
    ]  # what a script leaves open, --assume may give
    said = {text.lstrip("+~").partition("=")[0] for text in whole} | set(launch.whole)
    keys = {key for key in assume if "." in key and not key.startswith("_") and key not in said}
    extra = tuple((f"++{key}={assume[key]}", ASSUMED) for key in assume if key in keys)
    return replace(launch, overrides=(*launch.overrides, *extra)), keys


def _in_text(launch: Launch, name: str) -> bool:
    return any(f"oc.env:{name}" in text for text, _ in launch.overrides) or any(
        f"oc.env:{name}" in str(value) for value in launch.whole.values()
    )


def _reading(composed: Composed, launch: Launch, assume: Mapping[str, str], notes: Sequence[str]) -> Reading:
    settings = Settings(f"verl {composed.version}", composed.tree, composed.places, {}, composed.gaps)
    settings.notes += [*notes, *launch.notes]
    draft = Draft(settings)
    trainer = trainers.mode(settings, composed)
    _refuse_words_for_numbers(settings, composed)
    put_rows(settings, draft)
    trainers.data(settings, draft, trainer)
    trainers.hardware(settings, draft, trainer)
    trainers.serving(settings, draft, trainer)
    batches.algorithm(settings, draft)
    batches.turns(settings, draft)
    batches.actor(settings, draft)
    correction(settings, draft, v1=trainer in trainers.MODES)
    engine(settings, draft, ACTOR, "actor.engine")
    draft.copy("actor.engine.mesh", "mesh")
    _model(draft)
    raw = _others(settings, draft, composed, trainer)
    _allocator(settings, draft, launch, trainer)
    _traps(settings)
    _seen_by_checks(settings)
    draft.sources |= {f"raw.{key}": f"{key}@{place}" for key, place in settings.places.items()}
    return draft.reading(launch.where, {**raw, **{key: value for key, value in assume.items() if key.startswith("_")}})


def _refuse_words_for_numbers(settings: Settings, composed: Composed) -> None:
    """What the defaults have as a number and the user as text: verl computes with it and would fail, or worse, repeat it."""
    usual, words = (
        flat(verl.defaults(composed.version, composed.config, composed.engine)),
        table("verl_keys")["numbers"],
    )
    leaves, faults = composed.leaves, []
    for key in settings.places:
        value, default, last = leaves.get(key), usual.get(key), key.rpartition(".")[2]
        counts = isinstance(default, int | float) and not isinstance(default, bool)
        way = f"give a number, such as {default}" if counts else "give a number, or null"
        if last in words["or_text"]:
            continue
        if isinstance(value, str) and (counts or (default is None and last in words["null"])):
            said = (
                "is empty (a variable that is not set?)" if not value.strip() else "is text, and verl computes with it"
            )
            faults.append(str(settings.bad(key, f"{said}; {way}")))
        elif value is None and key in leaves and counts and last in words["never_null"]:
            faults.append(str(settings.bad(key, f"is nothing; {way}")))
    if faults:
        raise BadInput("\n".join(faults))


def _allocator(settings: Settings, draft: Draft, launch: Launch, trainer: str) -> None:
    """Expandable segments: where the script's environment asks PyTorch's allocator for them, and after each weight sync
    inside one process, which ends by switching them on (verl/workers/engine_workers.py::update_weights)."""
    backend = f"{trainers.ROLLOUT}.checkpoint_engine.backend"
    inside = trainer not in trainers.APART and settings.text(backend) in (None, "naive")
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    asked = [name for name in names if "expandable_segments:true" in launch.environment.get(name, "").lower()]
    if not inside and not asked:
        return
    for role in ("actor", "ref", "critic"):
        if "engine" in draft.data.get(role, {}):
            target = f"{role}.engine.expandable_segments"
            draft.put(target, True, backend)
            if asked:
                draft.sources[target] = f"{asked[0]}@{launch.where}"


def _model(draft: Draft) -> None:
    """The policy's dtype and LoRA stand in two places of a RunConfig."""
    dtype = draft.data["actor"]["engine"].get("param_dtype")
    if dtype in ("float32", "bfloat16"):
        draft.data["model"]["dtype"] = dtype
        draft.sources["model.dtype"] = draft.sources["actor.engine.param_dtype"]
    draft.copy("actor.engine.lora", "model.lora")


def _others(settings: Settings, draft: Draft, composed: Composed, trainer: str) -> dict[str, Any]:
    """The reference policy and the critic, where they exist; and what raw carries beside verl's own keys."""
    wanted = settings.flag(f"{ACTOR.section}.use_kl_loss") or settings.flag("algorithm.use_kl_in_reward")
    adapters = settings.get("actor_rollout_ref.model.lora_adapter_path") is not None
    in_actor = wanted and (adapters or "lora" in draft.data["actor"]["engine"])
    if wanted and in_actor:
        draft.put("ref.path", "start", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank")
        batches.ref(settings, draft)
        settings.notes.append("the reference policy is the actor without its adapters: no second model is held")
    elif wanted:
        draft.put("ref.path", "start", f"{ACTOR.section}.use_kl_loss", "algorithm.use_kl_in_reward")
        batches.ref(settings, draft)
        engine(settings, draft, REF, "ref.engine")
    enabled = settings.get("critic.enable")
    if settings.flag("critic.enable") if enabled is not None else settings.get("algorithm.adv_estimator") == GAE:
        batches.critic(settings, draft, v1=trainer in trainers.MODES)
        engine(settings, draft, CRITIC, "critic.engine")
    return {
        "_verl.version": composed.version,
        "_verl.module": composed.module,
        "_verl.config": composed.config,
        "_verl.engine": composed.engine,
        "_verl.trainer": trainer,
        "_verl.ref_in_actor": in_actor,
    }


def _traps(settings: Settings) -> None:
    """What a user might believe that does not hold."""
    for role in (ACTOR, CRITIC):
        key, over = f"{role.fsdp}.strategy", f"{role.section}.strategy"
        inner = settings.text(key)
        if settings.said(key) and inner != strategy(settings, role):
            settings.notes.append(
                f"{settings.origin(key)} = {inner} has no effect: verl writes {over} = {settings.text(over)} over it"
            )


def _seen_by_checks(settings: Settings) -> None:
    for fact in rules.table("verl").facts:
        for key in fact.keys:
            settings.get(key)
