"""How our functions make each kind of array in `core_algos.npz`, for `golden_verl.py`."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from flowledger.config.algorithm import Algorithm, Rejection, RolloutCorrection
from flowledger.flow.errors import BadInput
from flowledger.run import head as head_of
from flowledger.run.algorithms import aggregation, kl, masked, rollout_correction, token_loss, value_loss
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.estimate import AdvantageInputs
from flowledger.run.algorithms.groups import groups_of
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES

INPUTS = {"vf/returns_in", "tf/logits", "tf/labels", "tf/get_response_mask_in"}  # beside everything under `in`
SETTINGS = {  # verl's name in pg_config -> ours
    "clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high", "clip_ratio_c": "clip_dual",
    "clip_cov_ratio": "clip_cov_ratio", "clip_cov_lb": "clip_cov_low", "clip_cov_ub": "clip_cov_high",
    "kl_cov_ratio": "kl_cov_ratio", "ppo_kl_coef": "kl_cov_coef", "dro_beta": "dro_beta",
    "tau_pos": "sapo_tau_positive", "tau_neg": "sapo_tau_negative",
}  # fmt: skip
ELSEWHERE = {
    "clip_ratio",
    "seed_before_call",
    "global_batch_info",
    "cliprange_value",
}  # in pg_config, and no setting of ours
TOTALS = {
    "dp_size": "ranks",
    "batch_num_tokens": "tokens",
    "global_batch_size": "sequences",
    "loss_scale_factor": "horizon",
}
BOOLEANS = {"True": True, "False": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The inputs of one batch."""

    name: str
    arrays: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def __call__(self, name: str) -> Tensor:
        return self.arrays[f"{self.name}/{name}" if self.name else name]

    def leaf(self, name: str) -> Tensor:
        return self(name).clone().requires_grad_()

    @property
    def mask(self) -> Tensor:
        return self("in/response_mask")

    @property
    def group_id(self) -> Tensor:
        index = self.facts["inputs"][self.name]["index"]
        numbers = {name: n for n, name in enumerate(dict.fromkeys(index))}
        return torch.tensor([numbers[name] for name in index])

    def fact(self, section: str, stem: Sequence[str]) -> Any:
        return self.facts[section]["/".join((self.name, section, *stem))]


def options(text: str) -> dict[str, str]:
    """`gamma=1.0,w=[1.0, 0.5]` -> {gamma: 1.0, w: [1.0, 0.5]}; a word without = stands for itself."""
    found = re.findall(r"([^,=]+)(?:=(\[[^\]]*\]|[^,]*))?(?:,|$)", text)
    return {name.strip(): value for name, value in found}


