"""Prompts: whole in the sequence that is trained, and the same for all samples of a group."""

from collections.abc import Iterator

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.sequences import TOKENS, Told, Trace, told
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

LENGTHS = "the sequence holds the tokens of its prompt and of its response"
GROUPS = "the samples of a group answer the same prompt, and are as many as asked for"


def check(ledger: Ledger) -> list[FindingRow]:
    """`prompt_cut` and `group_mixed`."""
    data = told(ledger)
    seen = [one for one in data.sequences if one.has("attention_mask")]
    grouped = [one for one in data.samples.values() if one.group_id is not None]
    return [
        answer(
            "prompt_cut", LENGTHS, seen=len(seen), breaches=[b for one in seen for b in _lengths(one, data)],
            needs=() if seen else (TOKENS,), cause="a prompt that was cut a second time, or padding that counts as tokens",
            next_step="compare prompt_ids with the first columns of full_sequence",
        ),
        answer(
            "group_mixed", GROUPS, seen=len(grouped), breaches=[*_mixed(data), *_sizes(data)],
            needs=() if grouped else ("group ids of samples: record.level = tensors",),
            cause="group ids that are tiled (0 1 2 0 1 2) where they should be repeated (0 0 1 1 2 2) look like this",
            next_step="print sample_id, group_id and the prompt of one step",
        ),
    ]  # fmt: skip


def _lengths(one: Trace, data: Told) -> Iterator[Breach]:
    sample = data.samples.get((one.step, one.sample_id))
    if sample is None or sample.prompt_length is None or sample.response_length is None:
        return
    there, due = sum(1 for on in one["attention_mask"] if on), sample.prompt_length + sample.response_length
    if there != due:
        yield Breach(
            step=one.step, stage="rollout",
            text=f"sample {one.sample_id} has {there} tokens, its prompt {sample.prompt_length} and its response {sample.response_length}",
        )  # fmt: skip


def _mixed(data: Told) -> Iterator[Breach]:
    """Groups with two prompts: by their tokens where those are recorded, by their lengths elsewhere."""
    prompts: dict[tuple[int, str], dict[tuple[int, ...], str]] = {}
    for one in data.sequences:
        sample = data.samples.get((one.step, one.sample_id))
        if sample is None or sample.group_id is None or sample.prompt_length is None:
            continue
        tokens = [token for token, on in zip(one["token_id"], one["attention_mask"], strict=True) if on]
        if None not in tokens[: sample.prompt_length]:
            known = prompts.setdefault((one.step, sample.group_id), {})
            known.setdefault(tuple(tokens[: sample.prompt_length]), one.sample_id)
    lengths: dict[tuple[int, str], dict[int, str]] = {}
    for sample in data.samples.values():
        if sample.group_id is not None and sample.prompt_length is not None:
            lengths.setdefault((sample.step, sample.group_id), {}).setdefault(sample.prompt_length, sample.sample_id)
    for of, what in ((prompts, "different prompts"), (lengths, "prompts of different lengths")):
        for (step, group), found in of.items():
            if len(found) > 1:
                first, second, *_ = found.values()
                yield Breach(
                    step=step, stage="prompt", text=f"samples {first} and {second} of group {group} have {what}"
                )


def _sizes(data: Told) -> Iterator[Breach]:
    """Groups of another size than the configuration's; only of our own loop, others may filter and fill up."""
    asked = data.setting("rollout.samples_per_prompt")
    if not data.ours or asked is None:
        return
    sizes: dict[tuple[int, str], int] = {}
    for sample in data.samples.values():
        if sample.group_id is not None:
            sizes[sample.step, sample.group_id] = sizes.get((sample.step, sample.group_id), 0) + 1
    for (step, group), size in sizes.items():
        if size != asked:
            yield Breach(
                step=step,
                stage="prompt",
                text=f"group {group} has {size} samples, rollout.samples_per_prompt is {asked}",
            )
