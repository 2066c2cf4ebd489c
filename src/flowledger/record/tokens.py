"""Every token of a few groups, one row a token and stage: the only place where content is copied on purpose.

`position` counts columns of the padded full sequence [B, S_prompt + S_resp]; a tensor over responses ends in the same
column as the full sequence. Positions that attention_mask leaves out get no row, unless another mask claims them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import Row, TokenRow
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_EXTRA = {"full_sequence": "token_id"}  # covers the prompt as well, which response_ids does not
_OF_KEPT = ("old_log_prob", "ref_log_prob", "entropy")  # of samples that were dropped nobody computes them
# Stage -> what its forward pass makes for itself: the column is that of the policy in its update.
_NOT_THE_UPDATE = {"old_log_prob": ("new_log_prob",), "ref_log_prob": ("new_log_prob", "entropy")}
TOKEN_COLUMNS = ("ratio", "clipped", "loss_share")  # made per token by a loss, and no tensors of the flow
# What is said of the policy's own tokens: of those that an environment wrote nobody computes it, and there is no value.
_OF_OWN = frozenset({
    "rollout_log_prob", "old_log_prob", "ref_log_prob", "new_log_prob", "entropy", "value", "advantage", "return",
    *TOKEN_COLUMNS,
})  # fmt: skip


class Tokens:
    """Chooses the groups of a step and writes their tokens as tensors pass by."""

    def __init__(self, put: Put, groups: int) -> None:
        self.tokenizer: Any = None
        self._put, self._groups = put, groups
        self._texts: dict[int, str] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self._group_of: dict[str, str] = {}
        self._chosen: set[str] = set()
        self.dropped: set[str] = set()  # samples of this step that are not trained on
        self._width = 0  # S_prompt + S_resp, once the full sequence was seen
        self._valid: dict[str, list[int]] = {}  # sample -> columns that hold a token
        self._own: dict[str, set[int]] = {}  # sample -> columns of tokens that the policy sampled

    def group(self, ids: Sequence[str], groups: Sequence[str]) -> None:
        """Choose the samples of the first groups of this step."""
        if not self._chosen:
            first = list(dict.fromkeys(groups))[: self._groups]
            self._chosen = {sample for sample, group in zip(ids, groups, strict=True) if group in first}

    def see(self, ids: Sequence[str], values: dict[str, Any], frame: Frame, now: int) -> None:
        """Write the chosen samples' tokens of tensors [len(ids), width] by name; others are passed over."""
        rows = [(index, sample) for index, sample in enumerate(ids) if sample in self._chosen]
        if not rows:
            return
        if "full_sequence" in values:
            self._width = values["full_sequence"].shape[1]
        wide = {
            name: value
            for name, value in values.items()
            if name not in _NOT_THE_UPDATE.get(frame.stage or "", ())
            and (name in _EXTRA or name in TOKEN_COLUMNS or tensor(name).token_column)
            and value.dim() == 2
            and value.shape[0] == len(ids)
        }
        if not self._width or not wide:
            return
        for index, sample in rows:
            spared = _OF_KEPT if frame.scope == "stage" and sample in self.dropped else ()
            values_of = {name: value[index].tolist() for name, value in wide.items() if name not in spared}
            self._sample(sample, values_of, frame, now)

    def _sample(self, sample: str, values: dict[str, list[Any]], frame: Frame, now: int) -> None:
        if "full_sequence" in values:
            values.pop("response_ids", None)
        mask = values.get("attention_mask")
        if mask is not None and len(mask) == self._width:
            self._valid[sample] = [column for column, on in enumerate(mask) if on]
        sampled = values.get("response_mask")
        if sampled is not None:
            self._own[sample] = {column + self._width - len(sampled) for column, on in enumerate(sampled) if on}
        own = self._own.get(sample)
        claimed = {
            column + self._width - len(values[name])
            for name in ("response_mask", "loss_mask")
            for column, on in enumerate(values.get(name, ()))
            if on
        }
        places = sorted(claimed.union(self._valid.get(sample, range(self._width))))
        columns: dict[int, dict[str, Any]] = {}
        for name, row in values.items():
            label = _EXTRA.get(name) or (name if name in TOKEN_COLUMNS else tensor(name).token_column) or ""
            shift = self._width - len(row)
            others = own is not None and label in _OF_OWN
            for column in places:
                if column >= shift and not (others and column not in (own or ())):
                    columns.setdefault(column, {})["return_" if label == "return" else label] = row[column - shift]
        for column, found in sorted(columns.items()):
            self._put(TokenRow(sample_id=sample, position=column, text=self._text(found), **found), frame, now)

    def _text(self, found: dict[str, Any]) -> str | None:
        token = found.get("token_id")
        if token is None or self.tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = self._spelled(token)
        return self._texts[token]

    def _spelled(self, token: int) -> str:
        """Its text; a token that is only a part of a character is spelled as the vocabulary spells it."""
        text = str(self.tokenizer.decode([token]))
        return str(self.tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text
