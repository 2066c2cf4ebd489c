"""From the prompts of a step to its optimizer steps: each quantity with its unit, the key that sets it, and the arithmetic.

Units are told because frameworks differ: verl's mini-batch counts prompts; TRL, OpenRLHF, slime and NeMo-RL count samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowledger.config.agreement import OWN
from flowledger.config.schema import RunConfig
from flowledger.plan.facts import Facts, facts, plain
from flowledger.plan.lengths import Lengths
from flowledger.plan.passes import Pass, many, tally
from flowledger.tables.models import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One quantity of the chain."""

    quantity: str
    value: float
    unit: str  # prompts, samples, ranks, tokens, micro-batches, steps, replicas
    key: str | None = None  # the framework's key that sets it; null: it follows from others
    source: str | None = None  # file:line of the key, or `default`
    arithmetic: str | None = None  # `1024 prompts * 5 = 5120 samples`
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The links in order, and what holds for all of them."""

    rows: tuple[Link, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, quantity: str) -> Link:
        """The link of this name. Raises KeyError."""
        for row in self.rows:
            if row.quantity == quantity:
                return row
        raise KeyError(quantity)


def chain(config: RunConfig, architecture: Architecture | None, lengths: Lengths | None) -> Chain:
    """The batch chain of one step. Quantities whose inputs are missing are left out."""
    names = facts(config, architecture, lengths)
    draft = _Draft(names=names, values=names.values, lengths=lengths)
    _samples(draft)
    _mini_batches(draft)
    _update(draft)
    _passes(draft)
    _rollout(draft)
    _ahead(draft)
    notes = (
        () if lengths else ("without length statistics every sample counts as long as it may be: prompt + response",)
    )
    return Chain(rows=tuple(draft.rows), notes=(*draft.notes, *notes))


@dataclass(slots=True)
class _Draft:
    names: Facts
    values: Mapping[str, Any]
    lengths: Lengths | None
    rows: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return all(self.values.get(name) is not None for name in names)

    def add(
        self, quantity: str, value: float, unit: str, *, name: str = "", arithmetic: str = "", note: str = ""
    ) -> None:
        key = self.names.key(name)
        place = self.names.places.get(key, "default") if key else None
        told, more = arithmetic or None, note or None
        self.rows.append(
            Link(quantity=quantity, value=value, unit=unit, key=key, source=place, arithmetic=told, note=more)
        )


def _samples(draft: _Draft) -> None:
    v = draft.values
    if not draft.has("n", "B", "dp") or v["dp"] < 1:
        return
    prompts = v.get("step_prompts", v.get("prompts", v["B"] // v["n"]))
    how = ""
    if v.get("trainer") == "fully_async":
        how = f"ppo_mini_batch_size {v['mini']} * require_batches {v['require_batches']} = {prompts} prompts"
    elif "global_batch" in v and "device_batch" in v:  # TRL counts completions
        how = f"{v['gen_batch']} completions / {v['n']} = {prompts} prompts"
    elif prompts != v.get("prompts"):
        how = f"{v['prompts']} prompts / {v['sync_step']} updates between synchronisations = {prompts} prompts"
    name = "device_batch" if "device_batch" in v else "mini" if v.get("trainer") == "fully_async" else "prompts"
    draft.add("prompts", prompts, "prompts", name=name, arithmetic=how)
    draft.add("samples of a prompt", v["n"], "samples", name="n")
    draft.add(
        "samples", v["B"], "samples", arithmetic=f"{many(prompts, 'prompts')} * {v['n']} = {many(v['B'], 'samples')}"
    )
    draft.add("data-parallel ranks", v["dp"], "ranks", arithmetic=_ranks(v))
    padded, note = v.get("B_padded", v["B"]), ""
    if padded != v["B"]:
        note = f"padded from {v['B']} to {padded} samples, a multiple of lcm(dp, mini-batch) = {v['multiple']}"
    draft.add(
        "samples of a rank", padded // v["dp"], "samples", note=note or _rest(padded, v["dp"]),
        arithmetic=f"{many(padded, 'samples')} / {many(v['dp'], 'ranks')} = {plain(padded / v['dp'])} samples",
    )  # fmt: skip


def _ranks(v: Mapping[str, Any]) -> str:
    degrees = {name: v[name] for name in ("tp", "pp", "cp", "sp") if isinstance(v.get(name), int) and v[name] > 1}
    parts = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
    devices = many(v.get("world", 0), "processes" if v["framework"] == OWN else "GPUs")
    return f"{devices} / ({parts}) = {many(v['dp'], 'ranks')}" if parts else f"{devices} = {many(v['dp'], 'ranks')}"


def _rest(whole: int, by: int) -> str:
    return f"{whole} is not divisible by {by}" if whole % by else ""


def _mini_batches(draft: _Draft) -> None:
    v = draft.values
    if not draft.has("mini_samples", "dp", "mini_rank", "B_rank") or v["mini_rank"] < 1:
        return
    mini, rank = v["mini_samples"], v["mini_rank"]
    if v["framework"] in ("verl", "flowledger"):
        told = f"{many(v['mini'], 'prompts')} * {v['n']} = {many(mini, 'samples')}"
        draft.add("mini-batch", mini, "samples", name="mini", arithmetic=told, note="the key counts prompts")
    else:
        draft.add("mini-batch", mini, "samples", name=_mini_key(v), arithmetic=_mini_told(v), note=_mini_note(v))
    draft.add(
        "mini-batch of a rank", rank, "samples", note=_rest(mini, v["dp"]),
        arithmetic=f"{many(mini, 'samples')} / {many(v['dp'], 'ranks')} = {plain(mini / v['dp'])} samples",
    )  # fmt: skip
    batches = max(1, v["B_rank"] // rank)
    epochs = v.get("epochs") or 1
    steps = batches * epochs
    draft.add(
        "optimizer steps", steps, "steps", name="epochs", note=_rest(v["B_rank"], rank),
        arithmetic=f"{v['B_rank']} / {rank} = {many(batches, 'mini-batches')} * {many(epochs, 'epochs')} = {many(steps, 'steps')}",
    )  # fmt: skip


def _mini_key(v: Mapping[str, Any]) -> str:
    return next((name for name in ("global_batch", "train_batch", "accumulation", "minibatches") if name in v), "mini")


def _mini_told(v: Mapping[str, Any]) -> str:
    if "accumulation" in v:
        parts = f"{v['device_batch']} * {v['world']} processes * {v['accumulation']} accumulated"
        return f"{parts} = {v['mini_samples']} completions"
    if "minibatches" in v:
        return f"{v['B']} samples / {v['minibatches']} mini-batches = {v['mini_samples']} samples"
    return ""


def _mini_note(v: Mapping[str, Any]) -> str:
    return "the key counts mini-batches of a step" if "minibatches" in v else "the key counts samples, not prompts"


def _update(draft: _Draft) -> None:
    v = draft.values
    if draft.has("mini_rank"):
        micro = v.get("device_batch", v.get("micro"))
        _micro_batches(
            draft,
            Pass("update", v["mini_rank"], bool(v.get("dynamic")), micro, v.get("budget")),
            names=("device_batch" if "device_batch" in v else "micro", "budget"),
        )


def _passes(draft: _Draft) -> None:
    """Passes without gradients go over all samples of a rank; the critic updates on its own mini-batches."""
    v = draft.values
    if not draft.has("B_rank"):
        return
    samples, own = v["B_rank"], v["framework"] == OWN
    if own:
        _as_the_update(draft)
    elif v.get("old_used", True):
        one = Pass("old log-probs", samples, bool(v.get("lp_dynamic")), v.get("lp_micro"), v.get("lp_budget"))
        _micro_batches(draft, one, names=("lp_micro", "lp_budget"))
    if v.get("ref_used") and not own:
        dynamic = v.get("ref_dynamic", v.get("lp_dynamic"))
        one = Pass("reference log-probs", samples, bool(dynamic), v.get("ref_micro"), v.get("ref_budget"))
        _micro_batches(draft, one, names=("ref_micro", "ref_budget"))
    if v.get("critic_used") and draft.has("critic_budget_tokens", "critic_mini_samples", "dp"):
        budget, per_rank = v["critic_budget_tokens"], v["critic_mini_samples"] // v["dp"]
        values = Pass("values", samples, True, None, None, tokens=budget)
        update = Pass("critic update", per_rank, True, None, None, tokens=budget)
        for one in (values, update):
            _micro_batches(draft, one, names=("critic_micro", "critic_budget_key"))
    elif draft.has("values_dynamic", "critic_mini_samples"):
        per_rank = v["critic_mini_samples"] // v["dp"]
        passes = (("values", "values", samples), ("critic update", "critic", per_rank))
        for name, which, several in passes if v.get("values_limits") else passes[1:]:
            micro, budget = f"{which}_micro", f"{which}_budget"
            one = Pass(name, several, v[f"{which}_dynamic"], v[micro], v[budget])
            _micro_batches(draft, one, names=(micro, budget))


def _as_the_update(draft: _Draft) -> None:
    """flowledger's own loop: passes without gradients go over the micro-batches of the update, mini-batch by mini-batch."""
    v = draft.values
    each = next((row.value for row in draft.rows if row.quantity == "update: micro-batches"), None)
    if each is None or not draft.has("mini_rank") or v["mini_rank"] < 1:
        return
    minis = max(1, v["B_rank"] // v["mini_rank"])
    made = {
        "old log-probs": v.get("old_used"), "reference log-probs": v.get("ref_used"),
        "values": v.get("critic_used") and not v.get("values_limits"),
    }  # fmt: skip
    for name in (name for name, runs in made.items() if runs):
        told = f"as in the update: {many(minis, 'mini-batches')} * {each} = {many(minis * each, 'micro-batches')}"
        draft.add(f"{name}: micro-batches", minis * each, "micro-batches", arithmetic=told)


def _micro_batches(draft: _Draft, one: Pass, *, names: tuple[str, str]) -> None:
    for link in tally(one, draft.values, draft.lengths):
        name = names[1] if one.dynamic else names[0]
        key_of = name if link.keyed else ""
        draft.add(link.quantity, link.value, link.unit, name=key_of, arithmetic=link.arithmetic, note=link.note)


def _own_rollout(draft: _Draft) -> None:
    """flowledger's own loop: every rank samples a part of the prompts, whatever the mesh that trains."""
    v = draft.values
    if not draft.has("prompts", "n", "world"):
        return
    prompts, world, n = v["prompts"], v["world"], v["n"]
    each = -(-prompts // world)
    draft.add(
        "rollout replicas", world, "replicas", arithmetic="each process samples, with all weights",
        note=_shares(prompts, world, each) if prompts % world else "",
    )  # fmt: skip
    share = f"{many(prompts, 'prompts')} / {many(world, 'replicas')}"
    told = f"ceil({share})" if prompts % world else share
    told = f"{told} * {n} = {many(each * n, 'samples')}"
    draft.add("samples of a replica", each * n, "samples", arithmetic=told)
    if v.get("max_running"):
        _at_once(draft, each * n, v["max_running"], 1)


def _shares(prompts: int, world: int, each: int) -> str:
    """`3 with 2 prompts, 1 with 1 prompt`: cut as torch.chunk does."""
    whole, rest = divmod(prompts, each)
    parts = [(whole, each), (min(rest, 1), rest), (world - whole - min(rest, 1), 0)]
    return ", ".join(f"{number} with {many(has, 'prompts')}" for number, has in parts if number)


def _rollout(draft: _Draft) -> None:
    v = draft.values
    if v.get("framework") == OWN:
        _own_rollout(draft)
        return
    if not draft.has("rollout_world", "rtp", "B"):
        return
    degrees = [v.get(name) or 1 for name in ("rtp", "rdp", "rpp")]
    size = degrees[0] * degrees[1] * degrees[2]
    replicas = max(1, v["rollout_world"] // size)
    told = (
        f"{many(v['rollout_world'], 'GPUs')} / (tp {degrees[0]} * dp {degrees[1]} * pp {degrees[2]}) = "
        f"{many(replicas, 'replicas')}"
    )
    note = _rest(v["rollout_world"], size)
    draft.add("rollout replicas", replicas, "replicas", name="rtp", arithmetic=told, note=note)
    each = -(-v["B"] // replicas)
    draft.add(
        "samples of a replica", each, "samples",
        arithmetic=f"{v['B']} samples / {many(replicas, 'replicas')} = {many(each, 'samples')}",
    )  # fmt: skip
    if v.get("max_running"):
        _at_once(draft, each, v["max_running"], degrees[1])


def _at_once(draft: _Draft, each: int, running: int, dp: int) -> None:
    """Samples of a replica that run at the same time, where the engine limits them."""
    at_once = min(each, running * dp)
    note = f"the rest waits: {-(-each // at_once)} rounds" if at_once < each else ""
    limit = f"{running} a rank * dp {dp}" if dp > 1 else f"{running}"
    told = f"min({each}, {limit}) = {many(at_once, 'samples')}"
    draft.add("samples at once", at_once, "samples", name="max_running", arithmetic=told, note=note)


def _ahead(draft: _Draft) -> None:
    """How far rollout runs ahead of training, in the asynchronous modes."""
    v = draft.values
    if v.get("trainer") == "fully_async":
        _fully_async(draft)
    elif v.get("trainer") == "one_step_off":
        draft.add("batches in flight", 1, "steps", note="the batch trained on was generated one step before")
    elif v.get("trainer") == "v1" and v.get("trainer_mode") == "separate_async":
        told = f"{v['sync_step']} updates of {v['step_prompts']} prompts between two weight synchronisations"
        draft.add("updates between synchronisations", v["sync_step"], "steps", name="sync_step", arithmetic=told)
    elif "offpolicyness" in v and draft.has("offpolicyness", "batch"):
        consumer = v.get("consumer_batch") or v["batch"]
        most = (v["offpolicyness"] + 1) * consumer
        told = f"({v['offpolicyness']} + version + 1) * {consumer} - accepted and running; {most} at version 0"
        draft.add("rollouts ahead", most, "prompts", name="offpolicyness", arithmetic=told)


def _fully_async(draft: _Draft) -> None:
    v = draft.values
    if not draft.has("mini", "require_batches", "staleness", "trigger"):
        return
    required = v["mini"] * v["require_batches"]
    told = f"{v['mini']} * {v['require_batches']} = {required} prompts (called samples there)"
    draft.add("required for an update", required, "prompts", name="require_batches", arithmetic=told)
    queue = int(required * (v["staleness"] + 1) * v["trigger"])
    told = f"int({required} * ({plain(v['staleness'])} + 1) * {v['trigger']}) = {queue} prompts"
    draft.add("queue", queue, "prompts", name="staleness", arithmetic=told)
    if v.get("rollout_steps"):
        steps = int(v["rollout_steps"] / (required * v["trigger"]))
        told = f"int({v['rollout_steps']} / ({required} * {v['trigger']})) = {steps} steps"
        draft.add("training steps", steps, "steps", name="rollout_steps", arithmetic=told)
    if draft.has("rollout_world", "rtp"):
        replicas = v["rollout_world"] // (v["rtp"] * (v.get("rdp") or 1))
        at_once = min(replicas * v["concurrent_per_replica"], queue)
        told = f"min({replicas} replicas * {v['concurrent_per_replica']}, queue {queue}) = {at_once} prompts"
        draft.add("prompts in generation", at_once, "prompts", name="concurrent_per_replica", arithmetic=told)
