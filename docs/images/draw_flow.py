"""Draw flow.svg and flow.zh-CN.svg beside this file, from the flow's own tables: python docs/images/draw_flow.py

On top the stages as a river, as wide as the number of tensors alive there; below, the main tensors: written (disc),
read (ring) and freed (bar). Only what is shown is chosen here; every fact comes from the tables.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

from flowledger.flow.stages import Stage, stages
from flowledger.flow.tensors import Tensor, stage_of, tensors

# tensor -> the form whose shape is written beside it
SHOWN = {
    "prompt_ids": "prompt", "attention_mask": "full", "group_id": "sample", "response_ids": "token",
    "response_mask": "token", "full_sequence": "padded", "rollout_log_prob": "token", "kv_cache": "model",
    "reward": "sample", "token_level_reward": "token", "loss_mask": "token", "old_log_prob": "token",
    "ref_log_prob": "token", "advantage": "group", "advantages": "token", "new_log_prob": "micro",
    "activations": "saved", "loss_mat": "micro", "grads": "model", "optimizer_state": "model", "params": "model",
    "updated_params": "model",
}  # fmt: skip
COLOURS = {
    "batch": "#2563a8", "kv_cache": "#b45309", "activation": "#b42318", "temporary": "#6b7280", "grad": "#7c3aed",
    "optimizer": "#a21caf", "param": "#15803d",
}  # fmt: skip
WORDS = {
    "en": ("One RL step", "width of the river: tensors alive", "written", "read", "freed", "stays for the next step"),
    "zh": ("一个 RL step", "河宽：此刻存活的 tensor 数", "写入", "读取", "释放", "留到下一步"),
}

LEFT, COLUMN, ROW, TOP, RIVER = 470, 92, 27, 196, 72
MONO, SANS = "DejaVu Sans Mono, Menlo, Consolas, monospace", "DejaVu Sans, Noto Sans CJK SC, Helvetica, sans-serif"
WATER, DEEP, INK, FAINT = "#cfe3f5", "#2563a8", "#1f2937", "#6b7280"


def drawn_stages() -> list[Stage]:
    """The stages that every step has, and the reference model's."""
    return [row for row in stages().values() if not row.optional or row.name == "ref_log_prob"]


def life(row: Tensor, columns: list[str]) -> tuple[int, int]:
    """First and last column in which it lives; what persists lives in all."""
    if row.lifetime == "persistent":
        return 0, len(columns) - 1
    made = [columns.index(name) for name in map(stage_of, row.written_by) if name in columns]
    used = [columns.index(name) for name in map(stage_of, (*row.readers, *row.released_by)) if name in columns]
    return (min(made), max(made + used)) if made else (-1, -1)


def alive(columns: list[str]) -> list[int]:
    """How many tensors of the flow live in each column."""
    lives = [life(row, columns) for row in tensors().values()]
    return [sum(first <= place <= last for first, last in lives) for place in range(len(columns))]


def text(
    x: float, y: float, content: str, *, size: int = 15, font: str = SANS, fill: str = INK, extra: str = ""
) -> str:
    style = f'font-family="{font}" font-size="{size}" fill="{fill}" {extra}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(content)}</text>'


