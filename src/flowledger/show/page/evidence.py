"""Where a finding is looked at: the view that shows its evidence, and what is asked of that view. A table, first match wins."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flowledger.flow.tensors import tensors
from flowledger.tables.metrics import find as find_metric

Finding = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A view. `carries`: columns of the finding that go into the link; `names`: word of the link -> tensor or metric, read from the words."""

    view: str
    carries: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)


SHAPES = Place("shapes", ("stage",), {"find": "tensor"})
MISFITS = Place("shapes", ("stage",), {"find": "tensor"}, {"mismatch": "1"})
APART = Place("shapes", more={"mismatch": "1"})
MEMORY = Place("memory", ("stage", "rank", "step"))
LIFETIMES = Place("lifetimes", ("step",), {"tensor": "tensor"})
TOKENS = Place("mesh", ("step",), more={"heat": "tokens"})
TIMES = Place("mesh", ("step",), more={"heat": "seconds"})
GANTT = Place("signals", ("step",))
SAMPLE = Place("sample", ("sample", "step"))
METRIC = Place("signals", ("step",), {"find": "metric"})

# What is matched is `scope/order/id`.
EVIDENCE: tuple[tuple[str, Place], ...] = (
    (r"/plan_(agrees|differs)$", APART),
    (r"/(mask_shape|mask_does_not_broadcast)$", MISFITS),
    (r"/(shape_checksum|shapes_conserved|observed_differs_from_configuration)$|/shape_mismatch/", SHAPES),
    (r"/(lifetimes_close|held_beyond_lifetime|tensors_leak|gradients_kept|kv_cache_kept|graph_retained|weights_copied)$", LIFETIMES),
    (r"memory|/oom|out_of_memory|fragmentation", MEMORY),
    (r"/(load_imbalance_tokens|samples_dealt_unevenly|unequal_micro_batches|micro_batches_too_small|one_long_sample)$", TOKENS),
    (r"/(load_imbalance_time|rank_silent)$|/imbalance/", TIMES),
    (r"/hang/|/(hang|rank_died|slow_stage|slots_idle|checkpoints_too_slow|step_repeated|call_failed|exception|crash)$", GANTT),
    (r"/laws/(masks_nest|tokens_conserved|identities)|/(content_\w+|\w+_mask_wrong|positions_wrong|finish_reason_wrong)$", SAMPLE),
    (r"/(advantages_wrong|ratio_wrong|loss_wrong|normaliser_wrong|kl_wrong|loss_terms_wrong|returns_too_large)$", SAMPLE),
    (r"/(reward_misplaced|reward_sum_wrong|group_mixed|ids_reused|prompt_cut|responses_\w+|rewards_not_numbers)$", SAMPLE),
    (r"/alarms/|/(metrics_agree|rows_dropped)$|/(checks|instability|data_quality)/", METRIC),
)  # fmt: skip


def evidence_of(finding: Finding) -> dict[str, Any] | None:
    """The link to what shows a finding: `view` and `asked`; None for what no view shows, such as a rule of a configuration."""
    place = _place(finding)
    if place is None:
        return None
    texts = [str(finding.get("message") or ""), *map(str, finding.get("evidence") or ())]
    asked = {name: value for name in place.carries if (value := _carried(name, finding, texts)) is not None}
    asked |= {word: found for word, what in place.names.items() if (found := SEARCHES[what](texts))}
    return {"view": place.view, "asked": {**asked, **place.more}}


def _place(finding: Finding) -> Place | None:
    if "OutOfMemory" in str(finding.get("message") or ""):
        return MEMORY
    told = f"{finding.get('scope') or ''}/{finding.get('order') or ''}/{finding['id']}"
    return next((place for pattern, place in EVIDENCE if re.search(pattern, told)), None)


def _carried(name: str, finding: Finding, texts: Iterable[str]) -> str | None:
    """A column of the finding; a rank or sample that only its words name is read from them."""
    if finding.get(name) is not None:
        return str(finding[name])
    if name not in WORDED:
        return None
    return next((found[1] for text in texts if (found := WORDED[name].search(text))), None)


WORDED = {"sample": re.compile(r"\bsample (\d[\w.-]*)"), "rank": re.compile(r"\brank (\d+)")}


def _tensor(texts: Iterable[str]) -> str | None:
    """The first tensor of the flow that the words name."""
    return next((found[0] for text in texts if (found := _tensors().search(text))), None)


@cache
def _tensors() -> re.Pattern[str]:
    names = sorted(tensors(), key=len, reverse=True)
    return re.compile(rf"(?<![\w/])({'|'.join(map(re.escape, names))})(?![\w/])")


def _metric(texts: Iterable[str]) -> str | None:
    """The first metric that the words give a number of: `step 2: grad_norm = 31.4`."""
    named = (name for text in texts for name in NUMBER.findall(text))
    return next((name for name in named if find_metric(name)), None)


NUMBER = re.compile(r"([a-z_]\w*(?:/\w+)*)(?: a step before)? (?:=|is|was) ")
SEARCHES = {"tensor": _tensor, "metric": _metric}
