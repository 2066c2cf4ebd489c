"""The layout of a run or a plan, as its ledger tells it: mesh, layers, heads, experts, who trained on which sample."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowledger.flow.axes import DEGREES
from flowledger.flow.errors import BadInput
from flowledger.flow.layout import Asked, Layout, find
from flowledger.flow.mesh import Mesh, mesh
from flowledger.flow.slices import Slices
from flowledger.ledger import layout as manifest_layout
from flowledger.ledger.layout import OWN_LOOP
from flowledger.ledger.reader import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One sample of a step: where it went through the first epoch of the update, and how long it is."""

    micro_batch: tuple[int, int, int]  # dp rank, mini-batch, micro-batch
    group: str | None
    prompt: int
    response: int


def layout(ledger: Ledger, trained: Mapping[int, Trained]) -> Layout:
    """What the manifest says of the job, with the samples as they were dealt; without a recording, chunks of the batch."""
    manifest = ledger.directory.manifest
    made = manifest_layout.layout(manifest.config, ledger.mesh, manifest.bindings)
    return replace(made, dealt={sample: one.micro_batch[0] for sample, one in trained.items()})


# Framework -> its setting (as its own files name it) that deals samples to dp ranks by length.
BALANCES = {"verl": "trainer.balance_batch", "slime": "balance_data"}
# What else is no chunk. Source: slime/ray/rollout.py `_split_train_data_by_dp`: rank i of dp gets range(i, samples, dp).
IN_TURN = {
    "slime": "planned as chunks: without balance_data slime deals samples in turn, so another dp rank may train it"
}


def dealing(ledger: Ledger) -> str | None:
    """The caveat of a plan, which deals chunks: who trains on a sample once they are balanced. None where they are not."""
    config = ledger.directory.manifest.config
    framework = config.get("framework", OWN_LOOP)
    key = BALANCES.get(framework)
    if mesh_of(ledger).degree("dp") == 1 or not (framework == OWN_LOOP or key):
        return None
    if key and not (config.get("raw") or {}).get(key):
        return IN_TURN.get(framework)
    who = f"with {key}" if key else "flowledger deals samples to dp ranks by length, so"
    return f"before balancing: {who} any dp rank may train it"


def mesh_of(ledger: Ledger) -> Mesh:
    """The mesh that trains."""
    return mesh(**{axis: degree for axis, degree in ledger.mesh.items() if axis in DEGREES})


def trained(ledger: Ledger, step: int | None) -> dict[int, Trained]:
    """Sample -> its way through the update of a step (None: the last that has one), in the order of the rows."""
    on = mesh_of(ledger)
    rows = ledger.rows(
        "SELECT r.sample_id, r.trained, m.group_id, m.prompt_length, m.response_length FROM samples r "
        "JOIN samples_merged m USING (source, sample_id, attempt, step) WHERE r.trained IS NOT NULL AND r.step = "
        "coalesce(?, (SELECT max(step) FROM samples WHERE trained IS NOT NULL)) ORDER BY r.process, r.seq",
        [step],
    )
    found: dict[int, Trained] = {}
    for row in rows:
        first = min(row["trained"], key=lambda one: (one["epoch"], one["mini_batch"]))
        if str(row["sample_id"]).isdigit():
            found.setdefault(
                int(row["sample_id"]),
                Trained(
                    micro_batch=(on.at(first["rank"], "dp"), first["mini_batch"], first["micro_batch"]),
                    group=row["group_id"], prompt=row["prompt_length"] or 0, response=row["response_length"] or 0,
                ),
            )  # fmt: skip
    return found


def step_of(ledger: Ledger, sample: int | None, step: int | None) -> int | None:
    """The step whose samples are asked about: `step`, else the last that trained on this sample, or on any (None: none did).

    Raises BadInput, with the steps that trained on the sample, where the one that is asked about did not.
    """
    rows = ledger.rows("SELECT DISTINCT step, sample_id FROM samples WHERE trained IS NOT NULL AND step IS NOT NULL")
    last = max((row["step"] for row in rows), default=None)
    steps = sorted({row["step"] for row in rows if row["sample_id"] == str(sample)})
    asked = step if step is not None else steps[-1] if steps else last
    there = sorted(int(row["sample_id"]) for row in rows if row["step"] == asked and str(row["sample_id"]).isdigit())
    if sample is None or not there or asked in steps:
        return asked
    in_step = "the last step" if step is None else f"step {step}"
    elsewhere = f"; it was in step {', '.join(map(str, steps))}: use --step {steps[-1]}" if steps else ""
    raise BadInput(f"sample {sample} was not trained on; {there[0]} to {there[-1]} were, in {in_step}{elsewhere}")


