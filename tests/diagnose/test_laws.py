"""The laws hold on healthy runs of any configuration, and each one is broken by the fault that it is there for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowledger.diagnose import laws, shapes
from flowledger.flow.seams import replaced
from flowledger.ledger import directory, manifest, writer
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MemoryRow, MetricRow, SampleRow, StorageRow, TensorRow, TokenRow
from flowledger.record.adapters.loop import PROBES
from flowledger.record.attach import attach
from flowledger.record.recorder import Recorder
from flowledger.run import loop
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")


def record(path: Path, made, faults=(), ops_every: int = 1) -> Path:
    """A recorded run of this configuration; faults are put in beneath the recorder, which sees what they do."""
    with loop.prepared(made) as world:
        book = directory.create(
            path,
            manifest.Manifest(
                run=path.name, level="tokens", config=made.model_dump(mode="json"), bindings=world.bindings
            ),
        )
        ink = writer.Writer(book.part("actor", 0))
        recorder = Recorder(
            ink, level="tokens", bindings=world.bindings, ops_every=ops_every, groups=made.data.prompts_per_step
        )
        with replaced(faults), attach(PROBES, recorder):
            list(loop.train(world))
        ink.close()
        book.close()
    return path


def verdicts(path: Path) -> dict[str, str]:
    with Ledger(path) as ledger:
        return {finding.id: finding.verdict for finding in [*laws.check(ledger), *shapes.check(ledger)]}


ALL_PASS = dict.fromkeys([name for name, _, _ in laws.LAWS], "pass")

dynamic = st.fixed_dictionaries({"samples": st.none(), "max_tokens": st.integers(5, 60), "balance": st.booleans()})
static = st.fixed_dictionaries({"samples": st.integers(1, 2)})


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.sampled_from([1, 2, 4]), group=st.integers(2, 3), response=st.integers(1, 7), running=st.none() | st.integers(1, 5),
    micro=static | dynamic, epochs=st.integers(1, 2), packed=st.booleans(), checkpointing=st.booleans(), halves=st.booleans(),
    kl_in=st.sampled_from(["loss", "reward"]), lora=st.booleans(), seed=st.integers(0, 99), watched=st.integers(1, 2),
)  # fmt: skip
def test_every_law_holds_on_recorded_runs_of_any_configuration(
    tmp_path_factory, prompts, group, response, running, micro, epochs, packed, checkpointing, halves, kl_in, lora, seed,
    watched,
) -> None:  # fmt: skip
    made = config(
        seed=seed, steps=2, ref={"path": "start"}, model={"lora": {"rank": 2} if lora else None},
        algorithm={"kl_coef": 0.05, "kl_in": kl_in}, data={"prompts_per_step": prompts},
        rollout={"samples_per_prompt": group, "max_response_tokens": response, "max_running": running},
        actor={
            "micro_batch": micro, "epochs": epochs, "packed": packed, "activation_checkpointing": checkpointing,
            "mini_batch_prompts": max(1, prompts // 2) if halves else None,
        },
    )  # fmt: skip
    path = record(tmp_path_factory.mktemp("laws") / "run", made, ops_every=watched)
    assert verdicts(path) == ALL_PASS


def lost(original):
    """The last sample of each mini-batch goes through no micro-batch."""

    def shares(**words):
        made = original(**words)
        for batch in made[0].batches.mini_batches:
            object.__setattr__(batch, "micro_batches", batch.micro_batches[:-1])
        return made

    return shares


def other_temperature(original):
    def forward(**words):
        return original(**{**words, "temperature": 2.0})

    return forward


def prompt_in_the_loss(original):
    def stage(**words):
        made = original(**words)
        object.__setattr__(made, "loss_mask", torch.ones_like(made.loss_mask))
        return made

    return stage


LEAK: list[torch.Tensor] = []


def leaking(original):
    """Every forward pass is kept, with its graph."""

    def forward(**words):
        made = original(**words)
        LEAK.append(made.new_log_prob)
        return made

    return forward


FAULTS = {
    "a sample that is never trained": ("flowledger.run.batching:shares", lost, "tokens_conserved"),
    "temperature on one side only": ("flowledger.run.forward:micro_batch_forward", other_temperature, "identities"),
    "a loss mask wider than the response mask": ("flowledger.run.stages:filter", prompt_in_the_loss, "masks_nest"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_breaks_its_law(tmp_path, name: str) -> None:
    target, fault, law = FAULTS[name]
    early = tuple(range(150))  # many tokens end a response, so that responses differ in length
    made = config(rollout={"max_response_tokens": 6, "stop_token_ids": early}, actor={"micro_batch": {"samples": 1}})
    assert verdicts(record(tmp_path / "run", made, [(target, fault)]))[law] == "fail"


@contextmanager
def book(path: Path) -> Iterator[writer.Writer]:
    made = directory.create(path, manifest.Manifest(run="hand", level="tokens", mesh={"dp": 2}))
    ink = writer.Writer(made.part("actor", 0))
    yield ink
    ink.close()
    made.close()


def access(**columns: object) -> TensorRow:
    base = {
        "tensor_name": "prompt_ids", "stage": "rollout", "step": 0, "rank": 0, "dims": "[B_prompt, S_prompt]", "t_ns": 5,
        "logical_shape": [4, 8], "local_shape": [2, 8], "placement": ["dp: Shard(0)"], "dtype": "int64", "numel": 16,
        "bytes": 128, "access": "read",
    }  # fmt: skip
    return TensorRow(**{**base, **columns})  # type: ignore[arg-type]


BY_HAND = {
    "two halves give the whole": ([access(), access(rank=1)], "shapes_conserved", "pass"),
    "a shard is too short": ([access(), access(rank=1, local_shape=[1, 8], numel=8, bytes=64)], "shapes_conserved", "fail"),
    "ranks disagree on the whole": ([access(), access(rank=1, logical_shape=[8, 8])], "shapes_conserved", "fail"),
    "bytes do not fit the dtype": ([access(bytes=64)], "shapes_conserved", "fail"),
    "read after it was freed": (
        [StorageRow(storage=1, event="born", t_ns=1), StorageRow(storage=1, event="freed", t_ns=4), access(storage=1)],
        "lifetimes_close", "fail",
    ),
    "read before it was born": ([StorageRow(storage=1, event="born", t_ns=9), access(storage=1)], "lifetimes_close", "fail"),
    "read while it lives": (
        [StorageRow(storage=1, event="born", t_ns=1), StorageRow(storage=1, event="freed", t_ns=9), access(storage=1)],
        "lifetimes_close", "pass",
    ),
    "kinds exceed the allocator": (
        [MemoryRow(instant="end", kind="total", allocated=10, step=0), MemoryRow(instant="end", kind="param", allocated=11, step=0)],
        "memory_adds_up", "fail",
    ),
    "kinds within the allocator": (
        [MemoryRow(instant="end", kind="total", allocated=10, step=0), MemoryRow(instant="end", kind="param", allocated=9, step=0)],
        "memory_adds_up", "pass",
    ),
    "a prompt token in the loss": (
        [TokenRow(sample_id="0", position=0, step=0, attention_mask=1, response_mask=0, loss_mask=1)], "masks_nest", "fail"
    ),
    "a response token outside attention": (
        [TokenRow(sample_id="0", position=0, step=0, attention_mask=0, response_mask=1, loss_mask=0)], "masks_nest", "fail"
    ),
    "rollout and trainer differ": (
        [TokenRow(sample_id="0", position=3, step=0, response_mask=1, loss_mask=1, old_log_prob=-1.0, rollout_log_prob=-1.1)], "identities", "fail"
    ),
    "a ratio before any update": (
        [TokenRow(sample_id="0", position=3, step=0, response_mask=1, loss_mask=1, old_log_prob=-1.0, ratio=1.2, epoch=0, mini_batch=0)],
        "identities", "fail",
    ),
    "all recorded tokens rejected": (
        [TokenRow(sample_id="0", position=3, step=0, response_mask=1, loss_mask=0, old_log_prob=-1.0)], "identities", "skipped"
    ),
    "nothing to look at": ([SampleRow(sample_id="0", step=0)], "masks_nest", "skipped"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BY_HAND))
def test_laws_by_hand(tmp_path, name: str) -> None:
    rows, law, verdict = BY_HAND[name]
    with book(tmp_path / "run") as ink:
        for row in rows:
            ink.put(row)
    assert verdicts(tmp_path / "run")[law] == verdict


def on_two_ranks(path: Path, framework: str, second: list[int]) -> str:
    """The verdict on shapes where rank 0 holds [2, 8] of a prompt_ids that dp cuts, and rank 1 something else."""
    made = directory.create(path, manifest.Manifest(run="hand", mesh={"dp": 2}, framework=framework))
    for rank, shape in enumerate(([2, 8], second)):
        ink, numel = writer.Writer(made.part("actor", rank)), shape[0] * shape[1]
        ink.put(access(logical_shape=None, rank=rank, local_shape=shape, numel=numel, bytes=8 * numel))
        ink.close()
    made.close()
    return verdicts(path)["shapes_conserved"]


@pytest.mark.parametrize(
    ("framework", "verdict"), [("flowledger", "fail"), ("trl", "pass"), ("verl", "pass"), ("own", "pass")]
)
def test_only_where_each_rank_pads_to_its_own_longest_may_widths_differ(tmp_path, framework: str, verdict: str) -> None:
    assert on_two_ranks(tmp_path / "run", framework, [2, 6]) == verdict
    assert on_two_ranks(tmp_path / "turned", framework, [2, 9]) == verdict
    assert on_two_ranks(tmp_path / "same", framework, [2, 8]) == "pass"


def test_a_process_beside_the_ranks_that_holds_the_whole_is_no_part_of_it(tmp_path) -> None:
    made = directory.create(tmp_path / "run", manifest.Manifest(run="hand", mesh={"dp": 2}, framework="verl"))
    for rank, rows in ((None, 4), (0, 2), (1, 2)):
        ink, whole = writer.Writer(made.part("actor", rank)), [4, 8] if rank is None else None
        ink.put(access(logical_shape=whole, rank=rank, local_shape=[rows, 8], numel=rows * 8, bytes=rows * 64))
        ink.close()
    made.close()
    assert verdicts(tmp_path / "run")["shapes_conserved"] == "pass"


def test_a_rank_with_fewer_samples_than_its_share_is_none_that_pads_alone(tmp_path) -> None:
    assert on_two_ranks(tmp_path / "run", "trl", [3, 8]) == "fail"


def too_low(original):
    """The rollout claims log-probs that are 1 nat too low on its first sample: e is no ratio that 1.5 lets pass."""

    def rollout(**words):
        made = original(**words)
        made.rollout_log_prob[0] -= made.response_mask[0]
        return made

    return rollout


REJECTS = {"rollout_correction": {"rejections": [{"kind": "seq_mean_k1", "high": 1.5}]}}
NOT_TRAINED = {
    "a critic that warms up": ({"critic": {"path": "start", "warmup_steps": 1}, "algorithm": {"advantage": "gae"}}, []),
    "a response that is rejected": ({"algorithm": REJECTS}, [("flowledger.run.stages:rollout", too_low)]),
    "a response that the loss rejects": (
        {"algorithm": {**REJECTS, "policy_loss": "bypass_mode"}}, [("flowledger.run.stages:rollout", too_low)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NOT_TRAINED))
def test_samples_that_are_not_trained_for_a_reason_break_no_law(tmp_path, name: str) -> None:
    changes, faults = NOT_TRAINED[name]
    path = record(tmp_path / "run", config(steps=2, seed=3, **changes), faults)
    found = verdicts(path)
    assert found["tokens_conserved"] == found["masks_nest"] == "pass"
    with Ledger(path) as ledger:
        rows = ledger.rows(
            "SELECT DISTINCT loss_mask, loss_share FROM tokens_merged WHERE sample_id = '0' AND response_mask = 1"
        )
    if faults:
        assert {(row["loss_mask"], row["loss_share"] or 0.0) for row in rows} == {(0, 0.0)}


def test_a_dimension_that_the_configuration_does_not_explain_is_a_finding(tmp_path) -> None:
    made = directory.create(tmp_path / "run", manifest.Manifest(run="hand", level="tokens", bindings={"B_prompt": 8}))
    ink = writer.Writer(made.part("actor", 0))
    ink.put(access(local_shape=[4, 8], numel=32, bytes=256))
    ink.close()
    made.close()
    assert verdicts(tmp_path / "run")["observed_differs_from_configuration"] == "fail"


def test_where_rows_were_dropped_no_law_is_called_broken(tmp_path) -> None:
    with book(tmp_path / "run") as ink:
        ink.put(access(bytes=64))
        ink.put(MetricRow(name="recorder/dropped", raw_name="recorder/dropped", value=3.0, step=0))
    found = verdicts(tmp_path / "run")
    assert found.pop("rows_dropped") == "warn"
    assert found == dict.fromkeys(ALL_PASS, "skipped")


def test_a_mask_that_does_not_broadcast_is_a_finding(tmp_path) -> None:
    with book(tmp_path / "run") as ink:
        ink.put(access(tensor_name="old_log_prob", mask="response_mask", mask_shape=[2, 7]))
    assert verdicts(tmp_path / "run")["mask_does_not_broadcast"] == "fail"


def test_a_leak_is_held_and_its_holder_named(tmp_path) -> None:
    path = record(
        tmp_path / "run",
        config(actor={"micro_batch": {"samples": 1}}),
        [("flowledger.run.forward:micro_batch_forward", leaking)],
    )
    LEAK.clear()
    with Ledger(path) as ledger:
        held = ledger.rows("SELECT DISTINCT holder FROM storages WHERE event = 'held' AND holder IS NOT NULL")
    assert any("LEAK" in row["holder"] for row in held)


@pytest.mark.parametrize(
    ("rows", "lacks"),
    [
        ([TokenRow(sample_id="0", position=3, step=0, loss_mask=0, old_log_prob=-1.0)], "a token in the loss: none"),
        ([SampleRow(sample_id="0", step=0)], "record.level = tokens"),
    ],
)
def test_a_law_on_tokens_says_what_it_lacks(tmp_path, rows, lacks: str) -> None:
    with book(tmp_path / "run") as ink:
        for row in rows:
            ink.put(row)
    with Ledger(tmp_path / "run") as ledger:
        (found,) = [one for one in laws.check(ledger) if one.id == "identities"]
    assert lacks in found.needs[0]
