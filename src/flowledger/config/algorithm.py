"""What is learnt from the samples: advantage, policy loss, KL and entropy, and the correction for stale samples."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from flowledger.config.bounds import COUNT, WEIGHT
from flowledger.config.section import Section
from flowledger.flow.errors import nearest

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]

# The level at which a rejection judges, and the estimator of divergence it looks at. A maximum of k1 is not defined.
REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip


class Rejection(Section):
    """Mask tokens or whole responses on which trainer and rollout disagree too much (verl's rollout_rs)."""

    kind: str  # one of REJECTIONS
    high: float = Field(2.0, gt=0, le=WEIGHT)  # k1: of the ratio; k2, k3: of the divergence itself
    low: float | None = Field(None, gt=0, le=WEIGHT)  # k1 only: of the ratio; null: 1 / high

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in REJECTIONS:
            raise ValueError(f"{kind!r} is not one of {', '.join(REJECTIONS)}{nearest(kind, REJECTIONS)}")
        return kind

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "Rejection":
        if not self.kind.endswith("k1"):
            if self.low is not None:
                raise ValueError(f"low = {self.low} belongs to k1 only; {self.kind} has one bound, `high`")
            return self
        low = 1 / self.high if self.low is None else self.low
        if low > self.high:
            way = "give `low` too" if self.low is None else f"use low = {self.high} or less"
            raise ValueError(f"low = {low} is above high = {self.high}; {way}")
        return self


class RolloutCorrection(Section):
    """What is done about rollout log-probs that differ from the trainer's (verl's algorithm.rollout_correction)."""

    importance: Literal["none", "token", "sequence"] = "none"  # weights π_old / π_rollout on the loss (rollout_is)
    high: float = Field(2.0, gt=0, le=WEIGHT)  # weights are cut off here (rollout_is_threshold)
    low: float | None = Field(None, gt=0, le=WEIGHT)  # given: weights outside [low, high] become 0 (IcePop)
    normalize: bool = False  # weights are divided by their mean
    rejections: tuple[Rejection, ...] = ()  # a token is kept where all of them keep it
    loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # of policy_loss `bypass_mode`

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "RolloutCorrection":
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}; use {self.high} or less")
        return self

    @property
    def active(self) -> bool:
        """Whether anything is weighted or rejected."""
        return self.importance != "none" or bool(self.rejections)


class Algorithm(Section):
    """Advantage, policy loss, KL and entropy."""

    advantage: str = "grpo"
    norm_by_std: bool = True  # false: r - mean only (Dr. GRPO)
    gamma: float = Field(1.0, ge=0, le=1)  # discount per token
    lam: float = Field(1.0, ge=0, le=1)  # GAE: 1 trusts the rewards, 0 the critic
    zero_tail: bool = True  # optimal_token_baseline: no baseline where only the longest response of a group is left
    policy_loss: str = "vanilla"
    clip_low: float = Field(0.2, ge=0, le=WEIGHT)
    clip_high: float = Field(0.2, ge=0, le=WEIGHT)
    clip_dual: float = Field(3.0, gt=1, le=WEIGHT)  # lower bound of the loss where the advantage is negative
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)  # clip_cov: share of tokens taken out of the loss
    clip_cov_low: float = Field(1.0, ge=-WEIGHT, le=WEIGHT)  # …, whose covariance lies between these
    clip_cov_high: float = Field(5.0, ge=-WEIGHT, le=WEIGHT)
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)  # kl_cov: share of tokens, those of highest covariance, held back …
    kl_cov_coef: float = Field(1.0, ge=0, le=WEIGHT)  # … by this weight on |log ratio|
    dro_beta: float = Field(0.1, gt=0, le=WEIGHT)  # dro: weight of the squared log ratio
    sapo_tau_positive: float = Field(
        1.0, gt=0, le=WEIGHT
    )  # sapo: steepness of the gate where the advantage is positive
    sapo_tau_negative: float = Field(1.05, gt=0, le=WEIGHT)  # …, and where it is not
    loss_aggregation: Aggregation = "token-mean"
    loss_scale_factor: int | None = Field(
        None, ge=1, le=COUNT
    )  # divisor of seq-mean-token-sum-norm; null: max_response_tokens
    kl_coef: float = Field(0.0, ge=0, le=WEIGHT)
    kl_form: str | None = None  # null: k1 in the reward, k3 in the loss (verl's defaults)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_control: Literal["fixed", "adaptive"] = "fixed"  # adaptive: kl_coef moves so that the KL comes to kl_target
    kl_target: float = Field(0.1, gt=0, le=WEIGHT)  # nats per token
    kl_horizon: int = Field(10_000, ge=1, le=COUNT)  # samples over which the coefficient adapts
    entropy_coef: float = Field(0.0, ge=-WEIGHT, le=WEIGHT)
    rollout_correction: RolloutCorrection = RolloutCorrection()

    @property
    def kl_estimator(self) -> str:
        """The form of the KL to the reference: `kl_form`, or where it is null that which suits its place.

        k1 is unbiased and needs no gradient in the reward; in the loss its gradient says nothing of the KL, k3 is used.
        """
        return self.kl_form or ("k1" if self.kl_in == "reward" else "k3")
