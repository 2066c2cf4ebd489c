"""Words of settings: what people look up by the name that their framework gives it, with the key of each framework."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.flow.errors import folded
from flowledger.show.languages import Language, said

LABELS_ZH = {"keys": "各框架的键", "counted_in": "单位", "see": "另见"}
SAMPLES = ("samples (prompt * n); verl's keys are in prompts", "样本（prompt 数 * n）；verl 的键以 prompt 计")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `keys`: framework -> its key; `others`: what else people call it."""

    name: str
    en: str
    zh: str
    keys: Mapping[str, str]
    others: tuple[str, ...] = ()
    counted_in: tuple[str, str] | None = None
    see: tuple[str, ...] = ()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="batch_size", others=("train_batch", "train_batch_size", "global_batch_size", "rollout_batch_size", "step_batch"),
        en="What one step samples and learns from: B = B_prompt * G samples. A step is cut into mini-batches (one optimizer step each), these "
        "into micro-batches (one forward and backward each). In TRL the word means the micro-batch of one device.",
        zh="一步采样并学习的全部样本：B = B_prompt * G。一步切成若干 mini-batch（各做一次优化器更新），再切成 micro-batch（各做一次前反向）。"
        "TRL 中这个词指单卡的 micro-batch。",
        keys={"flowledger": "data.prompts_per_step", "verl": "data.train_batch_size", "trl": "generation_batch_size"},
        counted_in=SAMPLES, see=("B", "B_prompt", "mini_batch", "micro_batch"),
    ),
    Setting(
        name="mini_batch", others=("ppo_mini_batch_size", "minibatch", "mini_batch_size", "mini_batch_prompts"),
        en="The samples of one optimizer step. Smaller than the step's batch, later ones meet a policy that has moved: only then ratios leave 1 and "
        "clipping does anything. It changes the training, unlike the micro-batch.",
        zh="一次优化器更新所用的样本。若小于整步的 batch，后面的 mini-batch 面对的策略已经移动：此时 ratio 才会离开 1、裁剪才起作用。"
        "与 micro-batch 不同，它改变训练结果。",
        keys={"flowledger": "actor.mini_batch_prompts", "verl": "actor_rollout_ref.actor.ppo_mini_batch_size", "trl": "gradient_accumulation_steps (times the micro-batch and the devices)"},
        counted_in=SAMPLES, see=("B_mini", "epochs", "ratio"),
    ),
    Setting(
        name="micro_batch", others=(
            "ppo_micro_batch_size_per_gpu", "microbatch", "micro_batch_size", "per_device_train_batch_size", "gradient_accumulation",
            "ppo_max_token_len_per_gpu", "token_budget",
        ),
        en="The samples of one forward and backward on one rank; gradients add up over the micro-batches of a mini-batch. It decides memory and "
        "speed, never the loss: the normaliser is that of the mini-batch. A token budget fills each up to so many tokens instead.",
        zh="一个 rank 一次前反向的样本；梯度在一个 mini-batch 的各 micro-batch 上累加。它决定显存与速度，不改变 loss：归一化按 mini-batch 计。"
        "token 预算则按 token 数装满每个 micro-batch。",
        keys={
            "flowledger": "actor.micro_batch.samples, actor.micro_batch.max_tokens",
            "verl": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "trl": "per_device_train_batch_size",
        },
        see=("B_micro", "T", "activation"),
    ),
    Setting(
        name="epochs", others=("ppo_epochs", "num_iterations", "num_ppo_epochs"),
        en="How often one step's samples go through the update. From the second time on the policy is another than the one that sampled.",
        zh="一步的样本经过更新的次数。从第二次起，策略已不是采样时的策略。",
        keys={"flowledger": "actor.epochs", "verl": "actor_rollout_ref.actor.ppo_epochs", "trl": "num_iterations"}, see=("mini_batch", "ratio"),
    ),
    Setting(
        name="group_size", others=("rollout_n", "rollout.n", "num_generations", "samples_per_prompt", "n_samples_per_prompt"),
        en="Responses sampled to each prompt (G). Estimators that compare within a group need at least two, and learn nothing of a group whose "
        "rewards are equal.",
        zh="每个 prompt 采样的 response 数（G）。组内比较的估计器至少需要两个；组内 reward 全相等时学不到东西。",
        keys={"flowledger": "rollout.samples_per_prompt", "verl": "actor_rollout_ref.rollout.n", "trl": "num_generations"},
        see=("G", "zero_variance_groups"),
    ),
    Setting(
        name="beta", others=("kl_coef", "kl_coefficient", "kl_loss_coef", "kl_beta", "init_kl_coef", "kl_penalty_coef"),
        en="The weight of the KL to the reference, in the loss or in the reward. 0: no KL, and no reference model is loaded for it. In TRL and in papers it "
        "is called beta; not AdamW's betas, and not the weight of dro (algorithm.dro_beta).",
        zh="对参考策略 KL 的权重，作用在 loss 或 reward 中。0：没有 KL，也不必为此加载参考模型。TRL 与论文称 beta；不同于 AdamW 的 betas，"
        "也不同于 dro 的权重（algorithm.dro_beta）。",
        keys={
            "flowledger": "algorithm.kl_coef (and algorithm.kl_in)",
            "verl": "actor_rollout_ref.actor.kl_loss_coef (with use_kl_loss), algorithm.kl_ctrl.kl_coef (with algorithm.use_kl_in_reward)",
            "trl": "beta",
        },
        see=("kl_coef", "ref_kl", "ref_log_prob"),
    ),
    Setting(
        name="learning_rate", others=("lr", "step_size"),
        en="The step of the optimizer. RL of language models uses about 1e-6 for all weights, ten times that for adapters.",
        zh="优化器的步长。语言模型强化学习全参数约 1e-6，LoRA 约为其十倍。",
        keys={"flowledger": "optim.lr", "verl": "actor_rollout_ref.actor.optim.lr", "trl": "learning_rate"}, see=("lr", "grad_norm"),
    ),
    Setting(
        name="clip_range", others=("clip_eps", "eps_clip", "epsilon", "cliprange", "clip_low", "clip_high", "epsilon_high", "clip_ratio_low", "clip_ratio_high"),
        en="How far the ratio may leave 1 before a token stops pulling: 1 - low to 1 + high. A higher upper bound keeps exploration (clip-higher).",
        zh="ratio 离开 1 多远之后该 token 不再产生梯度：1 - low 到 1 + high。上界更高有助于保持探索（clip-higher）。",
        keys={
            "flowledger": "algorithm.clip_low, algorithm.clip_high",
            "verl": "actor_rollout_ref.actor.clip_ratio_low, actor_rollout_ref.actor.clip_ratio_high", "trl": "epsilon, epsilon_high",
        },
        see=("clip_ratio", "ratio"),
    ),
    Setting(
        name="entropy_coef", others=("entropy_coeff", "entropy_bonus", "ent_coef"),
        en="The weight of the entropy that the loss rewards; above 0 the logits' graph is kept longer, which takes memory.",
        zh="loss 中鼓励熵的权重；大于 0 时 logits 的计算图保留更久，占用显存。",
        keys={"flowledger": "algorithm.entropy_coef", "verl": "actor_rollout_ref.actor.entropy_coeff"}, see=("entropy",),
    ),
    Setting(
        name="temperature", others=("sampling_temperature",),
        en="What logits are divided by before a token is drawn. The trainer must divide by the same, or its log-probs are those of another policy.",
        zh="采样前 logits 除以的数。训练端必须除以同一个数，否则其 log-prob 属于另一个策略。",
        keys={"flowledger": "rollout.temperature", "verl": "actor_rollout_ref.rollout.temperature", "trl": "temperature"}, see=("rollout_gap/mean",),
    ),
    Setting(
        name="max_response_length", others=("max_response_tokens", "max_completion_length", "max_new_tokens", "max_tokens", "generate_max_len"),
        en="The limit of a response in tokens; one that reaches it without an end was cut off.",
        zh="response 的 token 数上限；到达上限而未结束即被截断。",
        keys={"flowledger": "rollout.max_response_tokens", "verl": "data.max_response_length", "trl": "max_completion_length"},
        see=("S_resp", "truncation_ratio"),
    ),
    Setting(
        name="gradient_clipping", others=("grad_clip", "max_grad_norm", "clip_grad"),
        en="The norm to which gradients are scaled down before the optimizer's step. `grad_norm` is told before it.",
        zh="优化器更新前把梯度缩到的范数。`grad_norm` 是缩放之前的值。",
        keys={"flowledger": "actor.grad_clip", "verl": "actor_rollout_ref.actor.grad_clip", "trl": "max_grad_norm"}, see=("grad_norm",),
    ),
    Setting(
        name="discount", others=("gamma", "gae_lambda", "lam"),
        en="gamma: what a reward one token later is worth. lambda of GAE: 1 trusts the rewards, 0 the critic.",
        zh="gamma：晚一个 token 的 reward 打几折。GAE 的 lambda：1 相信 reward，0 相信 critic。",
        keys={"flowledger": "algorithm.gamma, algorithm.lam", "verl": "algorithm.gamma, algorithm.lam"}, see=("gae",),
    ),
    Setting(
        name="staleness", others=("max_staleness", "off_policy_steps", "max_head_offpolicyness"),
        en="How many updates the policy may have gone through between sampling and training on a sample; 0 is on-policy.",
        zh="从采样到用该样本训练之间，策略可以经过多少次更新；0 为 on-policy。",
        keys={"flowledger": "async.max_staleness", "areal": "max_head_offpolicyness"}, see=("staleness/mean",),
    ),
)  # fmt: skip


def facts(word: str, lang: Language) -> Iterator[tuple[str, dict[str, Any]]]:
    """The setting that a word means, by its own name, another, or a framework's whole key, with its sort."""
    asked = _spelt(word)
    for one in SETTINGS:
        if asked in {_spelt(name) for name in (one.name, *one.others, *_keys(one))}:
            yield "setting", {
                "what": "setting", "name": one.name, "asked": word, "meaning": said(one.en, one.zh, lang), "keys": dict(one.keys),
                "counted_in": one.counted_in and said(*one.counted_in, lang), "see": list(one.see),
            }  # fmt: skip


def words() -> Iterator[str]:
    """Every name that is understood here."""
    for one in SETTINGS:
        yield from (one.name, *one.others, *_keys(one))


def _keys(one: Setting) -> Iterator[str]:
    for text in one.keys.values():
        yield from (key.partition(" (")[0].strip() for key in text.split(","))


def _spelt(word: str) -> str:
    return folded(word).replace(" ", "_")
