"""Advantage estimators by name. To add one, write a function in the file of its family and a line here."""

from collections.abc import Callable

from flowledger.run.algorithms import group_advantages, token_advantages
from flowledger.run.algorithms.estimate import AdvantageInputs, Estimate

ADVANTAGES: dict[str, Callable[[AdvantageInputs], Estimate]] = {
    "grpo": group_advantages.grpo,
    "dr_grpo": group_advantages.dr_grpo,
    "grpo_vectorized": group_advantages.grpo_vectorized,
    "gdpo": group_advantages.gdpo,
    "grpo_passk": group_advantages.grpo_passk,
    "rloo": group_advantages.rloo,
    "rloo_vectorized": group_advantages.rloo_vectorized,
    "reinforce_plus_plus": token_advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": group_advantages.reinforce_plus_plus_baseline,
    "remax": token_advantages.remax,
    "opo": group_advantages.opo,
    "gpg": group_advantages.gpg,
    "gae": token_advantages.gae,
    "optimal_token_baseline": token_advantages.optimal_token_baseline,
    "tir_optimal_token_baseline": token_advantages.tir_optimal_token_baseline,
}
