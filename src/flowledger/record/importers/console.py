"""Lines of console logs that state a step's numbers, one function a framework.

Each takes the place of the reader in the log and a line's text, and gives rows. A step line ends its step.
"""

import re
from collections.abc import Iterator

from flowledger.ledger.rows import MetricRow
from flowledger.record.importers.figures import number, pairs
from flowledger.record.importers.names import Names
from flowledger.record.importers.place import Place
from flowledger.record.importers.speakers import COLOUR, split

VERL = re.compile(r"(?:^|[^\w/@=])step:(\d{1,12}) - ")
GLOBAL_STEP = re.compile(r"Global step (\d{1,12})(?: \[[^\]]*\])?: \{")
SLIME = re.compile(r"\.py:\d+ - (?P<what>[\w./ -]{1,60}?) (?P<step>\d{1,12}): \{")
SLIME_TIMER = re.compile(r"Timer (?P<name>\w+) end \(elapsed: (?P<seconds>[\d.]+)s\)")
AREAL_STEP = re.compile(r"Epoch (\d+)/(\d+) Step (\d+)/(\d+) Train step (\d{1,12})/(\d+) done\.")
NEMO_EPOCH = re.compile(r"={1,60} Epoch (\d{1,9})/\d{1,9} =")
NEMO_STEP = re.compile(r"={1,60} Step (\d{1,12})(?:/(\d{1,12}))? =")
NEMO_LINE = re.compile(
    r"\s*[•-] (?P<name>[^:\n]{1,80}): (?P<value>[-+]?[\d.]+(?:e[-+]?\d+)?|nan|inf|-inf)\s?(?P<unit>s|%)?(?:\s|$)"
)

VERL_NAMES, OPENRLHF_NAMES, SLIME_NAMES = Names("verl"), Names("openrlhf"), Names("slime")
AREAL_NAMES, NEMO_NAMES = Names("areal"), Names("nemo_rl")


def verl(place: Place, text: str) -> Iterator[MetricRow]:
    """`step:12 - key:value - …`: keys may hold `/`, `@`, `=` and `:`; a value has no ` - ` and rarely a `:`."""
    found = VERL.search(text)
    if found is None:
        return
    step = int(found[1])
    place.of("verl")
    place.ended(step)
    names = VERL_NAMES
    held = ""
    for piece in text[found.end() :].split(" - "):
        key, colon, value = piece.rpartition(":")
        if not colon:
            held += f"{piece} - "  # a key with ` - ` in it
            continue
        try:
            figure = float(value)
        except ValueError:
            key, figure = _unusual(place, piece)
            if not key:
                continue
        if held:
            key, held = held + key, ""
        yield MetricRow(name=names[key], raw_name=key, value=figure, step=step)


def _unusual(place: Place, piece: str) -> tuple[str, float]:
    """A value that is not a plain number; an empty key where it is none at all."""
    piece = COLOUR.sub("", piece)
    for at in ("tensor(", "array(", "np.", "torch."):
        if (start := piece.find(f":{at}")) > 0:
            key, value = piece[:start], piece[start + 1 :]
            break
    else:
        key, _, value = piece.rpartition(":")
    try:
        return key, number(value)
    except ValueError:
        place.skip("a value of a step line that is no number", piece)
        return "", 0.0


def openrlhf(place: Place, text: str) -> Iterator[MetricRow]:
    """`✨ Global step 3: {'policy_loss': …}`."""
    if (found := GLOBAL_STEP.search(text)) is None:
        return
    step = int(found[1])
    place.of("openrlhf")
    place.ended(step)
    for key, value in pairs(text[found.end() :]):
        yield OPENRLHF_NAMES.row(key, value, step)


def slime(place: Place, text: str) -> Iterator[MetricRow]:
    """`train_metric_utils.py:33 - perf 3: {'perf/step_time': …}`; the step is the rollout's number."""
    if (found := SLIME.search(text)) is None:
        return
    step = int(found["step"])
    place.of("slime")
    if found["what"] in ("perf", "step", "train"):
        place.ended(step)
    for key, value in pairs(text[found.end() :]):
        yield SLIME_NAMES.row(key, value, step)


def areal_step(place: Place, text: str) -> Iterator[MetricRow]:
    """`Epoch 1/10 Step 3/58 Train step 3/580 done.`: the table that follows belongs to it."""
    if (found := AREAL_STEP.search(text)) is not None:
        place.of("areal")
        place.ended(int(found[5]))
    return iter(())


def areal_table(place: Place, text: str) -> Iterator[MetricRow]:
    """`│ ppo_actor/update/entropy/avg │ 4.2170e-01 │ … │`: names and values by turns."""
    if place.framework != "areal" or place.done is None or "│" not in text:
        return
    cells = [cell.strip() for cell in split(text)[1].split("│")[1:-1]]
    for key, value in zip(cells[::2], cells[1::2], strict=False):
        if not key or not value:
            continue
        try:
            yield AREAL_NAMES.row(key, number(value), place.done)
        except ValueError:
            place.skip("a cell of a table of stats that is no number", f"{key} │ {value}")


def nemo_head(place: Place, text: str) -> Iterator[MetricRow]:
    """`===== Step 3/1000 =====`: what follows belongs to it. A later epoch counts on."""
    if (found := NEMO_EPOCH.search(text)) is not None:
        place.epoch = int(found[1])
    elif (found := NEMO_STEP.search(text)) is not None:
        before = (place.epoch - 1) * int(found[2]) if found[2] and place.epoch > 1 else 0
        place.of("nemo_rl")
        place.began(before + int(found[1]))
    return iter(())


def nemo_line(place: Place, text: str) -> Iterator[MetricRow]:
    """`  • Loss: 0.0123`, `  • policy_training: 12.34s (41.2%)`, under the heading of its step."""
    if place.framework != "nemo_rl" or place.now is None:
        return
    if (found := NEMO_LINE.match(split(text)[1])) is not None:
        yield NEMO_NAMES.row(found["name"].strip(), float(found["value"]), place.now)