def assumed(ledger: Ledger, made: Layout, sample: int) -> dict[int, Trained]:
    """What a plan takes for the samples of one dp rank: each at its greatest length, dealt in chunks, micro-batches in a row."""
    manifest = ledger.directory.manifest
    size, dp = manifest.bindings, made.on.degree("dp")
    if manifest.level != "plan" or not {"B", "B_mini", "B_micro", "S_prompt", "S_resp"} <= size.keys():
        return {}
    # only this loop packs a prompt once for its samples; of a group each dp rank has some (plan/load.py)
    own = manifest.config.get("framework", OWN_LOOP) == OWN_LOOP
    at = find(made, Asked(sample=sample))[0].ranks[0]
    mini, micro = max(1, size["B_mini"] // dp), max(1, size["B_micro"] // dp)
    return {
        one: Trained(
            micro_batch=(made.on.at(at, "dp"), place // mini, place % mini // micro),
            group=str(place // max(1, size.get("G", 1) // dp)) if own else None, prompt=size["S_prompt"], response=size["S_resp"],
        )
        for place, one in enumerate(made.samples_of(at))
    }  # fmt: skip


def assumption(samples: Mapping[int, Trained], sample: int) -> str:
    """The line that says so."""
    mine = samples[sample]
    row = sum(one.micro_batch == mine.micro_batch for one in samples.values())
    return (
        f"planned: every sample at its limit of {mine.prompt + mine.response:,} tokens, micro-batches of {row} in a row; "
        "a run's are shorter"
    )


def row_of(ledger: Ledger, samples: Mapping[int, Trained], sample: int, token: int) -> tuple[Slices, int, int]:
    """(the packed row that a token went through the update in, the place of its sample there, the token's place in that).

    Where neighbours share a prompt, its tokens belong to the first of them. Raises BadInput for a token not there, and
    where no sample was recorded. `samples` has this one where it has any.
    """
    if not samples:
        raise BadInput(f"--token {token}: no sample was recorded here, so where tokens went is not known")
    mine, config = samples[sample], ledger.directory.manifest.config
    if not 0 <= token < mine.prompt + mine.response:
        raise BadInput(f"token {token} is not there; sample {sample} has 0 to {mine.prompt + mine.response - 1}")
    on = mesh_of(ledger)
    actor = config.get("actor") or {}
    shares = bool(actor.get("shared_prompts", True)) and on.degree("cp") == 1
    tp = on.degree("tp") if (actor.get("engine") or {}).get("sequence_parallel") else 1
    beside = {one.micro_batch for one in samples.values() if one.micro_batch[:2] == mine.micro_batch[:2]}
    rows = {at: _row(samples, at, shares=shares) for at in beside}
    row = rows[mine.micro_batch]
    longest = max(
        Slices(lengths=tuple(one.values()), cp=on.degree("cp"), sp=on.degree("sp"), tp=tp).tokens
        for one in rows.values()
    )
    slices = Slices(lengths=tuple(row.values()), at_least=longest if on.degree("pp") > 1 else 0)
    holder = sample
    if shares and token < mine.prompt:
        holder = _leader(samples, list(row), sample)
    elif row[sample] < mine.prompt + mine.response:
        token -= mine.prompt
    return slices, list(row).index(holder), token


def _row(samples: Mapping[int, Trained], at: tuple[int, int, int], *, shares: bool) -> dict[int, int]:
    """Sample -> tokens that it has of its own in the packed row of a micro-batch."""
    found: dict[int, int] = {}
    before: Trained | None = None
    for sample, one in samples.items():
        if one.micro_batch == at:
            shared = shares and before is not None and before.group is not None and one.group == before.group
            found[sample] = one.response + (0 if shared else one.prompt)
            before = one
    return found


def _leader(samples: Mapping[int, Trained], row: list[int], sample: int) -> int:
    """The first of the neighbours in a row that share a sample's prompt."""
    place = row.index(sample)
    while (
        place and samples[row[place - 1]].group is not None and samples[row[place - 1]].group == samples[sample].group
    ):
        place -= 1
    return row[place]
