"""Configurations for the tests of rules: a framework's own dictionary, and as much of a RunConfig as it implies."""

import json
from pathlib import Path
from typing import Any

from flowledger.config.schema import RunConfig
from flowledger.tables.models import Architecture

DATA = Path(__file__).parents[1] / "data" / "rules"
DEFAULTS = json.loads((DATA / "verl_defaults.json").read_text(encoding="utf-8"))
SCRIPTS = json.loads((DATA / "verl_scripts.json").read_text(encoding="utf-8"))["cases"]
REPORTS = json.loads((DATA / "verl_reports.json").read_text(encoding="utf-8"))["reports"]


def verl(
    settings: dict[str, Any], *, engine: str = "fsdp", module: str = "verl.trainer.main_ppo", version: str = "head"
) -> RunConfig:
    """verl's defaults with these settings over them."""
    raw = {**DEFAULTS[engine], **settings, "_verl.module": module, "_verl.version": version}
    return foreign("verl", raw, version=version)


def foreign(framework: str, raw: dict[str, Any], *, version: str | None = None, **sections: Any) -> RunConfig:
    data = {"path": "train.parquet", **sections.pop("data", {})}
    return RunConfig.model_validate(
        {"framework": framework, "framework_version": version, "raw": raw, "data": data, **sections}
    )


def model(**sizes: Any) -> Architecture:
    """A model of Qwen2.5-7B's shape, with some sizes changed."""
    shape = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn": 18944, "vocab": 152064}
    return Architecture(name="model", max_positions=32768, **{**shape, **sizes})
