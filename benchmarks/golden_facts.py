"""How our functions make the single figures in `golden.json`, for `golden_verl.py`, and what has no counterpart here."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from golden_sections import SECTIONS, Case, estimate
from torch import Tensor

from flowledger.flow.errors import BadInput
from flowledger.plan import packing
from flowledger.run.algorithms.kl import KlControl
from flowledger.run.batching import karmarkar_karp

TINY = Path(__file__).resolve().parent.parent / "examples/tiny.yaml"
READ_ELSEWHERE = {"versions", "source", "inputs", "adv", "pg", "pg_config"}
CORRECTION_FIGURES = {  # ours -> verl's
    "training_ppl": "training_ppl", "rollout_ppl": "rollout_ppl", "kl": "kl", "k3_kl": "k3_kl",
    "chi2_token": "chi2_token", "chi2_seq": "chi2_seq", "weight_mean": "rollout_is_mean", "weight_max": "rollout_is_max",
    "effective_sample_size": "rollout_is_eff_sample_size", "rejected_tokens": "rollout_rs_masked_fraction",
    "rejected_samples": "rollout_rs_seq_masked_fraction",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One call, and what verl gives for its outputs; or the reason why there is nothing to compare."""

    name: str
    call: Callable[[], Mapping[str, Any]] = dict
    verls: Mapping[str, Any] | None = None
    left_out: str = ""


Facts = Mapping[str, Any]
Arrays = Mapping[str, Tensor]


def correction_figures(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    for key, figures in facts["rc"].items():
        name, section, *stem = key.split("/")
        case = Case(name=name, arrays=arrays, facts=facts)
        known = {verls.removeprefix("rollout_corr/"): value for verls, value in figures.items()}
        verls = {ours: known[theirs] for ours, theirs in CORRECTION_FIGURES.items() if theirs in known}
        yield Check(
            name=key, call=lambda case=case, stem=stem, section=section: SECTIONS[section](case, stem), verls=verls
        )
    yield Check(name="rc: other figures of verl", left_out="eleven of about fifty are kept here")


def kl_control(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    fact = facts["adaptive_kl"]

    def coefficients() -> dict[str, Any]:
        control, made = KlControl(coef=fact["init"], target=fact["target"], horizon=fact["horizon"]), []
        for kl in fact["kls"]:
            control.update(kl, fact["n_steps"])
            made.append(control.coef)
        return {"values": torch.tensor(made, dtype=torch.float64)}

    yield Check(
        name="adaptive_kl", call=coefficients, verls={"values": torch.tensor(fact["values"], dtype=torch.float64)}
    )


def parts_of(parts: Sequence[Sequence[int]]) -> list[int]:
    """Which part each index is in, parts numbered by their smallest index: the same for the same partition."""
    order = {i: n for n, part in enumerate(sorted(sorted(part) for part in parts if part)) for i in part}
    return [order[i] for i in sorted(order)]


def balancing(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    for key, fact in facts["seqlen_balancing"].items():
        count = int(re.search(r"k=(\d+)", key)[1])  # type: ignore[index]
        name = f"seqlen_balancing/{key}"
        if "equal=True" in key:
            yield Check(
                name=name, left_out="no partition into parts of equal count here: a micro-batch is as long as it is"
            )
            continue
        yield Check(
            name=name,
            call=lambda lengths=fact["seqlens"], count=count: {
                "kk": parts_of(karmarkar_karp(lengths, count)), "balanced": parts_of(packing.partition(lengths, count)),
            },
            verls={which: parts_of(fact[which]) for which in ("kk", "balanced")},
        )  # fmt: skip
    yield Check(name="seqlen_balancing: greedy, stats", left_out="no greedy partition, and no figures of one, here")


def micro_batches(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    fact = facts["rearrange_micro_batches"]
    yield Check(
        name="rearrange_micro_batches",
        call=lambda: {
            "idx": parts_of(packing.pack(fact["lens"], scheme="balanced_capped", budget=fact["max_token_len"]).parts)
        },
        verls={"idx": parts_of(fact["idx"])},
    )


def workload(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    fact = facts["calculate_workload"]
    yield Check(
        name="calculate_workload",
        call=lambda: {"out": torch.tensor([packing.work(n) for n in fact["inp"]], dtype=torch.float64)},
        verls={"out": torch.tensor(fact["out"], dtype=torch.float64)},
    )


def flops(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    yield Check(
        name="flops", left_out="no FLOP count of a whole model here: planned times come from measured operators"
    )


def refusals(facts: Facts, arrays: Arrays) -> Iterator[Check]:
    """What verl raises on must be refused here, with a sentence for the user."""
    for name in facts["fails"]:
        yield Check(
            name=f"fails/{name}",
            call=lambda name=name: {"refused": float(_refused(name, facts, arrays))},
            verls={"refused": 1.0},
        )


def _refused(name: str, facts: Facts, arrays: Arrays) -> bool:
    kl_form = re.fullmatch(r"[^/]+/kl/(.+)", name)
    singleton = re.match(r"(\w+) singleton", name)
    if not kl_form and not singleton:
        raise ValueError(f"what fails in {name!r} cannot be read")
    try:
        if kl_form:
            from flowledger.config.read import read

            read(TINY, [f"algorithm.kl_form={kl_form[1]}"])
        elif singleton:
            _one_of_its_own(singleton[1], facts, arrays)
    except BadInput:
        return True
    return False


def _one_of_its_own(estimator: str, facts: Facts, arrays: Arrays) -> None:
    """The estimator on a batch of which the last response is alone in its group."""
    case = Case(name=next(iter(facts["inputs"])), arrays=arrays, facts=facts)
    group_id = case.group_id.clone()
    group_id[-1] = group_id.max() + 1
    estimate(
        {"advantage": estimator}, {"token_level_reward": case("in/token_level_rewards"), "mask": case.mask}, group_id
    )


FACTS: dict[str, Callable[[Facts, Arrays], Iterator[Check]]] = {
    "rc": correction_figures,
    "adaptive_kl": kl_control,
    "seqlen_balancing": balancing,
    "rearrange_micro_batches": micro_batches,
    "calculate_workload": workload,
    "flops": flops,
    "fails": refusals,
}
