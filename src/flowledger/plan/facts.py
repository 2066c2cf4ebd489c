"""The names that rules use, for one configuration: from its framework's own keys, from the RunConfig, the model and lengths.

A framework's table names its keys (`tables/rules_<framework>.toml`); where its dictionary lacks one, the RunConfig's value
stands in. Names that are expressions over others are computed again whenever one of those is varied.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.config.schema import RunConfig
from flowledger.config.shards import START
from flowledger.plan.arithmetic import MissingNameError, evaluate, names_in
from flowledger.plan.lengths import Lengths
from flowledger.plan.own_loop import dealt
from flowledger.plan.packing import worst_of
from flowledger.plan.passes import drawn
from flowledger.tables.models import Architecture
from flowledger.tables.rules import Fact, RuleTable, table

KNOBS: Mapping[str, str] = {  # where a framework's table names no key of its own
    "prompts": "data.prompts_per_step", "n": "rollout.samples_per_prompt", "P": "data.max_prompt_tokens",
    "R": "rollout.max_response_tokens", "mini": "actor.mini_batch_prompts", "micro": "actor.micro_batch.samples",
    "budget": "actor.micro_batch.max_tokens", "tp": "mesh.tp", "pp": "mesh.pp", "cp": "mesh.cp", "sp": "mesh.sp",
    "ep": "mesh.ep", "vpp": "mesh.vpp", "mesh_dp": "mesh.dp", "gpus_per_node": "hardware.gpus_per_node",
    "rtp": "rollout.serving.mesh.tp", "rdp": "rollout.serving.mesh.dp",
    "max_model_len": "rollout.serving.max_model_tokens", "aggregation": "algorithm.loss_aggregation",
    "importance": "algorithm.rollout_correction.importance",
    "weight_low": "algorithm.rollout_correction.low", "normalize": "algorithm.rollout_correction.normalize",
    "bypass_loss": "algorithm.rollout_correction.loss", "policy_starts": "critic.warmup_steps", "packed": "actor.packed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """Values by name, with what names each comes from."""

    values: Mapping[str, Any]
    rows: Mapping[str, Fact]
    order: tuple[Fact, ...]  # derived facts, each after those it needs
    keys: Mapping[str, str]  # name -> the framework's key (or ours) that sets it
    places: Mapping[str, str]  # key -> file:line, where known

    def closure(self, names: Iterable[str]) -> tuple[Fact, ...]:
        """Derived facts that these names depend on, in the order in which they can be computed."""
        wanted = set(names)
        for fact in reversed(self.order):
            if fact.name in wanted:
                wanted |= set(names_in(fact.expression or ""))
        return tuple(fact for fact in self.order if fact.name in wanted)

    def key(self, name: str) -> str | None:
        """The key that sets a name, through expressions that only pick one of several names."""
        fact = self.rows.get(name)
        if fact is None or fact.expression is None:
            return self.keys.get(name)
        value = self.values.get(name)
        same = (other for other in names_in(fact.expression) if other in self.rows and self.values.get(other) == value)
        return next((key for other in same if (key := self.keys.get(other))), None)

    def following(self, knob: str, names: Iterable[str]) -> tuple[Fact, ...]:
        """Those of the closure that change with `knob`."""
        moved, found = {knob}, []
        for fact in self.closure(names):
            if moved & set(names_in(fact.expression or "")):
                moved.add(fact.name)
                found.append(fact)
        return tuple(found)

    def varied(self, name: str, value: object, derived: Iterable[Fact]) -> dict[str, Any]:
        """All values with one of them changed; `derived` facts are computed again."""
        return derive({**self.values, name: value}, derived)

    def missing(self, names: Iterable[str]) -> list[str]:
        """What a user would have to give for these names: keys or labels of inputs that are absent or null."""
        found: dict[str, None] = {}
        for name in names:
            fact = self.rows.get(name)
            if self.values.get(name) is not None:
                continue
            if fact is not None and fact.expression is not None:
                inner = self.missing(names_in(fact.expression))
                found |= dict.fromkeys([fact.label] if fact.label else inner or [name])
            else:
                label = fact.label if fact else None
                found |= {label or self.keys.get(name) or name: None}
        return list(found)

    def evidence(self, names: Iterable[str]) -> list[str]:
        """`mini = 5 (actor_rollout_ref.actor.ppo_mini_batch_size, run.sh:12)` for each name and what it is made of."""
        lines: dict[str, None] = {}
        for name in names:
            fact = self.rows.get(name)
            value = plain(self.values.get(name))
            if fact is not None and fact.expression is not None:
                lines[f"{name} = {value} = {fact.expression}"] = None
                lines |= dict.fromkeys(self.evidence(names_in(fact.expression)))
            elif key := self.keys.get(name):
                place = self.places.get(key)
                lines[f"{name} = {value} ({key}{f', {place}' if place else ''})"] = None
            else:
                lines[f"{name} = {value}"] = None
        return list(lines)


def facts(config: RunConfig, architecture: Architecture | None, lengths: Lengths | None) -> Facts:
    """Every name that a rule for this configuration's framework may use."""
    rules = table(family(config.framework))
    raw = {_spelling(key): value for key, value in config.raw.items()}
    values: dict[str, Any] = {**_of_run(config), **_of_model(architecture), **_of_critic_stages(config, architecture)}
    keys: dict[str, str] = {name: key for name, key in KNOBS.items() if not config.raw}
    for fact in rules.facts:
        key = next((k for k in fact.keys if raw.get(_spelling(k)) is not None), None)
        key = key or next((k for k in fact.keys if _spelling(k) in raw), None)
        if key is not None:
            value = _typed(raw[_spelling(key)])
            if value is not None or fact.has_default or fact.name not in values:
                values[fact.name] = value
        elif fact.has_default and fact.name not in values:
            values[fact.name] = fact.default
        if fact.keys:
            keys[fact.name] = key or fact.keys[-1]
    order = _ordered(rules)
    values = derive(values, order)
    values |= _of_lengths(values, lengths)
    values = derive(values, order)
    values |= _worst(values, lengths)
    rows = {fact.name: fact for fact in rules.facts}
    return Facts(values=values, rows=rows, order=order, keys=keys, places=_places(config))


