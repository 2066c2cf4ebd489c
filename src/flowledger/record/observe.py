"""What a probe sees of tensors: a row an access, the life of the storage, what samples and tokens learn from it."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from flowledger.flow.tensors import stage_of, tensor
from flowledger.ledger.rows import Row
from flowledger.record import jagged, lineage
from flowledger.record.extract import Templates, Where, content_checksum, kept
from flowledger.record.layers import Layers
from flowledger.record.position import Frame
from flowledger.record.samples import Samples
from flowledger.record.storages import Lives
from flowledger.record.tokens import Tokens
from flowledger.record.watch import Named, Watch

Put = Callable[[Row, Frame, int], None]
MASKS = ("attention_mask", "response_mask", "loss_mask")
_PERSISTENT_EVIDENCE = {
    "params": "parameter", "updated_params": "parameter", "grads": "gradient",
    "optimizer_state": "optimizer_state", "kv_cache": "cache", "comm_buffer": "collective",
}  # fmt: skip


class Observer:
    """Turns what stands in a call into rows. `sign` tells whoever watches operators what a tensor is."""

    def __init__(
        self, put: Put, here: Callable[[], Frame], *, level: str, templates: Templates, rank: int, groups: int
    ) -> None:
        self.level = level
        self.facts: dict[str, Any] = {}
        self.sign: Callable[[Any, str], object] | None = None  # set while operators are watched
        self.layers = Layers()
        self.lives = Lives(put, here)
        self.samples = Samples(put, rank)
        self.tokens = Tokens(put, groups)
        self._put, self._templates = put, templates
        self._counts: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # id -> tensor, its version, what it keeps

    def begin_step(self) -> None:
        self.samples.begin_step()
        self.tokens.begin_step()
        self._counts.clear()
        self.facts.pop("dropped_reason", None)
        self.facts.pop("component_names", None)

    def see(self, watch: Watch, frame: Frame, access: str, named: Named, now: int) -> None:
        """Everything one side of a call (arguments: read, result: write) has to show."""
        if self.level == "steps":
            if watch.scope == "stage":
                self._masks(frame, {name: value for name, value in named if is_tensor(value)})
            return
        plain = {name: value for name, value in named if is_tensor(value)}
        ragged = {name: jagged.of(value) for name, value in plain.items() if _TENSORS[type(value)] == _JAGGED}
        for name in ragged:
            del plain[name]
        masks = self._masks(frame, plain)
        failed: Exception | None = None
        for name, value in named:
            try:
                if name in ragged:
                    self._ragged(watch, frame, access, name, ragged[name], now)
                elif name in plain:
                    self._tensor(watch, frame, access, name, value, masks, now)
                else:
                    self._object(watch, frame, access, name, value, now)
            except Exception as error:  # noqa: BLE001  an odd one does not hide the others; it is told of below
                failed = failed or error
        if "sample_id" in plain:
            self._identify(frame, plain)
        elif frame.groups is not None and self.learns(frame):
            self._name(frame, plain)
        if frame.sample_ids is not None and (
            self.level == "tokens" or watch.scope in ("stage", "micro_batch") or frame.groups is not None
        ):
            self._learn(frame, access, plain, ragged, now)
        if failed is not None:
            raise failed

    def learns(self, frame: Frame) -> bool:
        """Whether it matters whose rows a call has: micro-batches tell of their samples only where these are trained."""
        return frame.scope != "micro_batch" or frame.stage == "update_actor" or self.level == "tokens"

    def hidden(self, frame: Frame, layer: int, value: Any, now: int, *, along_sequence: bool) -> None:
        """The output of one layer; `along_sequence`: tensor parallelism has cut it along the tokens."""
        what = ("hidden_states", value.shape, value.dtype, value.element_size())
        variant = "megatron_sp" if along_sequence else None
        row = self._templates.row(*what, Where(frame.stage, "write", "micro_batch", variant))
        row.layer, row.access = layer, "write"
        row.storage = self.lives.see(value, "hidden_states", "write", frame, now)
        row.offset = value.storage_offset()
        self._put(row, frame, now)

    def saved(self, frame: Frame, layer: int | None, dtype: Any, size: int, now: int) -> None:
        """What one layer saved for backward."""
        what = ("activations", (size // dtype.itemsize,), dtype, dtype.itemsize)
        row = self._templates.row(*what, Where(frame.stage, "write", "micro_batch"))
        row.layer, row.access = layer, "write"
        self._put(row, frame, now)

    def write_samples(self, frame: Frame, now: int) -> None:
        """Write what a stage has learnt of its samples, when it ends."""
        ids = frame.sample_ids or []
        columns = {name: column for name, column in (frame.columns or {}).items() if len(column) == len(ids)}
        dropped = self.facts.pop("dropped_reason", None)
        if dropped is not None and len(dropped) == len(ids):
            columns["dropped_reason"] = list(dropped)
            self.tokens.dropped.update(one for one, why in zip(ids, dropped, strict=True) if why is not None)
        if columns and ids:
            if frame.stage == "rollout" and frame.policy_version is not None:
                columns.setdefault("versions", [[frame.policy_version]] * len(ids))
            self.samples.write(ids, columns, frame, now)
        if frame.stage == "update_actor" and frame.scope == "stage":
            self.samples.end_update(frame, now)

    def token_values(self, frame: Frame, columns: Mapping[str, Any], now: int) -> None:
        """Values for each token [B, S_resp] that are no tensors of the flow, by column of `tokens`."""
        if self.level == "tokens" and frame.sample_ids is not None:
            self.tokens.see(frame.sample_ids, dict(columns), frame, now)

    def _masks(self, frame: Frame, named: Mapping[str, Any]) -> dict[str, tuple[list[int], float | None]] | None:
        """Shape and kept fraction of the masks of this call, its newest first."""
        for name in MASKS:
            if (value := named.get(name)) is not None:
                count, size = self._kept(value), value.numel()
                if frame.masks is None:
                    frame.masks = {}
                frame.masks[name] = (list(value.shape), count / size if count is not None and size else None)
                if name == "attention_mask":
                    frame.tokens_logical, frame.tokens_valid = size, count
        return frame.masks

    def _kept(self, value: Any) -> int | None:
        """How many elements of a mask are not 0, remembered for the step."""
        if not value.is_cpu and self.level != "tokens":
            return None
        if value.is_inference():
            return kept(value)
        known, version = self._counts.get(id(value)), value._version
        if known is not None and known[1] == version and known[0]() is value:
            return known[2]
        count = kept(value)
        self._counts[id(value)] = weakref.ref(value), version, count
        return count

    def _tensor(
        self, watch: Watch, frame: Frame, access: str, name: str, value: Any, masks: dict[str, Any] | None, now: int
    ) -> None:
        if watch.scope == "decode" and not watch.shown.first(frame, (name, access, value.shape)):
            return
        stage = frame.stage or stage_of(tensor(name).producer)  # what is met between stages belongs to who makes it
        row = self._templates.of(name, value, Where(stage, access, _within(watch, frame)))
        row.stage = stage
        local = value
        if _TENSORS[type(value)] == _SPREAD:
            local = value.to_local()
            self._templates.cut(row, local.shape, _placement(value))
        row.access = access
        row.storage = self.lives.see(local, name, access, frame, now)
        row.offset = local.storage_offset()
        mask = masks.get(name if name in MASKS else row.mask or "") if masks is not None else None
        if mask is not None and name == "prompt_ids" and mask[0][-1:] != [value.shape[-1]]:
            mask = None  # it covers the responses as well
        if mask is not None and row.padding != "packed":
            row.mask_ratio = mask[1]
            row.mask_shape = mask[0] if name not in MASKS else None
        if self.level == "tokens":
            row.checksum = content_checksum(local)
        if self.sign is not None and (frame.scope == "stage" or row.kind == "batch"):
            self.sign(local, "stage_tensor")
        self._put(row, frame, now)

    def _object(self, watch: Watch, frame: Frame, access: str, name: str, value: Any, now: int) -> None:
        """A model, an optimizer or a cache: one row a layer."""
        if self.sign is not None and name in _PERSISTENT_EVIDENCE:
            for tensor in self.layers.tensors(name, value):
                self.sign(tensor, _PERSISTENT_EVIDENCE[name])
        if watch.whole and not watch.shown.first(frame, (name, access)):
            return
        for part in self.layers.parts(name, value) or ():
            row = self._templates.row(name, part.shape, part.dtype, 0, Where(frame.stage, access))
            row.layer, row.bytes, row.access = part.layer, part.bytes, access
            if part.whole is not None:
                row.logical_shape = list(part.whole)
            self._put(row, frame, now)

    def _identify(self, frame: Frame, values: dict[str, Any]) -> None:
        """Whose rows these are. Sample ids are read even off a device only at level `tokens`."""
        ids = values["sample_id"]
        if not ids.is_cpu and self.level != "tokens":
            return
        frame.sample_ids = [str(number) for number in ids.flatten().tolist()]
        groups = values.get("group_id")
        if self.level == "tokens" and groups is not None and len(groups) == len(frame.sample_ids):
            self.tokens.group(frame.sample_ids, [str(number) for number in groups.tolist()])

    def _name(self, frame: Frame, values: dict[str, Any]) -> None:
        """Whose rows these are, of a framework that names groups."""
        responses = values.get("response_ids")
        lineage.identify(frame, responses if responses is not None and responses.is_cpu else None)
        if self.level == "tokens" and frame.sample_ids is not None and frame.groups is not None:
            self.tokens.group(frame.sample_ids, frame.groups)

    def _ragged(self, watch: Watch, frame: Frame, access: str, name: str, value: jagged.Jagged, now: int) -> None:
        """A tensor whose rows have their own lengths: its shape is that of a padded one, its bytes are its own."""
        stage = frame.stage or stage_of(tensor(name).producer)
        shape, held = value.shape, value.values
        row = self._templates.row(
            name, shape, held.dtype, held.element_size(), Where(stage, access, _within(watch, frame))
        )
        row.stage, row.access, row.padding, row.broadcast = stage, access, "jagged", None
        row.numel, row.bytes = held.numel(), held.numel() * held.element_size()
        row.storage, row.offset = self.lives.see(held, name, access, frame, now), held.storage_offset()
        row.mask_ratio = value.filled
        if self.level == "tokens":
            row.checksum = content_checksum(held)
        self._put(row, frame, now)

    def _learn(
        self, frame: Frame, access: str, values: dict[str, Any], ragged: Mapping[str, jagged.Jagged], now: int
    ) -> None:
        ids = frame.sample_ids or []
        if frame.groups is not None and frame.scope != "micro_batch":
            frame.columns = (frame.columns or {}) | lineage.columns(frame, values, ragged, self.facts)
        if frame.scope == "stage" or (frame.groups is not None and frame.scope != "micro_batch"):
            columns = frame.columns = frame.columns or {}
            for name, value in values.items():
                if value.is_cpu or self.level == "tokens":
                    again = access == "write"
                    found = self.samples.columns(name, value, len(ids), self.facts, again=again, beside=values)
                    columns.update(found)
        elif frame.scope == "micro_batch" and frame.stage == "update_actor" and access == "read":
            self.samples.train(ids, frame, _widths({**values, **ragged}, len(ids)))
        first = "full_sequence" in values and not self.tokens.placed  # what made it was not seen to
        foreign = frame.groups is not None and frame.scope == "call"
        if self.level == "tokens" and (access == "write" or frame.phase == "loss" or first or foreign):
            self.tokens.see(ids, values, frame, now)
            if foreign and not values:
                self.tokens.see_ragged(ids, ragged, frame, now)


def _within(watch: Watch, frame: Frame) -> str | None:
    """Which of flow.tensors' GRAINS a call is within."""
    if watch.scope == "decode":
        return "decode"
    return None if frame.micro_batch is None else "micro_batch"


