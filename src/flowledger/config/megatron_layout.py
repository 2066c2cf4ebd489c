"""The small languages inside Megatron's arguments: pipeline layouts, frequencies of expert layers, hybrid patterns."""

import re
from collections.abc import Mapping, Sequence

from flowledger.flow.errors import BadInput

LETTERS = {"M": "linear", "*": "full", "-": "feed_forward", "E": "feed_forward"}  # E: with experts


def stages_of(given: Mapping[str, object], layers: int, pp: int) -> tuple[tuple[int, ...], int]:
    """(layers of every chunk in order, or () where they are dealt evenly; chunks of one rank).

    Sources: --pipeline-model-parallel-layout, --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank,
    --account-for-{embedding,loss}-in-pipeline-split (each counts as one layer of the end stages).
    """
    layout = str(given.get("pipeline-model-parallel-layout", ""))
    if layout:
        chunks = layout_stages(layout)
        return chunks, max(1, len(chunks) // pp)
    ends = [bool(given.get(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]
    slots = layers + sum(ends)
    per = int(str(given.get("num-layers-per-virtual-pipeline-stage", 0)))
    vpp = int(str(given.get("num-virtual-stages-per-pipeline-rank", 0)))
    if per and pp > 1:
        vpp = slots // pp // per
    vpp = max(1, vpp) if pp > 1 else 1
    if not any(ends) or pp == 1:
        return (), vpp
    each, rest = divmod(slots, pp * vpp)
    if rest:
        raise BadInput(f"pipeline split: {slots} slots (layers, embedding, loss) do not divide among {pp * vpp} chunks")
    sizes = [each] * (pp * vpp)
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return tuple(sizes), vpp


def layout_stages(layout: str) -> tuple[int, ...]:
    """Decoder layers of each stage of `Et*3|(tt|)*6L`: E embedding, t layer, m MTP layer, L loss, | next stage."""
    text = layout.replace("\\", "").replace(" ", "").replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        while match := re.search(pattern, text):
            text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    if re.search(r"[^EtmL|]", text):
        raise BadInput(f"--pipeline-model-parallel-layout = {layout!r}: only E, t, m, L, |, (…)*n and x*n are known")
    return tuple(stage.count("t") for stage in text.split("|"))


def moe_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Which layers hold experts: `2` every second beginning with the first, `([0]*3+[1]*11)` as listed."""
    bare = text.strip().strip("()").replace(" ", "")
    if bare.isdigit():
        return tuple(layer % max(1, int(bare)) == 0 for layer in range(layers))
    found: list[bool] = []
    for part in bare.split("+"):
        match = re.fullmatch(r"\(?\[([01,]*)\]\)?(?:\*(\d+))?", part)
        if not match:
            raise BadInput(f"--moe-layer-freq = {text!r}: a number, or a list such as ([0]*3+[1]*11)")
        found += [item == "1" for item in match[1].split(",") if item] * int(match[2] or 1)
    return tuple(found)


def hybrid_kinds(pattern: str) -> tuple[str, ...]:
    """One kind a layer of a hybrid pattern: linear (Mamba-2), full (attention), feed_forward."""
    letters = hybrid_letters(pattern)
    unknown = set(letters) - set(LETTERS)
    if unknown:
        raise BadInput(f"hybrid pattern {pattern!r}: {sorted(unknown)} is none of {', '.join(LETTERS)}")
    return tuple(LETTERS[letter] for letter in letters)


def hybrid_letters(pattern: str) -> str:
    """The letters of a hybrid pattern, one a layer, without pipeline bars and the pattern of prediction heads."""
    return pattern.split("/")[0].replace("|", "")


def listed(value: object) -> Sequence[str]:
    """The words of `[a b]`, `a,b` or a list."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return [word for word in re.split(r"[\s,\[\]'\"]+", str(value)) if word]