def _typed(value: Any) -> Any:
    """A number that was written as text is a number all the same."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def family(framework: str) -> str:
    """The name under which a framework's tables stand."""
    return framework.lower().replace("-", "_")


def plain(value: object) -> str:
    """A value as a message shows it: whole numbers without a point."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def derive(values: dict[str, Any], derived: Iterable[Fact]) -> dict[str, Any]:
    """Expressions in order; one whose input is absent, null or zero gives no name."""
    for fact in derived:
        try:
            values[fact.name] = evaluate(fact.expression or "", values)
        except (MissingNameError, TypeError, ZeroDivisionError):
            values.pop(fact.name, None)
    return values


def _ordered(rules: RuleTable) -> tuple[Fact, ...]:
    waiting = {fact.name: fact for fact in rules.facts if fact.expression is not None}
    done: list[Fact] = []
    while waiting:
        ready = [f for f in waiting.values() if not waiting.keys() & set(names_in(f.expression or "")) - {f.name}]
        if not ready:
            raise AssertionError(f"facts {', '.join(waiting)} need each other")
        done += ready
        for fact in ready:
            del waiting[fact.name]
    return tuple(done)


def _of_run(config: RunConfig) -> dict[str, Any]:
    engine, serving = config.actor.engine, config.rollout.serving
    mesh, micro = engine.mesh or config.mesh, config.actor.micro_batch
    passes = config.actor.log_prob_micro_batch or micro
    own = mesh.dp * mesh.model if family(config.framework) == "flowledger" else 1
    return {
        "framework": family(config.framework), "world": max(config.hardware.world, own), "nodes": config.hardware.nodes, "machine_world": config.hardware.world,
        "gpus_per_node": config.hardware.gpus_per_node, "prompts": config.data.prompts_per_step,
        "n": config.rollout.samples_per_prompt, "P": config.data.max_prompt_tokens,
        "R": config.rollout.max_response_tokens, "mesh_dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp,
        "sp": mesh.sp, "ep": mesh.ep, "etp": mesh.etp, "vpp": mesh.vpp, "mini": config.mini_batch_prompts,
        "mini_samples": config.mini_batch_samples, "micro": micro.samples, "dynamic": micro.dynamic,
        "budget": micro.max_tokens or micro.max_padded_tokens, "lp_micro": passes.samples, "lp_budget": passes.max_tokens,
        "lp_dynamic": passes.dynamic, "epochs": config.actor.epochs, "engine_strategy": engine.strategy,
        "first_stage": engine.layers_in_first_stage, "last_stage": engine.layers_in_last_stage,
        "stage_layers": sum(engine.layers_in_stages), "rollout_engine": serving.engine, "rtp": serving.mesh.tp,
        "rdp": serving.mesh.dp, "rpp": serving.mesh.pp, "rep": serving.mesh.ep,
        "max_model_len": serving.max_model_tokens, "colocated": serving.colocated,
        "rollout_world": serving.gpus or (config.hardware.world if serving.colocated else None), "estimator": config.algorithm.advantage,
        "max_running": serving.max_running or config.rollout.max_running, "ref_used": config.ref is not None,
        "critic_used": config.critic is not None, "ref_micro": passes.samples, "ref_budget": passes.max_tokens,
        "ref_dynamic": passes.dynamic, "kl_coef": config.algorithm.kl_coef, "policy_dtype": engine.param_dtype,
    } | _of_algorithm(config) | _of_critic(config) | _of_own_mesh(config)  # fmt: skip


def _of_algorithm(config: RunConfig) -> dict[str, Any]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    return {
        "policy_loss": algorithm.policy_loss, "aggregation": algorithm.loss_aggregation, "importance": correction.importance,
        "normalize": correction.normalize, "weight_low": correction.low, "bypass_loss": correction.loss, "steps": config.steps,
        "policy_starts": config.policy_starts,
    }  # fmt: skip


def _of_critic(config: RunConfig) -> dict[str, Any]:
    """How flowledger's own critic cuts its passes; other frameworks say it with keys of their own."""
    critic = config.critic
    if critic is None or family(config.framework) != "flowledger":
        return {}
    update = critic.micro_batch or config.actor.micro_batch
    values = critic.values_micro_batch or update
    prompts = critic.mini_batch_prompts or config.mini_batch_prompts
    return {
        "values_limits": bool(critic.values_micro_batch or critic.micro_batch), "values_dynamic": values.dynamic, "values_micro": values.samples,
        "values_budget": values.max_tokens or values.max_padded_tokens, "critic_dynamic": update.dynamic,
        "critic_micro": update.samples, "critic_budget": update.max_tokens or update.max_padded_tokens,
        "critic_mini_samples": prompts * config.rollout.samples_per_prompt,
    }  # fmt: skip


