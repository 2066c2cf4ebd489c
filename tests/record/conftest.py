"""The small job of `stage_functions`, recorded into a list."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import stage_functions
from played_gpu import Gpu, Rows

from flowledger.flow.seams import Probe
from flowledger.record.attach import attach
from flowledger.record.gpu import cuda, nvml
from flowledger.record.recorder import Recorder

JOB = "stage_functions"
PROBES = (
    Probe(
        stage=None, target=f"{JOB}:step", scope="step", args={"step": "@step", "model": "@model"}, results={},
        metrics={"": "*"},
    ),
    Probe(
        stage="rollout", target=f"{JOB}:rollout",
        args={"sample_id": "sample_id", "group_id": "group_id", "prompt_length": "prompt_length"},
        results={
            name: name
            for name in ("full_sequence", "attention_mask", "response_mask", "response_ids", "finish_reason")
        },
    ),
    Probe(
        stage="update_actor", target=f"{JOB}:update_actor",
        args={
            "model": "params", "optimizer": "optimizer_state", "sample_id": "sample_id",
            "batch.full_sequence": "full_sequence", "batch.attention_mask": "attention_mask",
            "batch.response_mask": "response_mask",
        },
        results={"args.optimizer": "optimizer_state"},
    ),
    Probe(stage=None, target=f"{JOB}:mini_batch", scope="mini_batch"),
    Probe(
        stage=None, target=f"{JOB}:micro_batch", scope="micro_batch",
        args={"sample_id": "sample_id", "full_sequence": "full_sequence"},
    ),
    Probe(
        stage=None, target=f"{JOB}:forward", scope="call", phase="forward",
        args={"model": "@model", "full_sequence": "full_sequence"}, results={"": "new_log_prob"},
    ),
    Probe(stage=None, target=f"{JOB}:backward", scope="call", phase="backward", results={"args.model": "grads"}),
    Probe(stage=None, target=f"{JOB}:optimizer_step", scope="call", phase="step", results={"": "grad_norm"}),
)  # fmt: skip
BINDINGS = {"B_prompt": 2, "G": 2, "B": 4}


class Job:
    """The job with a model of its own, seeded."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = stage_functions.Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, steps: int = 1, **options: Any) -> None:
        for step in range(steps):
            stage_functions.step(step=step, model=self.model, optimizer=self.optimizer, **options)


@pytest.fixture(autouse=True)
def no_leak() -> Any:
    yield
    stage_functions.KEPT.clear()


@pytest.fixture
def record() -> Callable[..., Any]:
    """`with record(level) as rows:` records the job."""

    @contextmanager
    def recording(level: str = "tensors", probes: Any = PROBES, **options: Any) -> Any:
        rows = Rows()
        options = {"ops_every": 0, "bindings": BINDINGS} | options
        with attach(probes, Recorder(rows, level=level, **options)):
            yield rows

    return recording


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A played GPU, which the process has; the driver's own package is not there."""
    played = Gpu()
    monkeypatch.setattr(cuda, "found", played.find)
    monkeypatch.setattr(nvml, "import_module", lambda _: (_ for _ in ()).throw(ImportError()))
    return played
