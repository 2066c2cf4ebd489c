"""Policy losses by name. To add one, write a function in the file of its family and a line here."""

from collections.abc import Callable

from flowledger.run.algorithms import bypass, covariance_losses, ratio_losses, sequence_losses
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss

POLICY_LOSSES: dict[str, Callable[[LossInputs], TokenLoss]] = {
    "vanilla": ratio_losses.vanilla,
    "gspo": sequence_losses.gspo,
    "cispo": ratio_losses.cispo,
    "sapo": ratio_losses.sapo,
    "gpg": ratio_losses.reinforce,
    "geo_mean": sequence_losses.geo_mean,
    "clip_cov": covariance_losses.clip_cov,
    "kl_cov": covariance_losses.kl_cov,
    "dppo_tv": ratio_losses.dppo_tv,
    "dppo_kl": ratio_losses.dppo_kl,
    "dro": ratio_losses.dro,
    "bypass_mode": bypass.bypass_mode,
}