def _of_own_mesh(config: RunConfig) -> dict[str, Any]:
    """What the mesh of flowledger's own loop must agree with."""
    if family(config.framework) != "flowledger":
        return {}
    critic = config.critic.engine if config.critic else None
    engines = (config.actor.engine, critic or config.actor.engine)
    return {
        "old_used": config.old_log_prob_pass, "max_running": config.rollout.max_running, "cp_kind": config.mesh.cp_kind, "packed": config.actor.packed, "lora": config.model.lora is not None,
        "shared_weights": config.rollout.weights == "shared", "stage_count": len(config.actor.engine.layers_in_stages),
        "empty_stages": sum(count < 1 for count in config.actor.engine.layers_in_stages[1:-1]),
        "sequence_parallel": any(engine.sequence_parallel for engine in engines), "pipeline": engines[0].pipeline,
        "critic_pipeline": engines[-1].pipeline, "engine_meshes": any(engine.mesh is not None for engine in engines),
    }  # fmt: skip


def _of_critic_stages(config: RunConfig, architecture: Architecture | None) -> dict[str, Any]:
    """Whether the pipeline of a critic with an engine of its own shares the layers, which are known where it copies the policy."""
    if family(config.framework) != "flowledger":
        return {}
    critic = config.critic
    if critic is None or critic.engine is None or architecture is None or critic.path != START:
        names = ("critic_shares", "critic_stages", "critic_first", "critic_last")
        return {"critic_engine": False} | dict.fromkeys(names)
    told = critic.engine.layers_in_stages
    asked = critic.engine.model_copy(update={"mesh": config.mesh})
    return {
        "critic_engine": True, "critic_shares": dealt(asked, architecture.layers) is asked and all(told[1:-1]),
        "critic_stages": list(told), "critic_first": critic.engine.layers_in_first_stage, "critic_last": critic.engine.layers_in_last_stage,
    }  # fmt: skip


def _of_model(model: Architecture | None) -> dict[str, Any]:
    if model is None:
        return {}
    return {
        "heads": model.heads, "kv_heads": model.kv_heads, "layers": model.layers, "hidden": model.hidden, "ffn": model.ffn,
        "vocab": model.vocab, "max_positions": model.max_positions or None, "mla": model.mla is not None,
        "experts": model.moe.experts if model.moe else 0, "topk": model.moe.topk if model.moe else 0,
    }  # fmt: skip


def _of_lengths(values: Mapping[str, Any], lengths: Lengths | None) -> dict[str, Any]:
    """Tokens of a whole sample: the longest and the mean. Without lengths every sample is as long as allowed."""
    prompt, response = values.get("P") or 0, values.get("R") or 0
    whole = prompt + response
    if lengths is None:
        return {"longest": whole, "mean_length": whole}
    return {"longest": min(whole, lengths.longest(prompt)), "mean_length": min(whole, lengths.mean(prompt))}


def _worst(values: Mapping[str, Any], lengths: Lengths | None) -> dict[str, Any]:
    """Tokens of the fullest micro-batch of an update: exact where all are equally long, else the fullest that was drawn."""
    samples, tokens = values.get("mini_rank"), values.get("budget_tokens")
    if not isinstance(samples, int) or not isinstance(tokens, int) or samples < 1 or tokens < 1:
        return {}
    if lengths is None:
        longest = values["longest"]
        worst = worst_of(samples, budget=tokens, longest=longest, shortest=longest, mean=longest)
    else:
        worst = drawn(samples, tokens, values, lengths).worst_tokens
    return {"worst_micro": worst}


def _places(config: RunConfig) -> dict[str, str]:
    """Key -> where it was set: from `key@file:line` as readers of other frameworks write it, or our own `file:line`."""
    if not config.raw:
        told = {key: config.source_of(key) for key in KNOBS.values()}
        return {key: place for key, place in told.items() if not place.startswith("default")}
    pairs = (source.partition("@") for source in config._sources.values() if "@" in source)
    return {key: place for key, _, place in pairs if " default" not in key}


def _spelling(key: str) -> str:
    """`--rollout-batch-size` and `rollout_batch_size` are one key."""
    return key.lstrip("-+").replace("-", "_")
