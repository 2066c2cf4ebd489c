"""The table of formats: how each is recognised, and what reads it. To add one, write its two functions and a row here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flowledger.flow.errors import BadInput, nearest
from flowledger.ledger.rows import Row
from flowledger.record.importers import kineto, logs, memory_snapshot, samples, tables, tensorboard, trl, verl, wandb
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One form of file."""

    name: str
    says: str  # what it is, for people
    fits: Callable[[Source], bool]
    read: Callable[[Source, Notes], Iterator[Row]]
    metrics: bool = True  # whether it has numbers of steps that another file may have too
    ordered: bool = True  # written while the run went on: a step that goes back means that the run was resumed
    later: Callable[[Source], bool] | None = None  # which files are read after the others


# The first that fits reads the file; any text is a log.
FORMATS: tuple[Format, ...] = (
    Format(name="memory_snapshot", says="snapshot of torch's allocator (pickle)", fits=memory_snapshot.fits, read=memory_snapshot.read, metrics=False, ordered=False),
    Format(name="torch_trace", says="trace of torch.profiler, or another Chrome trace (JSON)", fits=kineto.fits, read=kineto.read, metrics=False, ordered=False, later=kineto.has_its_own_clock),
    Format(name="verl_file", says="verl's file logger (JSONL)", fits=verl.fits, read=verl.read),
    Format(name="verl_samples", says="verl's rollout_data_dir and validation_data_dir (JSONL)", fits=samples.fits_verl, read=samples.read_verl, metrics=False),
    Format(name="areal_samples", says="AReaL's dumped trajectories (JSONL)", fits=samples.fits_areal, read=samples.read_areal, metrics=False),
    Format(name="nemo_rl_samples", says="NeMo-RL's train_data_step*.jsonl", fits=samples.fits_nemo, read=samples.read_nemo, metrics=False),
    Format(name="trl_completions", says="TRL's completions (Parquet)", fits=samples.fits_trl, read=samples.read_trl, metrics=False),
    Format(name="trainer_state", says="trainer_state.json of TRL and Hugging Face's Trainer", fits=trl.fits_state, read=trl.read_state, ordered=False),
    Format(name="parquet", says="a table with a step column (Parquet)", fits=tables.fits_parquet, read=tables.read_parquet, ordered=False),
    Format(name="jsonl", says="a table with a step, an object a line", fits=tables.fits_json_lines, read=tables.read_json_lines, ordered=False),
    Format(name="json", says="a table with a step, a list of objects", fits=tables.fits_json, read=tables.read_json, ordered=False),
    Format(name="csv", says="a table with a step column (CSV, TSV)", fits=tables.fits_csv, read=tables.read_csv, ordered=False),
    Format(name="wandb", says="what W&B writes offline (run-*.wandb)", fits=wandb.fits, read=wandb.read),
    Format(name="tensorboard", says="TensorBoard's event file", fits=tensorboard.fits, read=tensorboard.read),
    Format(name="log", says="console log of any framework", fits=logs.fits, read=logs.read),
)  # fmt: skip


def format_of(source: Source) -> Format:
    """The format of a file, by its name and its first 64 KiB. Raises BadInput for one that no format fits."""
    if not source.head:
        raise BadInput(f"{source.path} is empty")
    for form in FORMATS:
        if form.fits(source):
            return form
    what = "binary" if b"\0" in source.head else "text"
    raise BadInput(
        f"{source.path} is {what} of no known form; where you know better, say --format with one of: {names()}"
    )


def named(name: str) -> Format:
    """The format of this name. Raises BadInput with the nearest."""
    for form in FORMATS:
        if form.name == name:
            return form
    known = [form.name for form in FORMATS]
    raise BadInput(f"--format {name!r} is none of {names()}{nearest(name, known)}")


def names() -> str:
    return ", ".join(form.name for form in FORMATS)
