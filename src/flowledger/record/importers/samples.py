"""Dumps of samples: verl's rollout and validation data, AReaL's trajectories, NeMo-RL's batches, TRL's completions.

Lengths, rewards and groups of every sample are kept; the text, or the tokens, of the first few of a step.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import Row, SampleRow, TokenRow
from flowledger.record.importers import figures, jsons
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.tables import fits_parquet, parquet_rows

SHOWN = 16  # samples of a step whose text or tokens are kept
LONGEST_TEXT = 20_000  # characters of a prompt or a response that are kept
MOST_TOKENS = 8_192  # of one sample
MOST_PROMPTS = 200_000  # of one step that are told apart
VALIDATION = re.compile(r"(?:^|[/_\-.])(?:val|valid|validation|eval)(?:$|[/_\-.])", re.IGNORECASE)
NUMBER = re.compile(r"(\d{1,12})(?!.*\d)")

# What dumps call the same thing, the first that is there.
PROMPT, RESPONSE = ("input", "prompt"), ("output", "completion", "response")
REWARD, STEP = ("score", "reward", "rewards"), ("step", "global_step")
NO_REWARD = frozenset({
    "step", "idx", "index", "epoch", "num_turns", "seqlen", "prompt_len", "head_version", "tail_version", "sample_idx", "seed",
    "input_lengths", "sample_loss_mask", "advantages", "advantage", "task_id", "uid", "request_id", "global_step",
})  # fmt: skip


def fits_verl(source: Source) -> bool:
    return jsons.is_lines(source.head) and {"input", "output", "score"} <= jsons.first_keys(source.head)


def fits_areal(source: Source) -> bool:
    return jsons.is_lines(source.head) and {"prompt", "completion", "head_version"} <= jsons.first_keys(source.head)


def fits_nemo(source: Source) -> bool:
    keys = jsons.first_keys(source.head) if jsons.is_lines(source.head) else set()
    return {"rewards", "input_lengths"} <= keys or {"token_ids", "token_loss_mask"} <= keys


def fits_trl(source: Source) -> bool:
    """A Parquet file with prompts and completions of a step."""
    if not fits_parquet(source):
        return False
    try:
        return {"prompt", "completion", "step"} <= set(parquet_rows(source)[0])
    except BadInput:
        return False  # a damaged one; who reads it says so


def read_verl(source: Source, notes: Notes) -> Iterator[Row]:
    """`{"input", "output", "gts", "score", "step", …}`; what else is a number counts as a part of the reward."""
    notes.of("verl")
    yield from _rows((found for _, found in jsons.objects(source, notes)), Dump(source, notes))


def read_areal(source: Source, notes: Notes) -> Iterator[Row]:
    """One file a task, under the version of the weights that the last token came from."""
    notes.of("areal")
    notes.remark("AReaL's dumps name versions of the weights and no steps: the version stands for the step")
    yield from _rows((found for _, found in jsons.objects(source, notes)), Dump(source, notes, group=source.path.stem))


def read_nemo(source: Source, notes: Notes) -> Iterator[Row]:
    """`train_data_step12.jsonl`: tokens, log-probs and advantages of each sample."""
    notes.of("nemo_rl")
    yield from _rows((found for _, found in jsons.objects(source, notes)), Dump(source, notes))


def read_trl(source: Source, notes: Notes) -> Iterator[Row]:
    """`completions_00012.parquet`: a column for each reward function."""
    notes.of("trl")
    yield from _rows(parquet_rows(source)[1], Dump(source, notes))


@dataclass(slots=True)
class Dump:
    """One file of samples while it is read."""

    source: Source
    notes: Notes
    group: str | None = None
    step: int | None = None
    count: int = 0
    prompts: dict[int, int] = field(default_factory=dict)

    @property
    def validation(self) -> bool:
        """Whether the samples are of a validation, by the names of the file and of the directory it was found in."""
        return (
            VALIDATION.search(str(self.source.inside)) is not None
            or VALIDATION.search(self.source.path.parent.name) is not None
        )

    def number(self, row: Mapping[str, Any]) -> int | None:
        """The step, of the row or of the file's name."""
        stated = next((figures.step(row[key]) for key in (*STEP, "tail_version") if key in row), None)
        if stated is None and (found := NUMBER.search(self.source.path.stem)) is not None:
            stated = int(found[1])
        return stated

    def of(self, step: int | None) -> int:
        """The place of the next sample in its step."""
        if step != self.step:
            self.step, self.count, self.prompts = step, 0, {}
        self.count += 1
        return self.count - 1

    def group_of(self, row: Mapping[str, Any], prompt: str | None) -> str | None:
        """Samples of one prompt: by verl's uid (`prompt_session_index`), else by the prompt's text within the step."""
        if self.group is not None:
            return self.group
        if isinstance(uid := row.get("uid"), str) and uid:
            return uid.rsplit("_", 2)[0] if uid.count("_") >= 2 else uid
        if prompt is None:
            return None
        known = self.prompts.get(hash(prompt))
        if known is None:
            if len(self.prompts) >= MOST_PROMPTS:
                return None
            known = self.prompts[hash(prompt)] = len(self.prompts)
        return f"{'val-' if self.validation else ''}{self.step}-g{known}"


