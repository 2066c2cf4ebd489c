"""Synthetic runs for `page.py`: one of a few ranks with rows of every kind, and one of a thousand with rows of steps alone."""

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.ledger import compact, directory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.rows import (
    FindingRow,
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

STAGES = (
    ("rollout", "rollout", 0.55),
    ("actor", "old_log_prob", 0.1),
    ("ref", "ref_log_prob", 0.1),
    ("actor", "update_actor", 0.2),
    ("rollout", "weight_sync", 0.04),
)
METRICS = 60
STEP_NS = 20_000_000_000


# ------------------------------------------------------------------------------------------- a few ranks, rows of every kind

WATCHED = 50  # every so many steps operators are watched
KINDS = ("param", "grad", "optimizer", "activation", "kv_cache", "temporary", "batch")
SMALL_STAGES = (
    "prompt",
    "rollout",
    "reward",
    "filter",
    "balance",
    "old_log_prob",
    "ref_log_prob",
    "advantage",
    "update_actor",
    "weight_sync",
)
MICRO = ("old_log_prob", "ref_log_prob", "update_actor")
BINDINGS = {
    "B_prompt": 32,
    "G": 8,
    "B": 256,
    "S_prompt": 64,
    "S_resp": 128,
    "S": 192,
    "H": 1024,
    "L": 24,
    "A": 16,
    "K": 8,
    "D": 64,
    "F": 4096,
    "V": 32000,
}
SAMPLES, GROUP = 256, 8
NAMES = (
    "reward/mean",
    "kl",
    "entropy",
    "grad_norm",
    "pg_loss",
    "clip_ratio",
    "response_length/mean",
    "lr",
    "policy_kl",
    "advantage/std",
    "truncation_ratio",
)


def small(path: Path, ranks: int, steps: int) -> int:
    """A run of flowledger's own loop at level tokens, ended and compacted; how many rows it has. Row counts are those of one that was recorded."""
    on = {"dp": max(1, ranks // 2), "tp": min(2, ranks)}
    run = directory.create(
        path,
        Manifest(
            run="report",
            level="tokens",
            mesh=on,
            bindings=BINDINGS,
            rank_classes={"all": [*range(ranks)]},
            config={"steps": steps},
        ),
    )
    total = 0
    for rank in range(ranks):
        ink = Writer(
            run.part("actor", rank, coordinates={"dp": rank // on["tp"], "tp": rank % on["tp"]}), capacity=1 << 30
        )
        for step in range(steps):
            for row in _of_rank(rank, ranks, step, watched=step % WATCHED == 0 or step == steps - 1):
                row.rank, row.rank_count = rank, ranks
                ink.put(row)
                total += 1
        ink.close()
    run.close()
    compact.compact(path)
    return total


def _of_rank(rank: int, ranks: int, step: int, *, watched: bool) -> Iterator[Row]:
    draw = random.Random(rank * 100_003 + step)
    at, begin = step * 400, (1_000 + step * 40) * 10**9
    yield SpanRow(
        id=at, step=step, role="actor", event="begin", name="step", span_kind="stage", start_ns=begin, t_ns=begin
    )
    now, ids = begin, iter(range(at + 1, at + 400))
    for name in SMALL_STAGES:
        took = int(draw.uniform(0.2, 2.0) * 10**9 * (6 if name in ("rollout", "update_actor") else 1))
        role = stages()[name].role
        place: dict[str, Any] = {"step": step, "role": role, "stage": name}
        number = next(ids)
        yield SpanRow(
            id=number, parent=at, event="begin", name=name, span_kind="stage", start_ns=now, t_ns=now, **place
        )
        if name in MICRO:
            yield from _micro_batches(place, ids, number, now, took, draw)
        if name == "rollout":
            for part in range(34):
                yield SpanRow(
                    id=next(ids),
                    parent=number,
                    event="whole",
                    name="decode",
                    span_kind="compute",
                    start_ns=now + part * took // 34,
                    end_ns=now + (part + 1) * took // 34,
                    t_ns=now,
                    tokens_computed=32,
                    **place,
                )
        if watched:
            yield from _tensors(place, now, took, draw, number)
        yield from _memory(place, now + took, draw, watched=watched)
        tokens = {
            "tokens_logical": SAMPLES * 192 // ranks,
            "tokens_valid": SAMPLES * 170 // ranks,
            "tokens_computed": SAMPLES * 170 // ranks,
        }
        now += took
        yield SpanRow(
            id=number,
            parent=at,
            event="end",
            name=name,
            span_kind="stage",
            start_ns=now - took,
            end_ns=now,
            t_ns=now,
            **tokens,
            **place,
        )
    yield SpanRow(
        id=at,
        step=step,
        role="actor",
        event="end",
        name="step",
        span_kind="stage",
        start_ns=begin,
        end_ns=now,
        t_ns=now,
    )
    for name in (*NAMES, *(f"loss_term/part_{n}" for n in range(32))):
        yield MetricRow(
            name=name,
            raw_name=name,
            value=draw.gauss(0.5, 0.1) * math.exp(-step / 400),
            step=step,
            role="actor",
            t_ns=now,
        )
    yield from _samples(rank, ranks, step, now, draw)
    if rank == 0 and watched:
        yield from _tokens(step, now, draw)
    if rank == 0 and step == 0:
        yield FindingRow(
            id="shapes", order="laws", verdict="pass", message="shapes are conserved"
        )  # as the recorder says at the end
    if rank == 0 and step % 100 == 40:
        yield FindingRow(
            id=f"something_{step}",
            order="laws",
            verdict="warn",
            severity="warning",
            step=step,
            stage="update_actor",
            message="a check that has something to say of this step",
        )


def _micro_batches(
    place: dict[str, Any], ids: Iterator[int], parent: int, begin: int, took: int, draw: random.Random
) -> Iterator[Row]:
    phases = ("forward", "loss", "backward") if place["stage"] == "update_actor" else ("forward",)
    parts = 4 * len(phases)
    for micro in range(4):
        for number, phase in enumerate(phases):
            start = begin + (micro * len(phases) + number) * took // parts
            where = {**place, "phase": phase, "epoch": 0, "mini_batch": 0, "micro_batch": micro}
            yield SpanRow(
                id=next(ids),
                parent=parent,
                event="whole",
                name=phase,
                span_kind="compute",
                start_ns=start,
                end_ns=start + took // parts,
                t_ns=start,
                tokens_computed=4096,
                **where,
            )
            for _ in range(2):
                wait = int(draw.uniform(0, took / parts / 4))
                yield SpanRow(id=next(ids), parent=parent, event="whole", name="all_reduce", span_kind="comm", comm_type="all_reduce", group="tp", peer_ranks=[0, 1], bytes=1 << 20,
                              start_ns=start, end_ns=start + wait, latency_ms=wait / 1e6, t_ns=start, **where)  # fmt: skip


def _tensors(place: dict[str, Any], begin: int, took: int, draw: random.Random, number: int) -> Iterator[Row]:
    row = stages()[place["stage"]]
    for access, names in (("read", row.reads), ("write", row.writes)):
        for tensor, micro in (
            (name.partition("@")[0], micro) for name in names for micro in range(3 if place["stage"] in MICRO else 1)
        ):
            known = tensors().get(tensor)
            size = draw.choice((32, 64, 128))
            storage = number * 1000 + hash(tensor) % 1000
            yield TensorRow(tensor_name=tensor, dims="B_prompt*G, S_resp", local_shape=[size, 128], placement=["dp: Shard(0)"], dtype="float32", numel=size * 128,
                            bytes=size * 512, kind=known.kind if known else "batch", access=access, storage=storage, t_ns=begin, micro_batch=micro, **place)  # fmt: skip
            if access == "write":
                for event, at in (("born", begin), ("freed", begin + took)):
                    yield StorageRow(
                        storage=storage,
                        event=event,
                        bytes=size * 512,
                        kind=known.kind if known else "batch",
                        t_ns=at,
                        **place,
                    )


def _memory(place: dict[str, Any], at: int, draw: random.Random, *, watched: bool) -> Iterator[Row]:
    used = draw.randint(30 << 30, 50 << 30)
    for instant in ("begin", "end"):
        yield MemoryRow(
            instant=instant,
            kind="total",
            allocated=used,
            reserved=used + (4 << 30),
            device_used=used + (6 << 30),
            peak_since_stage=used + (2 << 30),
            limit=80 << 30,
            t_ns=at,
            **place,
        )
    for moment in range(6 if watched else 0):
        for kind in KINDS:
            yield MemoryRow(
                instant="peak" if moment == 5 else f"op {moment}",
                kind=kind,
                allocated=used // 9 + moment,
                t_ns=at - 6 + moment,
                **place,
            )


def _samples(rank: int, ranks: int, step: int, at: int, draw: random.Random) -> Iterator[Row]:
    for one in range(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks):
        name, group, length = (
            str(step * SAMPLES + one),
            str(step * SAMPLES // GROUP + one // GROUP),
            draw.randint(20, 128),
        )
        known: dict[str, Any] = {"sample_id": name, "step": step, "t_ns": at}
        yield SampleRow(**known, role="rollout", stage="prompt", group_id=group, prompt_length=draw.randint(10, 64))
        yield SampleRow(
            **known,
            role="rollout",
            stage="rollout",
            response_length=length,
            finish_reason="length" if length == 128 else "stop",
            versions=[step],
        )
        reward = draw.random()
        yield SampleRow(**known, role="reward", stage="reward", reward=reward, rewards={"accuracy": reward})
        yield SampleRow(**known, role="actor", stage="advantage", advantage=reward - 0.5)
        yield SampleRow(
            **known,
            role="actor",
            stage="update_actor",
            trained=[Trained(epoch=0, mini_batch=0, rank=rank, micro_batch=one % 4)],
        )


def _tokens(step: int, at: int, draw: random.Random) -> Iterator[Row]:
    for one in range(GROUP):
        for position in range(192):
            said = -draw.random()
            of_response = position >= 64
            yield TokenRow(sample_id=str(step * SAMPLES + one), position=position, token_id=draw.randint(0, 31999), text=" word", attention_mask=1, response_mask=int(of_response), step=step, t_ns=at,
                           **({"loss_mask": 1, "rollout_log_prob": said, "old_log_prob": said + 0.001, "ref_log_prob": said - 0.01, "new_log_prob": said, "advantage": 0.1, "ratio": 1.0, "entropy": 0.4} if of_response else {}))  # fmt: skip


# ------------------------------------------------------------------------------------------- a thousand ranks, rows of steps


RANK = 987_654_321  # stands for the rank in lines that many ranks share but for it
ALIKE = 16  # ranks of which one is as fast and as full as another, and not as those between


def lines(kind: int, step: int) -> tuple[bytes, bytes]:
    """(spans, memory) of one step of the ranks of a kind, at level `steps`: twelve rows and five."""
    slow, begin = 1.0 + kind / 50, 10**12 + step * STEP_NS * 2
    place: dict[str, Any] = {"step": step, "rank": RANK, "rank_count": 1024, "policy_version": step}
    whole = {"id": step * 10, "name": "step", "span_kind": "stage", "start_ns": begin, "role": "actor", **place}
    end = begin + int(STEP_NS * slow)
    spans: list[Row] = [SpanRow(event="begin", t_ns=begin, seq=step * 20, **whole)]
    memory, now = list[Row](), begin
    for number, (role, stage, share) in enumerate(STAGES, 1):
        took = int(share * slow * STEP_NS)
        here = {
            "id": step * 10 + number,
            "parent": step * 10,
            "name": stage,
            "stage": stage,
            "role": role,
            "span_kind": "stage",
            "start_ns": now,
            **place,
        }
        spans.append(SpanRow(event="begin", t_ns=now, seq=step * 20 + number, **here))
        now += took
        spans.append(
            SpanRow(
                event="end",
                t_ns=now,
                end_ns=now,
                seq=step * 20 + number,
                tokens_logical=65536,
                tokens_valid=60_000 + kind,
                tokens_computed=65536,
                **here,
            )
        )
        used = (40 << 30) + number * (3 << 30) + kind * 1_000_000 + step * 1000
        memory.append(MemoryRow(instant="end", kind="total", stage=stage, role=role, t_ns=now, seq=step * 20 + number, allocated=used, reserved=used + (4 << 30),
                                device_used=used + (6 << 30), peak_since_stage=used + (2 << 30), limit=80 << 30, **place))  # fmt: skip
    spans.append(SpanRow(event="end", t_ns=end, end_ns=end, seq=step * 20 + 19, **whole))
    encode = msgspec.json.Encoder().encode_lines
    return encode(spans), encode(memory)


def driver_lines(step: int) -> bytes:
    """The metrics of one step."""
    names = (*NAMES, *(f"loss_term/part_{n}" for n in range(METRICS - len(NAMES))))
    rows = [
        MetricRow(seq=step * METRICS + n, t_ns=10**12 + step * STEP_NS * 2, step=step, role="driver", name=name, raw_name=name, value=0.5 + (step * 31 + n * 17) % 100 / 250)
        for n, name in enumerate(names)
    ]  # fmt: skip
    return msgspec.json.Encoder().encode_lines(rows)


class Cluster:
    """A run of many ranks as it lies on disk, which can be made to take one step more."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        tp, pp = min(8, ranks), 4 if ranks >= 32 else 1
        mesh = {"dp": max(1, ranks // tp // pp), "tp": tp, "pp": pp}
        each = ranks // pp
        classes = {f"stage {at}": [*range(at * each, (at + 1) * each)] for at in range(pp)}
        self.run = directory.create(
            path, Manifest(run="large", level="steps", mesh=mesh, rank_classes=classes, framework="verl")
        )
        self.driver = self.run.part("driver", None)
        self.parts = []
        for rank in range(ranks):
            place = {"tp": rank % tp, "dp": rank // tp % mesh["dp"], "pp": rank // each}
            self.parts.append(self._part(rank, place))
        self.step = 0

    def _part(self, rank: int, place: dict[str, int]) -> Path:
        """As `RunDirectory.part`, without a look at the disk for each of a thousand."""
        part = self.run.path / "parts" / f"actor-r{rank}-host{rank // 8}-{rank}"
        part.mkdir()
        known = {"role": "actor", "rank": rank, "host": f"host{rank // 8}", "pid": rank, "source": "record", "coordinates": place,
                 "device": "NVIDIA H100 80GB HBM3", "monotonic_ns": 0, "wall_ns": 1_700_000_000_000_000_000, "started": 0.0}  # fmt: skip
        (part / "process.json").write_text(json.dumps(known))
        return part

    def take(self, steps: int) -> int:
        """So many steps more, all ranks; bytes."""
        last = self.step + steps
        of_kind = [
            [b"".join(one) for one in zip(*(lines(kind, step) for step in range(self.step, last)), strict=True)]
            for kind in range(ALIKE)
        ]
        total, sentinel = 0, str(RANK).encode()
        for rank, part in enumerate(self.parts):
            mine = str(rank).encode()
            for table, content in zip(("spans", "memory"), of_kind[rank % ALIKE], strict=True):
                total += _append(part / f"{table}-0.jsonl", content.replace(sentinel, mine))
        total += _append(self.driver / "metrics-0.jsonl", b"".join(map(driver_lines, range(self.step, last))))
        self.step = last
        return total


def _append(file: Path, content: bytes) -> int:
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, content)
    os.close(number)
    return len(content)