def advantages(case: Case, stem: Sequence[str]) -> dict[str, Tensor]:
    """`<estimator>/<variant>`."""
    estimator, variant = stem
    chosen, fact = options(variant), case.facts["adv"].get("/".join((case.name, "adv", *stem)), {})
    settings: dict[str, Any] = {"advantage": estimator}
    more: dict[str, Any] = {}
    rewards, group_id = case("in/token_level_rewards"), case.group_id
    for name, value in chosen.items():
        match name:
            case "gamma" | "lam":
                settings[name] = float(value)
            case "norm":
                settings["norm_by_std"] = BOOLEANS[value]
            case "tail":
                settings["zero_tail"] = BOOLEANS[value]
            case "rew":
                rewards = case(f"in/{value}")
            case "isw":
                more["rollout_is_weights"] = case("in/rollout_is_weights") if BOOLEANS[value] else None
            case "multi":
                more["reward_components"] = torch.tensor(list(fact["rewards"].values())).T  # verl: float32 in any batch
            case "w":
                more["component_weights"] = None if fact["weights"] is None else tuple(fact["weights"])
            case "default":
                pass
            case _:
                raise BadInput(f"unknown option {name!r} in {variant!r}")
    inputs: dict[str, Any] = {
        "token_level_reward": rewards, "mask": case.mask, "old_log_prob": case("in/old_log_prob"),
        "values": case("in/values"), "sum_pi_squared": case("in/sum_pi_squared"),
        "baseline_reward": case("in/reward_baselines"), **more,
    }  # fmt: skip
    if estimator == "grpo_passk":  # verl refuses groups of one, so its vectors are of the others
        several = torch.bincount(group_id)[group_id] > 1
        inputs = {k: v[several] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        group_id = group_id[several]
    return estimate(settings, inputs, group_id)


def estimate(settings: Mapping[str, Any], inputs: Mapping[str, Any], group_id: Tensor) -> dict[str, Tensor]:
    groups = groups_of(group_id=group_id, kept=torch.ones_like(group_id, dtype=torch.bool))
    made = ADVANTAGES[settings["advantage"]](AdvantageInputs(**inputs, groups=groups, settings=Algorithm(**settings)))
    return {"advantages": made.advantages, "returns": made.returns}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """pg_config -> fields of Algorithm."""
    unknown = set(config) - set(SETTINGS) - ELSEWHERE
    if unknown:
        raise BadInput(f"unknown settings {', '.join(sorted(unknown))} in pg_config")
    defaults = {name: config["clip_ratio"] for name in ("clip_low", "clip_high") if "clip_ratio" in config}
    return defaults | {ours: config[verls] for verls, ours in SETTINGS.items() if config.get(verls) is not None}


def totals_of(case: Case, mask: Tensor, normaliser: str) -> aggregation.Totals:
    """Local totals of this mask, and in their place what `global_batch_info` gives under this name."""
    local = aggregation.totals_of(mask, horizon=mask.shape[1])
    given = case.facts["pg_config"]["global_batch_info"][normaliser]
    values = {ours: getattr(local, ours) for ours in ("rows", *TOTALS.values())}
    return aggregation.Totals(**values | {TOTALS[name]: value for name, value in given.items() if value is not None})


def correction_of(importance: str, kinds: str | None, bounds: str | None, **more: Any) -> RolloutCorrection:
    """verl's rollout_is, rollout_rs and rollout_rs_threshold as our settings; `None` may be written out."""
    names = [] if kinds in (None, "None") else str(kinds).split(",")
    each = [] if bounds in (None, "None") else str(bounds).split(",")
    if len(each) == 1:
        each *= len(names)
    rejections = []
    for kind, bound in zip(names, each, strict=True):
        *low, high = (float(number) for number in bound.split("_"))
        rejections.append(Rejection(kind=kind, high=high, low=low[0] if low else None))
    level = "none" if importance in (None, "None") else importance
    return RolloutCorrection(importance=level, rejections=tuple(rejections), **more)


def policy_loss(case: Case, stem: Sequence[str]) -> dict[str, Any]:
    """`<loss>/<aggregation>/<normaliser>/isw=<0|1>[/<correction>]`: the value, and its gradient by log_prob."""
    mode, loss_aggregation, normaliser, *rest = stem
    config = case.facts["pg_config"]
    settings = {**settings_of(config), "policy_loss": mode, "loss_aggregation": loss_aggregation}
    if len(rest) > 1:
        loss, level, kinds, bounds = case.fact("pg", stem)["rc"]
        settings["rollout_correction"] = correction_of(level, kinds, bounds, loss=loss)
    log_prob = case.leaf("in/log_prob")
    inputs = token_loss.LossInputs(
        new_log_prob=log_prob, old_log_prob=case("in/old_log_prob"), advantages=case("in/advantages"),
        mask=case.mask, settings=Algorithm(**settings),
        rollout_is_weights=case("in/rollout_is_weights") if BOOLEANS[options(rest[0])["isw"]] else None,
    )  # fmt: skip
    torch.manual_seed(config["seed_before_call"])
    made = POLICY_LOSSES[mode](inputs)
    totals = totals_of(case, case.mask if made.mask is None else made.mask, normaliser)
    return _with_gradient(token_loss.aggregate(made, inputs, totals).loss, log_prob)


def _with_gradient(loss: Tensor, leaf: Tensor) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return {"loss": loss, "grad": torch.zeros_like(leaf) if gradient is None else gradient}


def aggregated(case: Case, stem: Sequence[str]) -> dict[str, Any]:
    """`<mode>/<normaliser>` of log_prob * advantages, and the gradient by it."""
    mode, normaliser = stem
    loss_mat = (case("in/log_prob") * case("in/advantages")).requires_grad_()
    made = aggregation.aggregate_tokens(
        loss_mat, mask=case.mask, mode=mode, totals=totals_of(case, case.mask, normaliser)
    )
    return _with_gradient(made.loss, loss_mat)


class Rewards(dict):
    """`compute_rewards_<coef>` for whatever coefficient a file asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def __missing__(self, output: str) -> Tensor:
        coef = float(output.removeprefix("compute_rewards_"))
        between = kl.KL_FORMS["k1"](self.case("in/old_log_prob") - self.case("in/ref_log_prob"))
        return kl.penalised(token_level_reward=self.case("in/token_level_rewards"), kl=between, coef=coef)


def kl_form(case: Case, stem: Sequence[str]) -> Mapping[str, Tensor]:
    """`<form>`: the estimate of every token, and the gradient of their sum; without a form: KL in the reward."""
    if not stem:
        return Rewards(case)
    log_prob = case.leaf("in/log_prob")
    out = kl.KL_FORMS[stem[0]](log_prob - case("in/ref_log_prob"))
    return {"out": out, "grad": torch.autograd.grad(out.sum(), log_prob)[0]}


def critic_loss(case: Case, stem: Sequence[str]) -> dict[str, Any]:
    """`<mode>` of the value loss, clipped where verl clips it: `cliprange_value`, or else `clip_ratio`."""
    config, values = case.facts["pg_config"], case.leaf("in/vpreds")
    made = value_loss.value_loss(
        new_values=values, old_values=case("in/values"), returns=case("vf/returns_in"), mask=case.mask,
        clip=config.get("cliprange_value", config["clip_ratio"]),
    )  # fmt: skip
    totals = totals_of(case, case.mask, "local")
    loss = aggregation.aggregate_tokens(made.loss_mat, mask=case.mask, mode=stem[0], totals=totals).loss
    clipped = masked.masked_mean(made.clipped.to(values.dtype), case.mask)
    return {**_with_gradient(loss, values), "clipfrac": clipped}


def torch_functions(case: Case, stem: Sequence[str]) -> dict[str, Any]:
    """Masked statistics of `values`; log-prob, entropy and Σπ² from logits."""
    values, mask, logits, labels = case("in/values"), case.mask, case("tf/logits"), case("tf/labels")
    log_prob, entropy, squares = from_logits(logits, labels)
    found, white = masked.moments(values, mask), masked.masked_whiten(values, mask)
    return {
        "masked_mean": masked.masked_mean(values, mask), "masked_var": found.variance,
        "masked_sum": masked.masked_sum(values, mask), "masked_whiten": white,
        "masked_whiten_noshift": white + found.mean,
        "logprobs_from_logits": log_prob, "logprobs_naive": log_prob, "entropy_from_logits": entropy,
        "entropy_chunk": entropy.flatten(), "sum_pi_squared": squares, "entropy_loss_token_mean": entropy.mean(),
    }  # fmt: skip


def from_logits(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Log-prob of `labels` [B, S], entropy and Σπ² from logits [B, S, V], as a forward pass makes them."""
    head = head_of.Head(embedding=torch.nn.Identity())
    made = head_of.token_probs(
        logits.flatten(0, 1), labels.flatten(), head, temperature=1.0, chunk_tokens=0, entropy_grad=False,
        sum_pi_squared=True,
    )  # fmt: skip
    return [values.view_as(labels) for values in made]


def correction(case: Case, stem: Sequence[str]) -> dict[str, Any]:
    """`is=<level>/norm=<0|1>/rs=<kinds>/th=<bounds>`: weights, mask and figures."""
    chosen = dict(part.split("=", 1) for part in stem)
    unknown = set(chosen) - {"is", "norm", "rs", "th"}
    if unknown:
        raise BadInput(f"unknown option {', '.join(sorted(unknown))} in {'/'.join(stem)}")
    settings = correction_of(chosen["is"], chosen["rs"], chosen["th"], normalize=BOOLEANS[chosen["norm"]])
    made = rollout_correction.correct(
        old_log_prob=case("in/old_log_prob"), rollout_log_prob=case("in/rollout_log_prob"), loss_mask=case.mask,
        settings=settings,
    )  # fmt: skip
    figures = {name.removeprefix("rollout_correction/"): value for name, value in made.metrics.items()}
    return {"weights": made.rollout_is_weights, "mask": made.loss_mask, **figures}


SECTIONS: dict[str, Callable[[Case, Sequence[str]], Mapping[str, Any]]] = {
    "adv": advantages,
    "pg": policy_loss,
    "agg": aggregated,
    "kl": kl_form,
    "vf": critic_loss,
    "tf": torch_functions,
    "rc": correction,
}