def _rows(found: Iterable[Mapping[str, Any]], dump: Dump) -> Iterator[Row]:
    validation = dump.validation
    if validation:
        dump.notes.remark(
            "samples of a validation have ids that begin with val- and no step, so that no step counts them"
        )
    for row in found:
        step = dump.number(row)
        at = dump.of(step)
        prompt, response = _text(row, PROMPT), _text(row, RESPONSE)
        name = f"{'val-' if validation else ''}{'' if step is None else f'{step}-'}{dump.group + '-' if dump.group else ''}{at}"
        reward, parts = _rewards(row, name, dump.notes)
        where = None if validation else step
        yield SampleRow(
            sample_id=name, group_id=dump.group_of(row, prompt), step=where, stage="validate" if validation else "reward",
            reward=reward, rewards=parts or None, advantage=_advantage(row), **_lengths(row),
        )  # fmt: skip
        if at < SHOWN:
            yield from _tokens(row, name, where) if "token_ids" in row else _texts(name, where, prompt, response)


def _texts(name: str, step: int | None, prompt: str | None, response: str | None) -> Iterator[TokenRow]:
    """The prompt and the response, each as one piece of text."""
    for position, text in enumerate((prompt, response)):
        if text is not None:
            yield TokenRow(sample_id=name, position=position, step=step, text=text[:LONGEST_TEXT])


def _tokens(row: Mapping[str, Any], name: str, step: int | None) -> Iterator[TokenRow]:
    """NeMo-RL's sequences, token by token: a log-prob stands at the token that it is of, and counts where it was sampled."""
    ids, masks = row.get("token_ids"), row.get("token_loss_mask")
    if not isinstance(ids, list):
        return
    columns = {"rollout_log_prob": "generation_logprobs", "old_log_prob": "prev_logprobs", "advantage": "advantages"}
    lists = {own: row[theirs] for own, theirs in columns.items() if isinstance(row.get(theirs), list)}
    length = min(len(ids), _whole(row.get("input_lengths")) or len(ids), MOST_TOKENS)
    for position in range(length):
        mask = _at(masks, position)
        told: dict[str, Any] = {own: _at(values, position) for own, values in lists.items()} if mask else {}
        yield TokenRow(
            sample_id=name, position=position, step=step, token_id=_whole(ids[position]), attention_mask=1,
            response_mask=None if mask is None else int(mask), loss_mask=None if mask is None else int(mask), **told,
        )  # fmt: skip


def _at(values: Any, position: int) -> float | None:
    """One number of a list; None where there is none."""
    found = figures.finite(values[position]) if isinstance(values, list) and position < len(values) else None
    return found if found is not None and math.isfinite(found) else None


def _lengths(row: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of the prompt and of the response, and versions, where a dump says them."""
    told: dict[str, Any] = {}
    whole, prompt = _whole(row.get("seqlen")), _whole(row.get("prompt_len"))
    if isinstance(mask := row.get("token_loss_mask"), list):
        whole = _whole(row.get("input_lengths")) or len(mask)
        trained = [place for place, one in enumerate(mask[:whole]) if one]
        prompt = trained[0] if trained else None
    if prompt is not None:
        told["prompt_length"] = prompt
        if whole is not None and whole >= prompt:
            told["response_length"] = whole - prompt
    versions = [one for key in ("head_version", "tail_version") if (one := _whole(row.get(key))) is not None]
    return told | ({"versions": versions} if versions else {})


def _rewards(row: Mapping[str, Any], name: str, notes: Notes) -> tuple[float | None, dict[str, float | None]]:
    """(the reward, its parts): every other number of the row that is not known to be something else.

    A reward that is told and is no finite number (JSON has no nan) stays among the parts, without a value, and is noted.
    """
    parts: dict[str, float | None] = {}
    for key, value in row.items():
        if key in NO_REWARD or isinstance(value, list | dict) or (isinstance(value, str) and key not in REWARD):
            continue
        told = figures.of_text(value) if isinstance(value, str) else figures.finite(value)
        if told is not None and math.isfinite(told):
            parts[key] = told
        elif key in REWARD or isinstance(value, int | float):
            parts[key] = None
            if key in REWARD:
                notes.odd_reward(_odd(value, told), f"sample {name}: {key} = {str(value)[:60]}")
            else:  # TRL has nan where a reward function does not apply
                notes.odd_part(key, name)
    reward = next((parts[key] for key in REWARD if parts.get(key) is not None), None)
    others = {key: told for key, told in parts.items() if key not in REWARD or told is None}
    if (
        reward is None and not parts.keys() & set(REWARD) and len(others) == 1
    ):  # of several parts nobody says the weights
        reward = next(iter(others.values()))
    return reward, others


def _odd(value: Any, told: float | None) -> str:
    """What stands in place of a number, in a word."""
    if told is not None:
        return "nan" if math.isnan(told) else "inf" if told > 0 else "-inf"
    return "nothing" if value is None else "text" if isinstance(value, str) else "a number too large for a float"


def _advantage(row: Mapping[str, Any]) -> float | None:
    found = row.get("advantage", row.get("advantages"))
    if isinstance(found, list):
        masks = row.get("token_loss_mask")
        kept = [one for one, mask in zip(found, masks, strict=False) if mask] if isinstance(masks, list) else found
        found = kept[0] if kept else None
    return told if (told := figures.finite(found)) is not None and math.isfinite(told) else None


def _text(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """A prompt or a response: text, or messages of a chat, one after the other."""
    found = next((row[name] for name in names if name in row), None)
    if isinstance(found, list):
        parts = [str(one.get("content")) if isinstance(one, dict) else str(one) for one in found]
        return "\n".join(parts)
    return found if isinstance(found, str) else None


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 1 << 60 else None
