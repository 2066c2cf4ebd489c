"""Reads a report: JSON, JSON lines, YAML, or plain text. Nothing in it is executed; of a long text the two ends are read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flowledger.diagnose.reports.report import Report
from flowledger.flow.errors import BadInput

SETTINGS = 100_000  # characters at either end in which settings are looked for
LONGEST = 2 * 2**20  # characters that are looked at, of a log the first and the last half
TEXT = ("symptom", "description", "error", "traceback", "log", "message", "title", "text")
KNOWN = {"framework", "model", "hardware", "config", "measured", *TEXT}
SETTING = re.compile(r"(?m)(?:^|(?<=[\s{,]))[+-]*['\"]?([A-Za-z_][\w./-]*)['\"]?\s*[=:]\s*([^\s,;}]+)")
END = re.compile(
    r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b|[Ww]atchdog|out of memory|\bnan\b|[Kk]illed|[Tt]imed? ?out"
)
# Characters of a text that is read whole; of a longer one those around its last exception.
SHORT, BEFORE, AFTER = 6000, 3500, 2500
FLAG = re.compile(r"--([A-Za-z][\w.-]+)[= ]+([^\s-][^\s]*)")
FRAMEWORKS = (
    ("NeMo-RL", r"nemo[-_ ]?rl|nemo_rl"), ("OpenRLHF", r"openrlhf"), ("slime", r"\bslime\b"), ("AReaL", r"\bareal\b"),
    ("verl", r"\bverl\b|actor_rollout_ref"), ("TRL", r"\btrl\b|GRPOConfig|GRPOTrainer"), ("ms-swift", r"ms-?swift"),
)  # fmt: skip


def read(path_or_text: str) -> Report:
    """The report in a file, or in the text itself. Raises BadInput for a file that is empty or no text."""
    return report_of(text_of(path_or_text))


def text_of(path_or_text: str) -> str:
    """The text of a file where the words name one, else the words themselves."""
    path = _path(path_or_text)
    if path is None:
        return path_or_text
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LONGEST // 2)
            if size > LONGEST:
                file.seek(size - LONGEST // 2)
            start += file.read(LONGEST // 2)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if b"\0" in start[:4096]:
        raise BadInput(f"{path}: binary, no report; give text, JSON or YAML")
    return start.decode("utf-8", "replace")


def _path(words: str) -> Path | None:
    if "\n" in words or len(words) > 1000:
        return None
    try:
        path = Path(words).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def report_of(text: str) -> Report:
    """Parses a text. Raises BadInput where there is nothing in it."""
    if not text.strip():
        raise BadInput("the report is empty; say what was configured, what happened, and the numbers that were seen")
    tree = _tree(text)
    return of_mapping(tree) if tree is not None and KNOWN & {str(key).casefold() for key in tree} else of_words(text)


def _tree(text: str) -> Mapping[str, Any] | None:
    """The mapping that a text holds: JSON, the first line of JSON lines, YAML; None for prose."""
    start = text.lstrip()
    try:
        if start.startswith("{"):
            found: Any = json.JSONDecoder().raw_decode(start)[0]
        else:
            found = yaml.safe_load(text) if len(text) < 100_000 else None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None


def of_mapping(tree: Mapping[str, Any]) -> Report:
    """A report with named parts; what is no part of it is not read."""
    fold = {str(key).casefold(): value for key, value in tree.items()}
    symptom = _symptom("\n".join(_text(fold[key]) for key in TEXT if fold.get(key)))
    config, measured = fold.get("config"), fold.get("measured")
    return Report(
        framework=_text(fold.get("framework")), model=_text(fold.get("model")), hardware=_text(fold.get("hardware")),
        config=config if isinstance(config, Mapping) else _settings(_text(config)),
        symptom=symptom, measured=measured if isinstance(measured, Mapping) else {},
    )  # fmt: skip


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def of_words(text: str) -> Report:
    """A report in plain words: settings are what looks like `key=value` or `--flag value`."""
    framework = next((name for name, words in FRAMEWORKS if re.search(words, text[:SETTINGS], re.IGNORECASE)), "")
    symptom = _symptom(text)
    config = _settings(text[:SETTINGS] + "\n" + text[SETTINGS:][-SETTINGS:])
    return Report(framework=framework, model=symptom, hardware=symptom, config=config, symptom=symptom)


def _symptom(text: str) -> str:
    """Of a long log what stands around its last exception: its other lines say words of every kind."""
    if len(text) <= SHORT:
        return text
    ends = [match.span() for match in END.finditer(text)]
    start, stop = ends[-1] if ends else (len(text), len(text))
    return text[max(0, start - BEFORE) : stop + AFTER]


def _settings(text: str) -> dict[str, str]:
    found = {key: value for pattern in (SETTING, FLAG) for key, value in pattern.findall(text)}
    return {key: value.strip("\"'`\\") for key, value in found.items()}
