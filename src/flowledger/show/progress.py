"""The progress bar of a run, with the figures that people watch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WATCHED = (
    ("reward", "reward/mean", ".3f"),
    ("entropy", "entropy", ".2f"),
    ("kl", "ref_kl", ".1e"),
    ("kl", "reward_kl", ".1e"),  # a step has one of the two: KL is in the loss or in the reward
    ("grad", "grad_norm", ".2f"),
    ("len", "response_length/mean", ".0f"),
    ("tok/s", "tokens_per_s", ",.0f"),
)


def figures(metrics: Mapping[str, float]) -> str:
    """`reward 0.412  entropy 1.52 …`: those of the watched metrics that a step has."""
    return "  ".join(f"{title} {metrics[name]:{form}}" for title, name, form in WATCHED if name in metrics)


@contextmanager
def progress(name: str, steps: int, *, quiet: bool) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yields `advance(step, metrics)`. Where nobody looks at a terminal, each step is one line instead of a bar."""
    screen = Console(stderr=True, highlight=False)
    if quiet or not screen.is_terminal:
        yield (
            (lambda *_: None)
            if quiet
            else lambda step, metrics: screen.print(
                f"step {step} ({step + 1} of {steps})  {figures(metrics)}", soft_wrap=True
            )
        )
        return
    columns = (
        TextColumn(name),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(name, total=steps, figures="")
        yield lambda step, metrics: bar.update(task, completed=step + 1, figures=figures(metrics))
