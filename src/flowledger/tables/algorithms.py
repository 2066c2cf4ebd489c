"""The field's algorithms, one row each in `algorithms.toml`: formula, source, inputs, and how one number reaches tokens.

A row names its inputs as tensors of the flow, which hold the shapes. What a name computes is code of the loop; a test
holds that both know the same names.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files

from flowledger.flow.errors import BadInput, folded, nearest

# What an algorithm is -> (English, Chinese, the setting that chooses it by name; none where there is only one).
WHATS: dict[str, tuple[str, str, str | None]] = {
    "advantage": ("advantage estimator", "advantage 估计器", "algorithm.advantage"),
    "policy_loss": ("policy loss", "策略 loss", "algorithm.policy_loss"),
    "aggregation": ("aggregation of token losses", "token loss 的聚合方式", "algorithm.loss_aggregation"),
    "kl_form": ("estimator of the KL to the reference", "相对参考策略的 KL 估计形式", "algorithm.kl_form"),
    "kl_control": ("control of the KL coefficient", "KL 系数的控制", "algorithm.kl_control"),
    "importance": (
        "importance weights for rollout's policy", "针对 rollout 策略的重要性权重", "algorithm.rollout_correction.importance",
    ),
    "rejection": (
        "rejection of what trainer and rollout disagree on", "拒绝训练与 rollout 分歧过大的部分",
        "algorithm.rollout_correction.rejections",
    ),
    "value_loss": ("loss of the critic", "critic 的 loss", None),
    "entropy": ("entropy term of the loss", "loss 中的熵项", None),
}  # fmt: skip

# What one number of it belongs to -> (English, Chinese).
GRAINS: dict[str, tuple[str, str]] = {
    "sample": ("per sample: one number from the reward of a whole response", "按样本：由整条 response 的 reward 得到一个数"),
    "sequence": ("per sequence: the tokens of a response go into one number, which they share", "按序列：一条 response 的 token 合成一个数，由它们共享"),
    "token": ("per token: each has its own", "按 token：每个 token 各有一个"),
}  # fmt: skip

# What an algorithm needs beside rewards and log-probs -> (English, Chinese): the setting that supplies it, or who does.
NEEDS: dict[str, tuple[str, str]] = {
    "critic": ("the section `critic:`", "配置中的 `critic:` 一节"),
    "group": ("at least 2 samples per prompt (rollout.samples_per_prompt) to have any effect", "每个 prompt 至少 2 个样本（rollout.samples_per_prompt）才有效果"),
    "baseline": ("the reward of a greedy response to each prompt, which the loop samples and scores", "每个 prompt 的贪心 response 的 reward，由循环采样并打分"),
    "ref": ("the section `ref:`", "配置中的 `ref:` 一节"),
    "sum_pi_squared": ("the sum of squared probabilities over the vocabulary, of the old_log_prob pass", "old_log_prob 前向给出的词表概率平方和"),
    "rollout_log_prob": ("log-probs of the rollout (rollout.log_probs)", "rollout 的 log-prob（rollout.log_probs）"),
    "old_log_prob": ("old log-probs before the update, a pass of its own", "更新之前的旧 log-prob，需单独一次前向"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One algorithm."""

    what: str  # one of WHATS
    name: str
    formula: str  # one line
    formula_zh: str = ""  # where words stand in it
    source: str  # paper and arXiv number, or where else it is defined
    grain: str  # one of GRAINS: what one number of it belongs to
    inputs: tuple[str, ...]  # tensors of the flow
    to_tokens: str  # how its number reaches the tokens, or becomes the loss
    to_tokens_zh: str
    purpose: str
    purpose_zh: str
    bug: str  # the common one that goes with it
    bug_zh: str
    needs: frozenset[str] = frozenset()  # of NEEDS
    settings: tuple[str, ...] = ()  # dotted keys of the configuration that change its result
    surprise: str | None = None  # what a user would not expect, above all where verl's behaviour is kept
    surprise_zh: str | None = None
    aliases: tuple[str, ...] = ()


@cache
def algorithms() -> Mapping[tuple[str, str], Method]:
    """Every algorithm by (what, name), in the order of the table."""
    text = files("flowledger.tables").joinpath("algorithms.toml").read_text(encoding="utf-8")
    rows = [_row(raw) for raw in tomllib.loads(text)["algorithm"]]
    return {(row.what, row.name): row for row in rows}


def names(what: str) -> tuple[str, ...]:
    """The names of all algorithms of one sort, without aliases."""
    return tuple(row.name for row in algorithms().values() if row.what == what)


def find(word: str) -> tuple[Method, ...]:
    """Every algorithm of that name or alias, e.g. `gpg`, which is an estimator and a loss; none where it is unknown."""
    return tuple(row for row in algorithms().values() if word == row.name or word in row.aliases)


def meant(setting: str, word: str) -> str | None:
    """The value of a setting for a name that the field has for it (`tis`: `token`, `PPO`: `gae`), spelt anyhow."""
    mine = [row for row in algorithms().values() if WHATS[row.what][2] == setting]
    return next((row.name for row in mine if folded(word) in map(folded, (row.name, *row.aliases))), None)


def method(what: str, name: str) -> Method:
    """One algorithm by its sort and its name or alias. Raises BadInput with the nearest name of that sort."""
    found = next((row for row in find(name) if row.what == what), None)
    if found is None:
        known = names(what)
        hint = nearest(name, known) or f"; known are {', '.join(known)}"
        raise BadInput(f"no {WHATS[what][0]} is called {name!r}{hint}")
    return found


def needs_of(what: str, name: str) -> frozenset[str]:
    """What an algorithm needs, words of NEEDS. Raises BadInput with the nearest name."""
    return method(what, name).needs


def _row(raw: dict[str, object]) -> Method:
    _check_columns(raw)
    columns = dict(raw)
    for listed in ("inputs", "settings", "aliases"):
        columns[listed] = tuple(columns.get(listed, ()))  # type: ignore[arg-type]  # TOML, checked below
    columns["needs"] = frozenset(columns.get("needs", ()))  # type: ignore[call-overload]
    row = Method(**columns)  # type: ignore[arg-type]
    if row.what not in WHATS or row.grain not in GRAINS or not row.needs <= NEEDS.keys():
        raise AssertionError(
            f"algorithms.toml: {row.name}: what {row.what!r}, grain {row.grain!r}, needs {set(row.needs)}"
        )
    return row


def _check_columns(raw: Mapping[str, object]) -> None:
    """Raises BadInput that names the row and the columns which it lacks, or has and should not."""
    required = [one.name for one in fields(Method) if one.default is MISSING and one.default_factory is MISSING]
    known = [one.name for one in fields(Method)]
    lacking = [name for name in required if name not in raw]
    strange = [name for name in raw if name not in known]
    if lacking or strange:
        said = [f"lacks {', '.join(lacking)}"] if lacking else []
        said += [f"has the unknown column {name!r}{nearest(name, known)}" for name in strange]
        raise BadInput(f"algorithms.toml: the row {raw.get('name', '?')!r} {' and '.join(said)}")
