"""Settings of an algorithm that was not chosen: set to something else than their default, and read by nobody."""

from collections.abc import Sequence
from operator import attrgetter

from flowledger.config.algorithm import Algorithm
from flowledger.config.schema import RunConfig
from flowledger.ledger.rows import FindingRow
from flowledger.tables.algorithms import WHATS, Method, algorithms, method

SECTION = "algorithm."
WORDS = {
    "en": {"with": "{key} = {value} has no effect with {chosen}: {readers} read it", "and": " and ", "join": ", ",
           "ref": "{key} = {value} has no effect without a reference policy; add `ref: {{path: start}}`"},
    "zh": {"with": "{key} = {value} 在 {chosen} 时不起作用：读取它的是 {readers}", "and": "、", "join": "、",
           "ref": "{key} = {value} 在没有参考策略时不起作用；请加 `ref: {{path: start}}`"},
}  # fmt: skip


def unread(config: RunConfig, said: Sequence[FindingRow], language: str) -> list[FindingRow]:
    """A warning for each setting of `algorithm:` without effect, except those of which a row of `said` warns already."""
    read = {key for row in chosen(config) for key in row.settings}
    warned = [row.message for row in said if row.verdict == "warn"]
    return [
        _row(key, config, language)
        for key in _keys(config)
        if key not in read and _moved(key, config) and not any(key in message for message in warned)
    ]


def chosen(config: RunConfig) -> tuple[Method, ...]:
    """The rows of the table that this run uses."""
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    names = [
        ("advantage", algorithm.advantage), ("policy_loss", algorithm.policy_loss),
        ("aggregation", algorithm.loss_aggregation), ("entropy", "entropy_bonus"),
        *(("rejection", one.kind) for one in correction.rejections),
    ]  # fmt: skip
    if config.ref:
        names += [("kl_form", algorithm.kl_estimator), ("kl_control", algorithm.kl_control)]
    if config.critic:
        names.append(("value_loss", "value_loss"))
    if correction.importance != "none":
        names.append(("importance", correction.importance))
    return tuple(method(what, name) for what, name in names)


def _keys(config: RunConfig) -> list[str]:
    """Every setting of `algorithm:` that some row reads. What chooses a row is none, but for KL without a reference."""
    choosers = {setting for *_, setting in WHATS.values() if setting}
    keys = dict.fromkeys(key for row in algorithms().values() for key in row.settings if key.startswith(SECTION))
    of_kl = [] if config.ref else ["algorithm.kl_form", "algorithm.kl_control"]
    return [*(key for key in keys if key not in choosers), *of_kl]


def _moved(key: str, config: RunConfig) -> bool:
    value = attrgetter(key.removeprefix(SECTION))
    return bool(value(config.algorithm) != value(Algorithm()))


def _row(key: str, config: RunConfig, language: str) -> FindingRow:
    words = WORDS[language]
    value = attrgetter(key)(config)
    readers = [row for row in algorithms().values() if key in row.settings]
    settings = dict.fromkeys(setting for row in readers if (setting := WHATS[row.what][2]))
    form = words["ref"] if key.startswith("algorithm.kl_") and not config.ref and "cov" not in key else words["with"]
    return FindingRow(
        id="flowledger.unread",
        scope="plan",
        verdict="warn",
        severity="warning",
        fires_at="first_update",
        confidence=1.0,
        message=form.format(
            key=key,
            value=str(value).lower() if isinstance(value, bool) else value,
            chosen=words["and"].join(f"{setting} = {attrgetter(setting)(config)}" for setting in settings),
            readers=words["join"].join(dict.fromkeys(row.name for row in readers)),
        ),
        evidence=[f"{key} ({config.source_of(key)})", "source: tables/algorithms.toml"],
    )
