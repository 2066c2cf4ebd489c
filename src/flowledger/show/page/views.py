"""The eight views of the page, in their order: each a question, its choices, and the data that answers it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.show.page import flow, lifetimes, memory, mesh, overview, sample, shapes, signals
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """`choices`: what of it a file holds, the first is shown first. `data`: what is drawn of one choice."""

    name: str
    choices: Callable[[Book], Sequence[Choice]]
    data: Callable[[Book, Choice], Data]


VIEWS = (
    View("overview", overview.choices, overview.data),
    View("flow", flow.choices, flow.data),
    View("shapes", shapes.choices, shapes.data),
    View("memory", memory.choices, memory.data),
    View("lifetimes", lifetimes.choices, lifetimes.data),
    View("mesh", mesh.choices, mesh.data),
    View("sample", sample.choices, sample.data),
    View("signals", signals.choices, signals.data),
)
BY_NAME = {view.name: view for view in VIEWS}