def _widths(values: Mapping[str, Any], count: int) -> list[int]:
    """Columns of prompt and response of each sample, where a call has both in one tensor or in two; else 0."""
    whole = values.get("full_sequence")
    if isinstance(whole, jagged.Jagged) and whole.lengths and len(whole.lengths) == count:
        return whole.lengths
    parts = ("full_sequence",) if whole is not None else ("prompt_ids", "response_ids")
    width = sum(values[part].shape[-1] for part in parts) if values.keys() >= set(parts) else 0
    return [width] * count


def _placement(value: Any) -> list[str]:
    """`axis: Shard(d)` for each dimension of the device mesh of a tensor that is spread over ranks."""
    names = value.device_mesh.mesh_dim_names or range(len(value.placements))
    return [f"{AXES.get(name, name)}: {_spelled(one)}" for name, one in zip(names, value.placements, strict=True)]


AXES = {"fsdp": "dp"}  # what frameworks call the axes of the flow


def _spelled(placement: Any) -> str:
    """`Shard(0)`, `Replicate()`: torch's own word for one has changed."""
    dim = getattr(placement, "dim", None)
    return f"{type(placement).__name__}({'' if dim is None else dim})"


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor; torch need not be there."""
    kind = type(value)
    known = _TENSORS.get(kind)
    if known is None:
        tensor = hasattr(kind, "untyped_storage") and hasattr(kind, "storage_offset")
        special = _SPREAD if hasattr(kind, "placements") else _JAGGED if kind.__name__ == "NestedTensor" else 1
        known = _TENSORS[kind] = special if tensor else 0
    return known > 0


_SPREAD, _JAGGED = 2, 3
_TENSORS: dict[
    type, int
] = {}  # class -> 0 no tensor, 1 a tensor, 2 one that is spread over ranks, 3 rows of own lengths
