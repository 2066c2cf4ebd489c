"""Named dimensions: small expressions over the field's symbols, parsed once, resolved to integers by a configuration.

`[B_prompt*G, S_prompt + S_resp]` is a shape; each part is a `Dim`: names, integers, products, sums, differences and
`ceil(a / b)`. A `Dim` compares by its canonical text, so `G*B_prompt` and `B_prompt*G` stay different on purpose: the
order tells how the rows are laid out (sample index = prompt*G + k).
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flowledger.flow.errors import BadInput, nearest

# symbol -> (English, Chinese). The closed vocabulary of dimensions; mesh degrees are dimensions too (`ceil(B / dp)`).
SYMBOLS: dict[str, tuple[str, str]] = {
    "B_prompt": ("prompts in one step", "一步中的 prompt 数"),
    "G": ("responses per prompt (group size, rollout.n)", "每个 prompt 的 response 数（组大小）"),
    "B": ("samples in one step, B_prompt*G", "一步中的样本数，即 B_prompt*G"),
    "B_admit": (
        "prompts admitted in one prefill (as slots are free)",
        "一次 prefill 接纳的 prompt 数（取决于空闲槽位）",
    ),
    "B_mini": ("samples of one mini-batch (one optimizer step)", "一个 mini-batch（一次优化器更新）的样本数"),
    "B_micro": ("samples of one micro-batch (one forward/backward)", "一个 micro-batch（一次前反向）的样本数"),
    "B_run": (
        "samples running in one decode step (the scheduler decides)",
        "一个解码步中正在运行的样本数（由调度器决定）",
    ),
    "B_slot": (
        "slots of the KV cache (rollout.max_running); of an engine's pool, samples of full length",
        "KV cache 的槽位数（rollout.max_running）；对引擎的缓存池，为可容纳的满长样本数",
    ),
    "S_prompt": ("padded prompt length", "填充后的 prompt 长度"),
    "S_resp": ("padded response length", "填充后的 response 长度"),
    "S": ("padded sequence length, S_prompt + S_resp", "填充后的序列长度，即 S_prompt + S_resp"),
    "S_cache": ("positions a KV cache slot can hold", "KV cache 每个槽位可容纳的位置数"),
    "T": (
        "tokens of one micro-batch after padding is removed (packed)",
        "去除填充后一个 micro-batch 的 token 数（packed）",
    ),
    "T_logit": ("tokens whose logits are computed at once (one chunk)", "一次计算 logits 的 token 数（一个分块）"),
    "N_decode": ("decode steps of one rollout", "一次 rollout 的解码步数"),
    "N_reward": ("reward components", "reward 分量数"),
    "P": ("elements held by one layer's parameters", "一层参数的元素个数"),
    "H": ("hidden size", "隐藏维度"),
    "L": ("layers", "层数"),
    "A": ("query heads", "查询头数"),
    "K": ("key/value heads", "键值头数"),
    "D": ("head size", "每个头的维度"),
    "F": ("feed-forward width", "前馈层宽度"),
    "V": ("vocabulary size", "词表大小"),
    "E": ("experts", "专家数"),
    "dp": ("data parallel degree", "数据并行度"),
    "tp": ("tensor parallel degree", "张量并行度"),
    "pp": ("pipeline parallel degree", "流水线并行度"),
    "sp": ("Ulysses sequence parallel degree", "Ulysses 序列并行度"),
    "cp": ("context parallel degree", "上下文并行度"),
    "ep": ("expert parallel degree", "专家并行度"),
}


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension, such as `B_prompt*G` or `ceil(S / cp)`; `text` is its canonical spelling."""

    text: str

    def resolve(self, bindings: Mapping[str, int]) -> int:
        """The integer it has when each symbol has the value given. Raises BadInput for an unbound symbol."""
        return _evaluate(_tree(self.text), bindings, self.text)

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that occur in it."""
        return _symbols(self.text)

    def __str__(self) -> str:
        return self.text


Shape = tuple[Dim, ...]


@lru_cache(maxsize=1024)
def _symbols(text: str) -> frozenset[str]:
    names = (node.id for node in ast.walk(_tree(text)) if isinstance(node, ast.Name))
    return frozenset(names) - {"ceil"}


@lru_cache(maxsize=1024)
def parse_dim(text: str) -> Dim:
    """`Dim` for an expression. Raises BadInput naming the part that is not a dimension, or the unknown symbol."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null byte, or what is no text (UnicodeEncodeError)
        raise BadInput(f"dimension {text!r} is not an expression; write names, *, +, - and ceil(a / b)") from None
    return Dim(_spell(tree, text))


@lru_cache(maxsize=1024)
def parse_shape(text: str) -> Shape:
    """`[B_prompt*G, S_resp]`, brackets optional, as a tuple of dims; `[]` is a scalar."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return tuple(parse_dim(part) for part in inner.split(",")) if inner.strip() else ()


def spell(shape: Shape) -> str:
    """`[B_prompt*G, S_resp]`."""
    return "[" + ", ".join(dim.text for dim in shape) + "]"


def resolve(shape: Shape, bindings: Mapping[str, int]) -> tuple[int, ...]:
    """The integers of a shape."""
    return tuple(dim.resolve(bindings) for dim in shape)


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _spell(node: ast.expr, source: str) -> str:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return str(number)
        case ast.Name(id=name):
            if name not in SYMBOLS:
                raise BadInput(f"dimension {source!r} uses the unknown symbol {name!r}{nearest(name, SYMBOLS)}")
            return name
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return f"{_factor(left, source)}*{_factor(right, source)}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_spell(left, source)} + {_spell(right, source)}"
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return f"{_spell(left, source)} - {_factor(right, source)}"
        case ast.Call(func=ast.Name(id="ceil"), args=[ast.BinOp(left=left, op=ast.Div(), right=right)]):
            return f"ceil({_factor(left, source)} / {_divisor(right, source)})"
    raise BadInput(f"dimension {source!r}: {ast.unparse(node)!r} is not a name, integer, *, +, - or ceil(a / b)")


def _factor(node: ast.expr, source: str) -> str:
    text = _spell(node, source)
    return f"({text})" if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) else text


def _divisor(node: ast.expr, source: str) -> str:
    text = _spell(node, source)
    return f"({text})" if isinstance(node, ast.BinOp) else text


def _evaluate(node: ast.expr, bindings: Mapping[str, int], source: str) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            if name not in bindings:
                raise BadInput(f"dimension {source!r} needs a value for {name!r} ({SYMBOLS[name][0]})")
            return bindings[name]
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, bindings, source), _evaluate(right, bindings, source)
            return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b
        case ast.Call(args=[ast.BinOp(left=left, right=right)]):
            numerator, denominator = _evaluate(left, bindings, source), _evaluate(right, bindings, source)
            if denominator <= 0:
                raise BadInput(f"dimension {source!r} divides by {denominator}; degrees are at least 1")
            return -(-numerator // denominator)
    raise AssertionError(f"unreachable: {source}")
