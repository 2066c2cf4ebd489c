"""Whose rows a batch of another framework has: names of samples that are the same in every process that meets them.

A framework names groups (all responses to one prompt), and some name the session of each response too. Where it does not,
what the response says tells it from the others of its group, whichever process looks and in whatever order they lie.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowledger.record import endings
from flowledger.record.jagged import Jagged
from flowledger.record.position import Frame


def take(frame: Frame, fact: str, value: Any) -> None:
    """What a call says of its rows. What can be gone through only once is the call's own, and left to it."""
    if not isinstance(value, Iterator):
        FACTS[fact](frame, _listed(value))


def _listed(values: Any) -> list[Any]:
    """Frameworks have lists, arrays, and stacks of single values (tensordict's).

    Each of these is taken from where it is kept, as far as it can be seen: to ask for it takes a hundred times as long.
    """
    parts = getattr(values, "tensordicts", None)
    if parts is not None and getattr(values, "batch_dims", None) == 1:
        with suppress(AttributeError, KeyError, TypeError):
            return [vars(part)["_non_tensordict"]["data"] for part in parts]
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _groups(frame: Frame, names: list[Any]) -> None:
    frame.groups, frame.sample_ids = [str(name) for name in names], None


def _sessions(frame: Frame, names: list[Any]) -> None:
    frame.sessions = [str(name) for name in names]


def _keys(frame: Frame, keys: list[Any]) -> None:
    """`group_session_part`, as verl calls samples in TransferQueue; a key without these is no sample's."""
    parts = [str(key).rsplit("_", 2) for key in keys]
    if all(len(part) == 3 for part in parts):
        frame.groups = [group for group, _, _ in parts]
        frame.sample_ids = [f"{group}_{session}" for group, session, _ in parts]


def _versions(frame: Frame, versions: list[Any]) -> None:
    frame.columns = (frame.columns or {}) | {"versions": [[int(version)] for version in versions]}


def _tags(frame: Frame, tags: list[Any]) -> None:
    """What verl notes beside the key of each sample, where it notes it."""
    if frame.sample_ids is None or len(tags) != len(frame.sample_ids):
        return
    for column, tag in TAGS.items():
        if all(isinstance(one, Mapping) and one.get(tag) is not None for one in tags):
            frame.columns = (frame.columns or {}) | {column: [int(one[tag]) for one in tags]}
    if tags and isinstance(tags[0], Mapping) and tags[0].get("global_steps") is not None:
        frame.step = int(tags[0]["global_steps"])  # the step whose prompts these answer
    if frame.columns and "versions" in frame.columns:
        frame.columns["versions"] = [[version] for version in frame.columns["versions"]]


TAGS = {"prompt_length": "prompt_len", "response_length": "response_len", "versions": "min_global_steps"}
FACTS: dict[str, Callable[[Frame, list[Any]], None]] = {
    "group_ids": _groups, "sessions": _sessions, "sample_keys": _keys, "versions": _versions, "tags": _tags,
}  # fmt: skip


def identify(frame: Frame, responses: Any) -> None:
    """Name the samples of a call that has named their groups; responses [B, S_resp], on the CPU, padded alike everywhere."""
    if frame.sample_ids is None and frame.groups is not None:
        if frame.sessions is not None and len(frame.sessions) == len(frame.groups):
            frame.sample_ids = [f"{group}_{one}" for group, one in zip(frame.groups, frame.sessions, strict=True)]
        elif responses is not None and len(responses) == len(frame.groups):
            frame.sample_ids = _by_content(frame.groups, responses.numpy().tobytes())


def _by_content(groups: Sequence[str], rows: bytes) -> list[str]:
    """Those of a group that say the same are told apart by their order: to swap them changes nothing.

    rows: what each says, one after another, all of one length.
    """
    width = len(rows) // max(1, len(groups))
    names = [f"{group}_{zlib.crc32(rows[at * width : (at + 1) * width]):08x}" for at, group in enumerate(groups)]
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def columns(
    frame: Frame, values: Mapping[str, Any], ragged: Mapping[str, Jagged], facts: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """What a batch of named samples says of each: its group, its lengths, why it ended and, where it was just scored, its reward.

    values: tensors by name, padded; ragged: those whose rows have their own lengths; facts: what calls have told beside
    them. What lies on a device is not looked at.
    """
    found: dict[str, list[Any]] = {"group_id": list(frame.groups or ())}
    for name, column in LENGTHS.items():
        if name in ragged and ragged[name].lengths:
            found[column] = list(ragged[name].lengths or ())
    mask, prompts = values.get("attention_mask"), values.get("prompt_ids")
    if mask is not None and prompts is not None and mask.is_cpu and len(mask) == len(prompts):
        found["prompt_length"] = mask[:, : prompts.shape[1]].sum(1).tolist()
    found["finish_reason"] = endings.of_batch(values, ragged, facts)
    if frame.stage in ("rollout", "reward"):
        found |= _rewards(values.get("token_level_reward"), ragged.get("token_level_reward"))
    return {column: listed for column, listed in found.items() if len(listed) == len(frame.sample_ids or ())}


LENGTHS = {"prompt_ids": "prompt_length", "response_ids": "response_length"}


def _rewards(padded: Any, own: Jagged | None) -> dict[str, list[Any]]:
    if padded is not None and padded.is_cpu and padded.dim() == 2:
        return {"reward": padded.sum(1).tolist()}
    if own is not None and own.lengths:
        return {"reward": [float(part.sum()) for part in own.values.split(own.lengths)]}
    return {}