def disc(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="6.5" fill="{colour}"/>'


def ring(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="white" stroke="{colour}" stroke-width="2.5"/>'


def bar(x: float, y: float, colour: str) -> str:
    return f'<path d="M{x:g},{y - 8:g} v16" stroke="{colour}" stroke-width="3"/>'


def arrow(x: float, y: float, colour: str) -> str:
    return f'<path d="M{x:g},{y - 6:g} l9,6 l-9,6 z" fill="{colour}"/>'


def centre(place: int) -> float:
    return LEFT + COLUMN * (place + 0.5)


def river(columns: list[str], counts: list[int]) -> list[str]:
    """The band, with the name of each stage on it and the count below."""
    half = [2.1 * count for count in counts]
    there = [(LEFT - 14.0, half[0]), *((centre(i), h) for i, h in enumerate(half)), (centre(len(half)) - 14, half[-1])]
    back = there[::-1]
    begin, turn = f"M{there[0][0]:g},{RIVER - there[0][1]:g}", f"L{back[0][0]:g},{RIVER + back[0][1]:g}"
    path = f"{begin} {_along(there, -1)} {turn} {_along(back, 1)} Z"
    parts = [f'<path d="{path}" fill="{WATER}"/>']
    for place, (name, count) in enumerate(zip(columns, counts, strict=True)):
        middle = 'text-anchor="middle" font-weight="bold"'
        parts.append(text(centre(place), RIVER + 5, str(count), size=14, fill=DEEP, extra=middle))
        for line, word in enumerate(_lines(name)):
            parts.append(text(centre(place), TOP - 46 + 16 * line, word, size=14, extra=middle))
    return parts


def _along(points: list[tuple[float, float]], side: int) -> str:
    """Smooth curves through the points, above (-1) or below (1) the middle of the river."""
    pieces = []
    for (x0, h0), (x1, h1) in pairwise(points):
        middle = (x0 + x1) / 2
        y0, y1 = RIVER + side * h0, RIVER + side * h1
        pieces.append(f"C{middle:g},{y0:g} {middle:g},{y1:g} {x1:g},{y1:g}")
    return " ".join(pieces)


def _lines(name: str) -> tuple[str, ...]:
    """One line, or two broken after the first underscore."""
    first, _, rest = name.partition("_")
    return (f"{first}_", rest) if rest else ("", name)


def lifeline(row: Tensor, form: str, line: int, columns: list[str]) -> list[str]:
    """Name and shape on the left, then its life across the stages."""
    y, colour = TOP + ROW * line + 12, COLOURS[row.kind]
    shape = next(f.shape for f in row.forms if f.name == form)
    parts = [
        text(16, y + 5, row.name, font=MONO, fill=colour, extra='font-weight="bold"'),
        text(LEFT - 24, y + 5, shape, size=14, font=MONO, fill=INK, extra='text-anchor="end"'),
    ]
    first, last = life(row, columns)
    stays = row.lifetime == "persistent"
    start, end = (LEFT - 6, centre(last) + 40) if stays else (centre(first), centre(last) + 11)
    parts.append(f'<path d="M{start:g},{y} H{end:g}" stroke="{colour}" stroke-width="3" opacity="0.45"/>')
    parts.append(arrow(end, y, colour) if stays else bar(end, y, colour))
    writers, readers = set(map(stage_of, row.written_by)), set(map(stage_of, row.readers))
    for place, name in enumerate(columns):
        if name in writers | readers:
            sign = disc if name in writers else ring
            parts.append(sign(centre(place), y, colour))
    return parts


def legend(y: float, language: str) -> list[str]:
    parts, x = [], 16.0
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(x + 18, y, kind, size=13))
        x += 34 + 8.4 * len(kind)
    x = max(x + 30, 800)
    for sign, word in zip((disc, ring, bar, arrow), WORDS[language][2:], strict=True):
        parts += [sign(x, y - 4, INK), text(x + 15, y, word, size=13)]
        x += 50 + (13 if language == "zh" else 8) * len(word)
    return parts


def draw(language: str) -> str:
    """The whole picture as SVG text."""
    columns = [row.name for row in drawn_stages()]
    width, bottom = LEFT + COLUMN * len(columns) + 40, TOP + ROW * len(SHOWN) + 14
    title, note = WORDS[language][:2]
    parts = [f'<rect width="{width}" height="{bottom + 40}" rx="10" fill="white"/>']
    parts += [f'<path d="M{centre(i):g},{TOP - 6} V{bottom - 8}" stroke="#e5e7eb"/>' for i in range(len(columns))]
    parts += [text(16, RIVER - 4, title, size=24, extra='font-weight="bold"'), text(16, RIVER + 22, note, fill=FAINT)]
    parts += river(columns, alive(columns))
    for line, (name, form) in enumerate(SHOWN.items()):
        parts += lifeline(tensors()[name], form, line, columns)
    parts += legend(bottom + 18, language)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """File -> content, for both languages."""
    here = Path(__file__).parent
    return {here / "flow.svg": draw("en"), here / "flow.zh-CN.svg": draw("zh")}


if __name__ == "__main__":
    for path, content in pictures().items():
        path.write_text(content, encoding="utf-8")
