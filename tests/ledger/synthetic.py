"""A small run written by hand: two prompts, two responses each, two steps. Every number in it follows from here.

B_prompt = 2, G = 2, S_prompt = 4, S_resp = 3, H = 8, V = 16, two micro-batches of two samples. All times are made up
and exact: a stage takes as many milliseconds as `STAGE_MS` says, and stages follow each other without a gap.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from flowledger.ledger.directory import Process, create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.rows import (
    MemoryRow,
    MetricRow,
    Row,
    SampleRow,
    SpanRow,
    StorageRow,
    TensorRow,
    TokenRow,
    Trained,
)
from flowledger.ledger.writer import Writer

BINDINGS = {"B_prompt": 2, "G": 2, "B": 4, "S_prompt": 4, "S_resp": 3, "S": 7, "H": 8, "V": 16, "L": 2, "K": 2, "D": 4}
STAGE_MS = {
    "prompt": 1, "rollout": 40, "reward": 4, "filter": 1, "balance": 1, "old_log_prob": 10, "ref_log_prob": 10,
    "advantage": 1, "update_actor": 30, "weight_sync": 2,
}  # fmt: skip
STEP_MS = 100  # the sum of the above
KINDS = {"param": 4000, "grad": 4000, "optimizer": 8000, "activation": 3000, "batch": 500}  # bytes at the peak
PEAK_ALLOCATED, PEAK_RESERVED = 20_000, 25_000  # so the residue is 500 and the fragmentation 0.2
REWARDS = (1.0, 0.0, 1.0, 1.0)
RESPONSE_LENGTHS = (3, 2, 3, 1)
MS = 1_000_000

# stage, phase, tensor, dims, shape, mask, access, bytes per element
ACCESSES: tuple[tuple[str, str | None, str, str, tuple[int, ...], str | None, str, int], ...] = (
    ("prompt", None, "prompt_ids", "B_prompt, S_prompt", (2, 4), "attention_mask", "write", 8),
    ("rollout", None, "prompt_ids", "B_prompt, S_prompt", (2, 4), "attention_mask", "read", 8),
    ("rollout", None, "response_ids", "B_prompt*G, S_resp", (4, 3), "response_mask", "write", 8),
    ("rollout", None, "response_mask", "B_prompt*G, S_resp", (4, 3), None, "write", 8),
    ("rollout", None, "full_sequence", "B_prompt*G, S_prompt + S_resp", (4, 7), "attention_mask", "write", 8),
    ("rollout", None, "rollout_log_prob", "B_prompt*G, S_resp", (4, 3), "response_mask", "write", 4),
    ("reward", None, "full_sequence", "B_prompt*G, S_prompt + S_resp", (4, 7), "attention_mask", "read", 8),
    ("reward", None, "reward", "B_prompt*G", (4,), None, "write", 4),
    ("old_log_prob", "forward", "old_log_prob", "B_prompt*G, S_resp", (4, 3), "response_mask", "write", 4),
    ("ref_log_prob", "forward", "ref_log_prob", "B_prompt*G, S_resp", (4, 3), "response_mask", "write", 4),
    ("advantage", None, "reward", "B_prompt, G", (2, 2), None, "read", 4),
    ("advantage", None, "advantages", "B_prompt*G, S_resp", (4, 3), "loss_mask", "write", 4),
    ("update_actor", None, "advantages", "B_prompt*G, S_resp", (4, 3), "loss_mask", "read", 4),
    ("update_actor", None, "old_log_prob", "B_prompt*G, S_resp", (4, 3), "response_mask", "read", 4),
)


def synthetic_run(path: Path, *, steps: int = 2, level: str = "tokens", state: str = "closed") -> Path:
    """Write the run at `path` through the real writer, and return the path. `state="open"` leaves it unclosed."""
    config = {
        "name": path.name,
        "model": {"path": "tiny"},
        "rollout": {"samples_per_prompt": 2},
        "record": {"level": level},
    }
    directory = create(path, Manifest(run=path.name, level=level, config=config, bindings=BINDINGS))
    writer = Writer(directory.part("actor", 0), capacity=1_000_000)
    for step in range(steps):
        for row in step_rows(step, tokens=level == "tokens"):
            writer.put(row)
    writer.close()
    if state != "open":
        directory.close(state)
    return path


def step_rows(step: int, *, tokens: bool = True) -> Iterator[Row]:
    """All rows of one step."""
    yield from _spans(step)
    yield from _tensors(step)
    yield from _memory(step)
    yield from _samples(step)
    yield from _metrics(step)
    if tokens:
        yield from _tokens(step)


def stage_start(step: int, stage: str) -> int:
    """When a stage begins, in ns."""
    before = list(STAGE_MS)[: list(STAGE_MS).index(stage)]
    return (step * STEP_MS + sum(STAGE_MS[name] for name in before)) * MS


def _spans(step: int) -> Iterator[Row]:
    root = 1000 * step + 1
    begin, end = step * STEP_MS * MS, (step + 1) * STEP_MS * MS
    yield SpanRow(id=root, step=step, rank=0, t_ns=begin, event="begin", name="step", span_kind="host", start_ns=begin)
    for number, (stage, milliseconds) in enumerate(STAGE_MS.items()):
        start = stage_start(step, stage)
        counts = (28, 21, 28) if stage in ("old_log_prob", "ref_log_prob", "update_actor") else (None, None, None)
        yield SpanRow(
            id=root + 1 + number, parent=root, step=step, stage=stage, rank=0, t_ns=start, event="whole", name=stage,
            span_kind="stage", start_ns=start, end_ns=start + milliseconds * MS, latency_ms=float(milliseconds),
            tokens_logical=counts[0], tokens_valid=counts[1], tokens_computed=counts[2],
        )  # fmt: skip
    for number, phase in enumerate(("forward", "loss", "backward")):
        for micro_batch in (0, 1):
            start = stage_start(step, "update_actor") + (micro_batch * 12 + number * 4) * MS
            yield SpanRow(
                id=root + 100 + 10 * micro_batch + number, parent=root + 9, step=step,
                stage="update_actor", phase=phase,
                role="actor", rank=0, epoch=0, mini_batch=0, micro_batch=micro_batch, t_ns=start, event="whole",
                name=phase, span_kind="compute", start_ns=start, end_ns=start + 4 * MS, latency_ms=4.0,
            )  # fmt: skip
    yield SpanRow(
        id=root, step=step, rank=0, t_ns=end, event="end", name="step", span_kind="host", start_ns=begin, end_ns=end,
        latency_ms=float(STEP_MS),
    )  # fmt: skip


def _tensors(step: int) -> Iterator[Row]:
    storages: dict[str, int] = {}
    for number, (stage, phase, name, dims, shape, mask, access, width) in enumerate(ACCESSES):
        numel = 1
        for size in shape:
            numel *= size
        fresh = name not in storages
        storage = storages.setdefault(name, 100 * step + number)
        now = stage_start(step, stage) + (number + 1) * 1000
        common = {"step": step, "role": "actor", "stage": stage, "phase": phase, "rank": 0, "t_ns": now}
        if fresh:
            yield StorageRow(**common, storage=storage, event="born", bytes=numel * width, kind="batch")
        yield TensorRow(
            **common, tensor_name=name, dims=dims, logical_shape=list(shape), local_shape=list(shape),
            placement=["Replicate()"], dtype="int64" if width == 8 else "float32", numel=numel, bytes=numel * width,
            kind="batch", mask=mask, mask_shape=list(shape) if mask else None, mask_ratio=0.75 if mask else None,
            owner_rank="0", lifetime="step", access=access, storage=storage,
        )  # fmt: skip
    yield from _deaths(step, storages)


def _deaths(step: int, storages: dict[str, int]) -> Iterator[Row]:
    """Prompts die with the rollout, rewards with the advantage, all else with the update; one reward is held on to."""
    for name, stage in (("prompt_ids", "rollout"), ("old_log_prob", "update_actor"), ("advantages", "update_actor")):
        now = stage_start(step, stage) + STAGE_MS[stage] * MS - 1
        yield StorageRow(step=step, stage=stage, t_ns=now, rank=0, storage=storages[name], event="freed")
    now = stage_start(step, "weight_sync")
    yield StorageRow(
        step=step,
        stage="weight_sync",
        t_ns=now,
        rank=0,
        storage=storages["reward"],
        event="held",
        holder="dict in loop",
    )


def _memory(step: int) -> Iterator[Row]:
    for stage, allocated in (("rollout", 10_000), ("update_actor", 16_000)):
        now = stage_start(step, stage) + STAGE_MS[stage] * MS
        yield MemoryRow(
            step=step, stage=stage, rank=0, t_ns=now, instant="end", kind="total", allocated=allocated,
            reserved=PEAK_RESERVED, fragmentation=1 - allocated / PEAK_RESERVED,
        )  # fmt: skip
    now = stage_start(step, "update_actor") + 10 * MS
    where = {"step": step, "stage": "update_actor", "phase": "backward", "rank": 0, "micro_batch": 1, "t_ns": now}
    for kind, size in KINDS.items():
        yield MemoryRow(**where, instant="peak", kind=kind, allocated=size)
    yield MemoryRow(**where, instant="peak", kind="total", allocated=PEAK_ALLOCATED, reserved=PEAK_RESERVED)


def _samples(step: int) -> Iterator[Row]:
    """Three rows a sample, from three stages; they say different things and the reader puts them together."""
    for index in range(4):
        sample, group = str(4 * step + index), str(2 * step + index // 2)
        now = stage_start(step, "rollout")
        yield SampleRow(
            step=step, stage="prompt", sample_id=sample, group_id=group, prompt_length=4 - index // 2, t_ns=now
        )
        yield SampleRow(
            step=step, stage="rollout", sample_id=sample, versions=[step], response_length=RESPONSE_LENGTHS[index],
            finish_reason="stop" if RESPONSE_LENGTHS[index] < 3 else "length", t_ns=now + 1,
        )  # fmt: skip
        yield SampleRow(
            step=step, stage="reward", sample_id=sample, rewards={"task": REWARDS[index]}, reward=REWARDS[index],
            t_ns=stage_start(step, "reward"),
        )  # fmt: skip
        trained = [Trained(epoch=0, mini_batch=0, rank=0, micro_batch=index // 2, stop=RESPONSE_LENGTHS[index])]
        advantage = (1.0, -1.0, 0.0, 0.0)[index]
        now = stage_start(step, "update_actor")
        yield SampleRow(step=step, stage="advantage", sample_id=sample, advantage=advantage, t_ns=now)
        yield SampleRow(step=step, stage="update_actor", sample_id=sample, trained=trained, t_ns=now + 1)


def _tokens(step: int) -> Iterator[Row]:
    """The tokens of the first group: a prompt of four, then the response."""
    for index in (0, 1):
        sample = str(4 * step + index)
        for position in range(4 + RESPONSE_LENGTHS[index]):
            response = position >= 4
            now = stage_start(step, "rollout") + position
            yield TokenRow(
                step=step, stage="rollout", t_ns=now, sample_id=sample, position=position, token_id=97 + position,
                text=chr(97 + position), attention_mask=1, response_mask=1 if response else None,
                rollout_log_prob=-0.5 if response else None,
            )  # fmt: skip
            if response:
                yield TokenRow(
                    step=step, stage="update_actor", t_ns=stage_start(step, "update_actor") + position,
                    sample_id=sample,
                    position=position, loss_mask=1, old_log_prob=-0.5, ref_log_prob=-0.6, new_log_prob=-0.4,
                    advantage=1.0 - 2 * index, ratio=1.105, clipped=False, entropy=1.5, loss_share=0.2,
                )  # fmt: skip


def _metrics(step: int) -> Iterator[Row]:
    now = (step + 1) * STEP_MS * MS
    yield MetricRow(step=step, t_ns=now, name="reward_mean", raw_name="reward_mean", value=0.75)
    yield MetricRow(step=step, t_ns=now, name="grad_norm", raw_name="grad_norm", value=float(step + 1))
    yield MetricRow(step=step, t_ns=now, name="kl", raw_name="kl", value=float("nan"))


# Two ranks, rank 1 slow in its rewards: (id, kind or stage, from, to) in seconds of one clock.
SLOW: tuple[tuple[tuple[int, str, float, float], ...], ...] = (
    (
        (1, "reward", 0, 1), (2, "filter", 1, 21.5), (3, "all_reduce", 1, 21.25), (4, "update_actor", 22, 30),
        (5, "all_gather", 22, 26), (6, "all_gather", 23, 27), (7, "broadcast", 27, 27.25), (8, "barrier", 30.5, 32),
    ),
    (
        (1, "reward", 0, 21), (2, "filter", 21, 21.5), (3, "all_reduce", 21, 21.25), (4, "update_actor", 22, 30.25),
        (5, "all_gather", 25, 26), (6, "all_gather", 26, 27), (7, "broadcast", 28, 28.25), (8, "barrier", 32, 32),
    ),
)  # fmt: skip
UNMET = (9, "all_reduce", 33, 34)  # rank 0 over ranks 0 to 2, of which the third recorded nothing


def slow_run(path: Path) -> Path:
    """Write `SLOW` and `UNMET`, of step 0; the clock of rank 1 began 1000 s before that of rank 0."""
    directory = create(path, Manifest(run=path.name))
    for rank, spans in enumerate(SLOW):
        part, early = directory.part("actor", rank), rank * 1000
        clock = Process(
            role="actor",
            rank=rank,
            host="node",
            pid=rank,
            monotonic_ns=early * 1000 * MS,
            wall_ns=1_700_000_000_000 * MS,
        )
        (part / "process.json").write_bytes(msgspec.json.encode(clock))
        writer = Writer(part)
        for number, name, start, end in (*spans, *([UNMET] if rank == 0 else [])):
            stage = next((n for _, n, a, b in spans if n in STAGE_MS and a <= start < b), None)
            comm = name not in STAGE_MS
            begin, over = int((early + start) * 1000) * MS, int((early + end) * 1000) * MS
            writer.put(
                SpanRow(
                    id=number, step=0, stage=stage, rank=rank, t_ns=over, event="whole", name=name,
                    span_kind="comm" if comm else "stage", start_ns=begin, end_ns=over, latency_ms=(over - begin) / MS,
                    comm_type=name if comm else None, group="dp" if comm else None,
                    peer_ranks=([0, 1, 2] if number == UNMET[0] else [0, 1]) if comm else None,
                )
            )  # fmt: skip
        writer.close()
    directory.close("closed")
    return path
