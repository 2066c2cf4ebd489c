"""Row types of the ledger: one Struct a table. The single place that names the columns, their order and their types.

`run`, `source` and `process` are columns of every table but stand in no JSONL line: they are the same for a whole part
directory, so its `process.json` holds them and the reader adds them. Fields left None are not written.
Times are nanoseconds of the process's monotonic clock; bytes are local to the rank.
"""

from typing import ClassVar, get_args, get_type_hints

import msgspec

SCHEMA_VERSION = 1


class Row(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """What every row has: its number within the process, when, and where in the step."""

    table: ClassVar[str]
    seq: int = -1  # given by the writer
    t_ns: int = -1
    step: int | None = None
    role: str | None = None
    stage: str | None = None
    phase: str | None = None
    rank: int | None = None
    rank_count: int | None = None
    epoch: int | None = None
    mini_batch: int | None = None
    micro_batch: int | None = None
    policy_version: int | None = None


class TensorRow(Row, kw_only=True):
    """One access to one tensor."""

    table = "tensors"
    tensor_name: str
    layer: int | None = None
    dims: str | None = None
    logical_shape: list[int] | None = None
    local_shape: list[int] | None = None
    placement: list[str] | None = None
    padding: str | None = None
    dtype: str | None = None
    numel: int | None = None
    bytes: int | None = None
    kind: str | None = None
    mask: str | None = None
    mask_shape: list[int] | None = None
    mask_ratio: float | None = None
    broadcast: str | None = None
    owner_rank: str | None = None
    owner: str | None = None
    lifetime: str | None = None
    access: str | None = None
    storage: int | None = None
    offset: int | None = None
    shape_checksum: int | None = None
    checksum: int | None = None


class StorageRow(Row, kw_only=True):
    """One event in a storage's life."""

    table = "storages"
    storage: int
    event: str  # born, last_read, freed, held
    bytes: int | None = None
    kind: str | None = None
    holder: str | None = None


class SpanRow(Row, kw_only=True):
    """The begin, the end, or the whole of an interval."""

    table = "spans"
    id: int
    parent: int | None = None
    event: str  # begin, end, whole, device
    name: str
    span_kind: str  # stage, compute, comm, wait, host
    start_ns: int
    end_ns: int | None = None
    comm_type: str | None = None
    group: str | None = None
    peer_ranks: list[int] | None = None
    bytes: int | None = None
    latency_ms: float | None = None
    device_ms: float | None = None  # on the device's own clock, known later
    tokens_logical: int | None = None
    tokens_valid: int | None = None
    tokens_computed: int | None = None
    sample_id: str | None = None


class MemoryRow(Row, kw_only=True):
    """One reading, or one planned instant; `kind` is a memory kind or `total`."""

    table = "memory"
    instant: str
    kind: str
    allocated: int | None = None
    reserved: int | None = None
    device_used: int | None = None
    host_used: int | None = None
    peak_since_stage: int | None = None
    reserved_peak_since_stage: int | None = None
    limit: int | None = None
    fragmentation: float | None = None


class MetricRow(Row, kw_only=True):
    """One number. A value that JSON cannot hold goes to `special`, and `value` is null."""

    table = "metrics"
    name: str
    raw_name: str
    value: float | None = None
    special: str | None = None  # nan, inf, -inf
    weight: float | None = None
    recomputed: bool = False


class Trained(msgspec.Struct, kw_only=True, gc=False):
    """One time a sample went through the update, or one slice of it."""

    epoch: int
    mini_batch: int
    rank: int
    micro_batch: int
    cp_slice: int = 0
    start: int = 0
    stop: int = 0


class SampleRow(Row, kw_only=True):
    """What one stage learnt of one sample; the reader merges by (sample_id, attempt), last non-null wins."""

    table = "samples"
    sample_id: str
    group_id: str | None = None
    attempt: int = 0
    versions: list[int] | None = None
    prompt_length: int | None = None
    response_length: int | None = None
    finish_reason: str | None = None
    rewards: dict[str, float | None] | None = None
    reward: float | None = None
    advantage: float | None = None
    trained: list[Trained] | None = None
    dropped_reason: str | None = None


class TokenRow(Row, kw_only=True):
    """What one stage learnt of one token of a sampled group; the reader merges by (sample_id, position)."""

    table = "tokens"
    sample_id: str
    position: int
    token_id: int | None = None
    text: str | None = None
    attention_mask: int | None = None
    response_mask: int | None = None
    loss_mask: int | None = None
    rollout_log_prob: float | None = None
    old_log_prob: float | None = None
    ref_log_prob: float | None = None
    new_log_prob: float | None = None
    value: float | None = None
    reward: float | None = None
    advantage: float | None = None
    return_: float | None = msgspec.field(default=None, name="return")
    ratio: float | None = None
    clipped: bool | None = None
    entropy: float | None = None
    loss_share: float | None = None
    kl: float | None = None
    weight: float | None = None


class FindingRow(Row, kw_only=True):
    """What a check, alarm or debug order said."""

    table = "findings"
    id: str
    scope: str = "run"  # plan, run, diff
    order: str | None = None
    position: int | None = None
    verdict: str  # pass, warn, fail, skipped
    severity: str = "info"
    message: str
    evidence: list[str] | None = None
    needs: list[str] | None = None
    versions: str | None = None
    fires_at: str | None = None
    fix: dict[str, str] | None = None
    next_step: str | None = None
    confidence: float | None = None


ROWS: tuple[type[Row], ...] = (
    TensorRow, StorageRow, SpanRow, MemoryRow, MetricRow, SampleRow, TokenRow, FindingRow,
)  # fmt: skip

PART_COLUMNS = {"run": "VARCHAR", "source": "VARCHAR", "process": "VARCHAR"}

_SQL_TYPES: dict[object, str] = {int: "BIGINT", float: "DOUBLE", str: "VARCHAR", bool: "BOOLEAN"}


def columns(row: type[Row]) -> dict[str, str]:
    """Column name -> DuckDB type, as the reader must be told (types are never inferred)."""
    hints = get_type_hints(row)
    names = dict(zip(row.__struct_fields__, row.__struct_encode_fields__, strict=True))
    return {encoded: _sql(hints[name]) for name, encoded in names.items()}


def _sql(hint: object) -> str:
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    if hint in _SQL_TYPES:
        return _SQL_TYPES[hint]
    if getattr(hint, "__origin__", None) is list:
        return f"{_sql(options[0])}[]"
    if getattr(hint, "__origin__", None) is dict:
        return f"MAP(VARCHAR, {_sql(options[1])})"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        inner = get_type_hints(hint)
        return "STRUCT(" + ", ".join(f'"{name}" {_sql(inner[name])}' for name in hint.__struct_fields__) + ")"
    return _sql(options[0])  # X | None
