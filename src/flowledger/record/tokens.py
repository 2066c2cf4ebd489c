"""Every token of a few groups, one row a token and stage: the only place where content is copied on purpose.

`position` counts columns of the padded full sequence [B, S_prompt + S_resp]; a tensor over responses ends in the same
column as the full sequence. Positions that attention_mask leaves out get no row, unless another mask claims them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import Row, TokenRow
from flowledger.record.jagged import Jagged
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_EXTRA = {"full_sequence": "token_id"}  # covers the prompt as well, which response_ids does not
# What covers prompt and response, of a loop that keeps the two apart: the whole -> its parts.
_APART = {"full_sequence": ("prompt_ids", "response_ids"), "attention_mask": ("prompt_mask", "response_mask")}
_PROMPTS = tuple(prompt for prompt, _ in _APART.values())
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

    @property
    def placed(self) -> bool:
        """Whether the columns of this step's sequences are known."""
        return self._width > 0

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
        elif values.keys() >= set(_APART["full_sequence"]):
            self._width = sum(values[part].shape[1] for part in _APART["full_sequence"])
        wide = {
            name: value
            for name, value in values.items()
            if name not in _NOT_THE_UPDATE.get(frame.stage or "", ())
            and (name in _EXTRA or name in _PROMPTS or name in TOKEN_COLUMNS or tensor(name).token_column)
            and value.dim() == 2
            and value.shape[0] == len(ids)
        }
        if not self._width or not wide:
            return
        for index, sample in rows:
            spared = _OF_KEPT if frame.scope == "stage" and sample in self.dropped else ()
            values_of = {name: value[index].tolist() for name, value in wide.items() if name not in spared}
            self._sample(sample, _joined(values_of), self._width, frame, now)

    def see_ragged(self, ids: Sequence[str], values: Mapping[str, Jagged], frame: Frame, now: int) -> None:
        """The same of tensors whose rows have their own lengths.

        A token stands in the column that a padded form of its sample had for it; where none was seen, columns count within
        the sample. What a model says at each column of the whole sequence speaks of the next token, and is left out.
        """
        rows = [(index, sample) for index, sample in enumerate(ids) if sample in self._chosen]
        whole = values.get("full_sequence")
        if not rows or whole is None or whole.lengths is None:
            return
        parts = {
            name: one.values.split(one.lengths)
            for name, one in values.items()
            if (name in _EXTRA or tensor(name).token_column) and one.lengths and len(one.lengths) == len(ids)
            if name in _EXTRA or one.lengths != whole.lengths
        }
        for index, sample in rows:
            at = self._valid.get(sample, [])
            if len(at) != whole.lengths[index]:
                at = list(range(whole.lengths[index]))
            values_of = {name: _padded(rows_of[index].tolist(), at) for name, rows_of in parts.items()}
            self._sample(sample, values_of, at[-1] + 1 if at else 0, frame, now)

    def _sample(self, sample: str, values: dict[str, list[Any]], width: int, frame: Frame, now: int) -> None:
        if "full_sequence" in values:
            values.pop("response_ids", None)
        mask = values.get("attention_mask")
        if mask is not None and len(mask) == width:
            here = [column for column, on in enumerate(mask) if on]
            at = self._valid.setdefault(sample, here)
            if len(at) != len(here):
                self._valid[sample] = here
            elif at != here:  # the same tokens, padded otherwise
                values = {name: _moved(row, here, at, width) for name, row in values.items()}
                width = at[-1] + 1
        sampled = values.get("response_mask")
        if sampled is not None:
            self._own[sample] = {column + width - len(sampled) for column, on in enumerate(sampled) if on}
        own = self._own.get(sample)
        claimed = {
            column + width - len(values[name])
            for name in ("response_mask", "loss_mask")
            for column, on in enumerate(values.get(name, ()))
            if on
        }
        places = sorted(claimed.union(self._valid.get(sample, range(width))))
        columns: dict[int, dict[str, Any]] = {}
        for name, row in values.items():
            label = _EXTRA.get(name) or (name if name in TOKEN_COLUMNS else tensor(name).token_column) or ""
            shift = width - len(row)
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


def _moved(row: list[Any], here: Sequence[int], at: Sequence[int], width: int) -> list[Any]:
    """A row that ends in column `width`, with what stands in the columns `here` moved to the columns `at`."""
    moved: list[Any] = [None] * (at[-1] + 1)
    shift = width - len(row)
    for source, target in zip(here, at, strict=True):
        if source >= shift:
            moved[target] = row[source - shift]
    return moved


def _padded(row: list[Any], at: Sequence[int]) -> list[Any]:
    """A row whose last element stands in the last of these columns, with nothing in the columns between them."""
    padded: list[Any] = [None] * (at[-1] + 1 if at else 0)
    for column, value in zip(at[len(at) - len(row) :], row, strict=True):
        padded[column] = value
    return padded


def _joined(row: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A row with what covers prompt and response, where it has both parts of that, and without prompts by themselves."""
    whole = {
        name: [*row[prompt], *row[response]]
        for name, (prompt, response) in _APART.items()
        if name not in row and prompt in row and response in row
    }
    return {name: values for name, values in row.items() if name not in _PROMPTS} | whole
