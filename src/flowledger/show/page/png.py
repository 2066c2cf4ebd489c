"""The views as pictures, without a browser: those of their charts that are Vega-Lite specifications."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.show.page import lifetimes, lifetimes_picture, memory, mesh, mesh_picture, overview, signals
from flowledger.show.page.book import Book, Text, text
from flowledger.show.page.memory_course import drawn as readings_of
from flowledger.show.page.packed import unpacked
from flowledger.show.page.signals_rows import distribution_pictures, metric_picture, timeline_picture
from flowledger.show.page.theme import CONFIG, dressed

Spec = dict[str, Any]

WIDTH = 1200
SCALE = 2  # pixels a unit: sharp in print
NOT_DRAWN = ("flow", "shapes", "sample")  # these the page draws itself: a layout of its own, a table, a strip of text


def write(book: Book, folder: Path, lang: str = "en", *, dark: bool = False) -> list[Path]:
    """The files written. Raises BadInput where there is nothing to draw, or nowhere to write to."""
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, spec in pictures(book):
            file = folder / f"{name}.png"
            file.write_bytes(_drawn(dressed({**spec, "config": CONFIG}, lang, dark=dark)))
            made.append(file)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror}") from None
    if not made:
        raise BadInput(f"{book.ledger.run} has nothing that could be drawn: no stages, no memory and no metrics")
    return made


def pictures(book: Book) -> Iterator[tuple[str, Spec]]:
    """Name and specification of every picture, with its rows in it; colours and words are still to be filled in."""
    yield from _overview(overview.data(book, overview.choices(book)[0]))
    yield from _memory(memory.data(book, memory.choices(book)[0]))
    yield from _lifetimes(lifetimes.data(book, lifetimes.choices(book)[0]))
    yield from _mesh(mesh.data(book, mesh.choices(book)[0]))
    yield from _signals(signals.data(book, signals.choices(book)[0]))


def picture(
    spec: Mapping[str, Any], rows: list[dict[str, Any]], title: Mapping[str, Any], *, width: int = WIDTH
) -> Spec:
    """A chart that stands by itself."""
    return {**spec, "width": width, "data": {"values": rows}, "title": title, "padding": 16}


def _overview(data: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    for part, title in {
        "time": text("Where the time goes", "时间花在哪里"),
        "memory": text("Where the memory goes", "显存花在哪里"),
    }.items():
        if bars := data.get(part, {}).get("bars"):
            field = "stage" if part == "time" else "kind"
            spec = data[part]["charts"][part]
            yield f"overview-{part}", picture(_with_legend(spec, field), bars, title)


def _with_legend(spec: Spec, field: str) -> Spec:
    """The page has a table beside the chart that names its colours; a picture has nothing beside it."""
    if "layer" in spec:
        return {**spec, "layer": [_with_legend(layer, field) for layer in spec["layer"]]}
    encoding = spec["encoding"]
    if encoding.get("color", {}).get("field") != field:
        return spec
    return {
        **spec,
        "encoding": {**encoding, "color": {**encoding["color"], "legend": {"orient": "bottom", "title": None}}},
    }


def _memory(data: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    if data.get("absent"):
        return
    process = data["processes"][0]
    rows, charts = unpacked(process["readings"]), process["charts"]
    place = {"step": data["step"], "rank": data["rank"]}
    where = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
    said = process["peak"]["says"] if process["peak"] else []
    if "kinds" in charts:
        named = text(f"Memory by kind: {where}", f"各类显存：{where}")
        shown = readings_of(rows, "kinds", hides=process["hides"])
        yield "memory-kinds", picture(charts["kinds"], shown, {"text": named, "subtitle": said[:2], "offset": 8})
    for name, its_rows, title in (
        ("allocator", rows, text(f"What the allocator says: {where}", f"分配器的读数：{where}")),
        ("stages", process["stages"], text(f"Peak of each stage, planned beside measured: {where}", f"各阶段峰值，计划与实测：{where}")),
        ("tokens", process["tokens"], text(f"A batch that varies, and its peak: {where}", f"动态 batch 与峰值：{where}")),
    ):  # fmt: skip
        if name in charts:
            yield f"memory-{name}", picture(charts[name], its_rows, title)
    if "ranks" in data["charts"]:
        title = text(f"Spread over the ranks: step {data['step']}", f"各 rank 之间的差异：第 {data['step']} 步")
        yield "memory-ranks", picture(data["charts"]["ranks"], data["ranks_spread"], title)


def _lifetimes(data: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    if data.get("absent"):
        return
    spec, rows = lifetimes_picture.picture(data)
    if rows:
        yield "lifetimes", picture(spec, rows, _titled(lifetimes_picture.TITLE, lifetimes_picture.SAYS, data["step"]))


def _mesh(data: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    if data.get("absent"):
        return
    for what, title, spec, rows in mesh_picture.pictures(data):
        yield f"mesh-{what}", picture(spec, rows, _titled(title, mesh_picture.SAYS, data["step"]))


def _titled(title: Text, says: Text, step: int | None) -> Spec:
    at = text("", "") if step is None else text(f": step {step}", f"：第 {step} 步")
    return {"text": {lang: title[lang] + at[lang] for lang in title}, "subtitle": says, "offset": 8}


def _signals(data: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    if data.get("absent"):
        return
    first = [one for one in data["metrics"] if one["group"] == "first"] or data["metrics"][:12]
    if first:
        yield "signals-metrics", _grid([metric_picture(data, one) for one in first])
    if data["timelines"]:
        shown = data["timelines"][0]
        title = text(f"Timeline of step {shown['step']}", f"第 {shown['step']} 步的时间线")
        spec, rows = timeline_picture(data["charts"]["timeline"], shown)
        yield "signals-timeline", picture(spec, rows, title)
    if data["distributions"]:
        yield "signals-distributions", _grid(distribution_pictures(data))


def _grid(specs: list[Spec]) -> Spec:
    """Charts four in a row. Names of layers hold for a whole picture, so none is kept."""
    nameless = [
        {**spec, "layer": [{key: value for key, value in layer.items() if key != "name"} for layer in spec["layer"]]}
        for spec in specs
    ]
    return {"concat": nameless, "columns": 4, "spacing": 24, "padding": 16}


def _drawn(spec: Spec) -> bytes:
    try:
        import vl_convert  # noqa: PLC0415 33 MB that only drawing needs
    except ImportError:
        raise BadInput(
            "pictures are drawn by vl-convert-python, which is not installed: pip install vl-convert-python"
        ) from None
    made: bytes = vl_convert.vegalite_to_png(spec, scale=SCALE)
    return made
