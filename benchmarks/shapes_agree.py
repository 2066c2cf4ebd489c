"""Every shape that a rank has recorded, beside the one that was planned for it, for the lengths that the run came to."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from flowledger.cli import recorded
from flowledger.config.foreign import Reading
from flowledger.config.passes import limits_of
from flowledger.config.schema import MicroBatch, RunConfig
from flowledger.ledger.assemble import meshes_of
from flowledger.ledger.directory import open_run
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import Row, SampleRow, SpanRow, TensorRow
from flowledger.plan.ask import Question, make
from flowledger.plan.communication import communication
from flowledger.plan.course import Course
from flowledger.plan.loop_setting import Place
from flowledger.plan.plan import Plan
from flowledger.plan.rows_of_tokens import Micro, Sample
from flowledger.plan.setting import Setting
from flowledger.plan.shapes import shapes
from flowledger.record.adapters import collectives, loop
from flowledger.record.attach import attach
from flowledger.record.place import Place as Standing
from flowledger.record.recorder import Recorder
from flowledger.run import batching, prompts
from flowledger.run.loop import prepared, train
from flowledger.run.models import bytes_per_token

# (stage, tensor) that a function of several stages returns under its own name, and what it is then.
NAMED = {
    ("old_log_prob", "new_log_prob"): "old_log_prob",
    ("ref_log_prob", "new_log_prob"): "ref_log_prob",
    ("ref_log_prob", "entropy"): "ref_log_prob",
}  # fmt: skip
STAGES = {  # that may cut samples anew -> whose model
    "old_log_prob": "actor", "ref_log_prob": "ref", "values": "critic", "update_critic": "critic",
}  # fmt: skip
FLAT = ("comm_buffer", "activations")  # recorded as sums of storages: no shape of their own
_PIPELINE = ("loss", "forward")  # planned, recorded: a pipeline's last stage has its loss within its forward
_SLOTS = ("B_admit", "B_run", "B_slot")  # samples that run, of as many as there may be


class Rows(list[Row]):
    """What a recorder has written."""

    def put(self, row: Row) -> None:
        self.append(row)


def record(config: RunConfig, path: Path) -> None:
    """The steps of a configuration as one rank of its mesh, recorded operator by operator into the run at `path`."""
    kept = recorded.Recorded()
    settings = config.model_copy(update={"record": config.record.model_copy(update={"ops_every": 1})})
    recorded.train(settings, path, kept, quiet=True)
    kept.close("closed", kept.wrote())


def rows_of_step(config: RunConfig, ops_every: int = 0) -> Rows:
    """The same in memory."""
    rows = Rows()
    with prepared(config) as world:
        ranks = world.ranks
        place = Standing(rank=ranks.rank, meshes=meshes_of(config.mesh.degrees))
        recorder = Recorder(
            rows, level="tensors", rank=ranks.rank, rank_count=ranks.size, bindings=world.bindings, ops_every=ops_every,
            axes={group.ranks: group.name for group in reversed(ranks.groups.values()) if not group.alone}, place=place,
        )  # fmt: skip
        with attach((*loop.PROBES, *(collectives.PROBES if ranks.size > 1 else ())), recorder):
            list(train(world))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the first step of a run compares with its plan."""

    compared: int  # recorded local shapes
    wrong: Sequence[str]
    bytes_wrong: Sequence[str]


def compare(path: Path) -> Agreement:
    """Every local shape, and the bytes of every collective, of a run of several ranks."""
    config = RunConfig.model_validate(open_run(path).manifest.config)
    with Ledger(path) as ledger:
        ranks = [_read(ledger, rank) for rank in range(config.mesh.dp * config.mesh.model)]
    compared = sum(isinstance(row, TensorRow) and _compared(row, config) for rows in ranks for row in rows)
    return Agreement(compared=compared, wrong=wrong(config, ranks), bytes_wrong=bytes_wrong(config, ranks))


def _read(ledger: Ledger, rank: int) -> list[Row]:
    """What one rank wrote of the first step."""
    found: list[Row] = []
    for kind in (TensorRow, SpanRow, SampleRow):
        names = [name for name in kind.__struct_fields__ if name not in ("rewards", "offset")]
        columns = ", ".join(f'"{name}"' for name in names)
        query = f"SELECT {columns} FROM {kind.table} WHERE step = 0 AND rank = ? ORDER BY seq"
        known = (
            {name: value for name, value in row.items() if value is not None} for row in ledger.rows(query, [rank])
        )
        found += [msgspec.convert(row, kind) for row in known]
    return found


@dataclass(frozen=True)
class Step:
    """What the first step of a run came to on all ranks: how long its samples were, and who trained on which together."""

    config: RunConfig
    ranks: Sequence[Sequence[Row]]

    @cached_property
    def plan(self) -> Plan:
        return make(Reading(config=self.config), Question())

    @cached_property
    def samples(self) -> Mapping[str, Sample]:
        """Lengths by sample, and the prompt that it answers."""
        found: dict[str, dict[str, int]] = {}
        for row in self._of(SampleRow):
            known = found.setdefault(row.sample_id, {})
            size = {"prompt": row.prompt_length, "response": row.response_length}
            known |= {name: number for name, number in size.items() if number is not None}
            if row.group_id is not None:
                known["group"] = self._first_of_text[int(row.group_id)]
        return {name: Sample(**known) for name, known in found.items()}

    @cached_property
    def _first_of_text(self) -> list[int]:
        """Of each group the first that answers the same text: a row of tokens holds a text once, whatever groups it is of."""
        source = prompts.open_source(self.config.data, seed=self.config.seed)
        texts = [problem.text for problem in source.batch(0, self.config.data.prompts_per_step)]
        return [texts.index(text) for text in texts]

    def micro_batches(self, rank: int) -> dict[tuple[int, int], Micro]:
        """(mini-batch, micro-batch) -> its samples on this rank, in their order."""
        return {
            place: tuple(self.samples[str(one)] for one in sorted(members))
            for place, members in self._trained(rank).items()
        }

    def _trained(self, rank: int) -> dict[tuple[int, int], set[int]]:
        """(mini-batch, micro-batch) -> ids of its samples on this rank. Only a pipeline's last stage says it."""
        ids: dict[tuple[int, int], set[int]] = {}
        on = self.plan.setting.mesh
        for row in (row for other in on.ranks({"dp": (on.at(rank, "dp"),)}) for row in self.ranks[other]):
            for one in (row.trained or ()) if isinstance(row, SampleRow) and not row.step else ():
                ids.setdefault((one.mini_batch, one.micro_batch), set()).add(int(row.sample_id))
        return ids

    def own(self, rank: int) -> dict[str, dict[tuple[int, int], Micro]]:
        """The same of each stage that cuts samples anew, as the loop's packing cuts them."""
        on, found = self.plan.setting.mesh, {}
        for stage, (limits, mini_batch) in _cutting(self.config, on.degree("dp")).items():
            sizes = self.plan.sizes_of(STAGES[stage])
            each = bytes_per_token(layers=sizes.layers, hidden_size=sizes.hidden)
            rows = [self._rows(on.rank({"dp": at})) for at in range(on.degree("dp"))]
            lengths = [[one.prompt + one.response for one in mine] for mine in rows]
            cuts = [
                batching.split(
                    lengths=of, kept=[True] * len(of), mini_batch_samples=mini_batch or len(of), limits=limits,
                    bytes_per_token=each,
                ).mini_batches
                for of in lengths
            ]  # fmt: skip
            at, places = on.at(rank, "dp"), found.setdefault(stage, {})
            for mini, one in enumerate(cuts[at]):
                most = max(len(of[mini].micro_batches) for of in cuts)
                for micro, mine in enumerate(batching.at_least(most, one.micro_batches, lengths[at])):
                    places[mini, micro] = tuple(rows[at][i] for i in mine)
        return found

    def _rows(self, rank: int) -> list[Sample]:
        """The samples that a rank trains on, in the order of its rows."""
        minis: dict[int, list[int]] = {}
        for (mini, _), members in self._trained(rank).items():
            minis.setdefault(mini, []).extend(members)
        return [self.samples[str(one)] for _, members in sorted(minis.items()) for one in sorted(members)]

    def width(self, name: str) -> int:
        """The last dimension of a tensor of the step."""
        return next(row.local_shape[-1] for row in self._of(TensorRow) if row.tensor_name == name and row.local_shape)

    @cached_property
    def bindings(self) -> dict[str, int]:
        """Lengths that the data decided."""
        prompt, response = self.width("prompt_ids"), self.width("response_ids")
        return {"S_prompt": prompt, "S_resp": response, "S": prompt + response}

    def chunks(self, rank: int, micro: Micro, row: TensorRow) -> Iterator[list[int] | None]:
        """The planned shape, and where a head works in chunks that of the last one."""
        yield row.local_shape
        size = self.config.actor.log_prob_chunk_tokens
        if size and row.local_shape and "T_logit" in (row.dims or "") and row.stage != "rollout":
            yield [self.course(rank).wanted(micro, row.role) % size, *row.local_shape[1:]]

    def planned(self, rank: int, micro: Micro) -> list[TensorRow]:
        """The rows of one rank at one of its micro-batches."""
        if (rank, micro) not in self._made:
            self._made[rank, micro] = self._planned(rank, micro)
        return self._made[rank, micro]

    @cached_property
    def _made(self) -> dict[tuple[int, Micro], list[TensorRow]]:
        return {}

    def _planned(self, rank: int, micro: Micro) -> list[TensorRow]:
        plan = self.plan
        setting = self._of_lengths(plan.setting, rank, micro, "actor")
        others = {
            stage: self._of_lengths(one, rank, micro, STAGES[stage]) for stage, one in plan.setting.of_stage.items()
        }
        return shapes(replace(setting, of_stage=others), plan.classes, rank=rank)

    def _of_lengths(self, setting: Setting, rank: int, micro: Micro, role: str) -> Setting:
        """The setting of a stage of which one micro-batch and the lengths are known."""
        place = Place(config=self.config, on=setting.mesh, micro=micro, role=role)
        longest = max((one.response for one in self.sampled(rank)), default=0)

        def sizes(lies_on: str, rank: int) -> Mapping[str, int]:
            found = dict(place.sizes(lies_on, rank))
            if lies_on == "rollout" and found["N_decode"] == self.config.rollout.max_response_tokens:  # all at once
                found["N_decode"] = longest
            return found

        cache = max((one.prompt for one in self.sampled(rank)), default=0) + self.config.rollout.max_response_tokens - 1
        return replace(setting, bindings={**setting.bindings, **self.bindings, "S_cache": cache}, local=sizes)

    def course(self, rank: int) -> Course:
        """What this rank did, for the collectives that are planned of it."""
        mine, count = self.micro_batches(rank), dict[int, int]()
        for mini, micro in self._places:
            count[mini] = max(count.get(mini, 0), micro + 1)
        batches = [[mine.get((mini, at), ()) for at in range(number)] for mini, number in sorted(count.items())]
        own = {
            stage: [
                [micro for (at, _), micro in of.items() if at == mini] for mini in dict.fromkeys(at for at, _ in of)
            ]
            for stage, of in self.own(rank).items()
        }
        prompt, response = self.bindings["S_prompt"], self.bindings["S_resp"]
        return self.plan.course(rank, batches, own=own, prompt=prompt, response=response)

    @cached_property
    def _places(self) -> set[tuple[int, int]]:
        """Every mini- and micro-batch of the step: all ranks have as many, empty ones too."""
        return {place for rank in range(len(self.ranks)) for place in self.micro_batches(rank)}

    def sampled(self, rank: int) -> list[Sample]:
        """The samples that a rank has sampled."""
        mine = (row.sample_id for row in self.ranks[rank] if isinstance(row, SampleRow) and row.stage == "rollout")
        return [self.samples[one] for one in mine]

    def _of(self, kind: type[Any]) -> Iterator[Any]:
        return (row for rows in self.ranks for row in rows if isinstance(row, kind) and not row.step)


def _cutting(config: RunConfig, dp: int) -> dict[str, tuple[MicroBatch, int | None]]:
    """Stage that cuts samples anew -> its limits, and the samples of its mini-batches on a rank; null: all of them."""
    found: dict[str, tuple[MicroBatch, int | None]] = {
        stage: (limits, None) for stage in STAGES if stage != "update_critic" and (limits := limits_of(config, stage))
    }
    if (critic := config.critic) and (critic.micro_batch or critic.mini_batch_prompts):
        samples = (critic.mini_batch_prompts or config.mini_batch_prompts) * config.rollout.samples_per_prompt
        found["update_critic"] = critic.micro_batch or config.actor.micro_batch, samples // dp
    return found


def wrong(config: RunConfig, ranks: Sequence[Sequence[Row]]) -> list[str]:
    """One line for each recorded shape or placement that was not planned so: `rank 1 update_actor/forward logits …`."""
    step, found = Step(config, ranks), dict[str, None]()
    for rank, rows in enumerate(ranks):
        micros, own = step.micro_batches(rank), step.own(rank)
        for row in rows:
            if isinstance(row, TensorRow) and _compared(row, config):
                there = own.get(row.stage or "", micros)
                due = list(_due(step, rank, row, _micros(row, there, pipeline=config.mesh.pp > 1)))
                if not any(_agree(row, shape, placement) for shape, placement in due):
                    where = f"rank {rank} {row.stage}/{row.phase or ''} {row.tensor_name} [{row.dims}] {row.access}, layer {row.layer}"
                    found[f"{where}: recorded {row.local_shape} {row.placement}, planned {due[:3]}"] = None
    return list(found)


def _compared(row: TensorRow, config: RunConfig) -> bool:
    if row.step or row.stage is None or row.tensor_name in FLAT:
        return False
    # written as 0 where no KL is in the loss: nothing is planned of it then
    measured = config.ref is not None and config.algorithm.kl_in == "loss"
    return measured or (row.stage, row.tensor_name) != ("update_actor", "kl_loss")


def _due(
    step: Step, rank: int, row: TensorRow, micros: Sequence[Micro]
) -> Iterator[tuple[list[int] | None, list[str] | None]]:
    """What was planned of a recorded tensor: local shapes and placements."""
    for micro in micros:
        for one in step.planned(rank, micro):
            if _same(one, row):
                yield from ((shape, one.placement) for shape in step.chunks(rank, micro, one))


def _agree(row: TensorRow, shape: list[int] | None, placement: list[str] | None) -> bool:
    """Fewer slots than planned agree: some samples have ended, or greedy responses are made, one to a prompt."""
    mine, due = row.local_shape or [], shape or []
    slots = (row.dims or "").partition(",")[0] in _SLOTS
    fits = mine == due or (slots and mine[1:] == due[1:] and mine[0] <= due[0])
    return fits and (row.placement == placement or _empty(row))


def _same(planned: TensorRow, row: TensorRow) -> bool:
    """Whether a planned row speaks of what was recorded. Micro-batches are cut before a phase begins."""
    name = NAMED.get((row.stage or "", row.tensor_name), row.tensor_name)
    return (
        (planned.stage, planned.tensor_name) == (row.stage, name)
        and ((planned.dims or "").strip("[]") == row.dims or _empty(row))
        and (
            planned.phase == row.phase or None in (planned.phase, row.phase) or (planned.phase, row.phase) == _PIPELINE
        )
        and (planned.layer == row.layer or row.tensor_name == "hidden_states")
    )


def _empty(row: TensorRow) -> bool:
    """A recorder names a form by its sizes, and every form fits a piece that is empty."""
    return 0 in (row.local_shape or ())


def _micros(row: TensorRow, micros: Mapping[tuple[int, int], Micro], *, pipeline: bool) -> list[Micro]:
    """The micro-batch in which a tensor was seen. Passes without gradient count them through the step, pipelines anew."""
    if row.micro_batch is None:
        return [next(iter(micros.values()), ())]
    if row.mini_batch is not None:
        return [micros.get((row.mini_batch, row.micro_batch), ())]
    there = [micro for _, micro in sorted(micros.items())]
    return there if pipeline else there[row.micro_batch : row.micro_batch + 1] or [()]


def bytes_wrong(config: RunConfig, ranks: Sequence[Sequence[Row]]) -> list[str]:
    """One line for each (stage, phase, kind, group) in which a rank has sent other bytes than planned.

    What a router decides, the tokens that arrive at experts, is compared over the ranks of ep together.
    """
    step, found = Step(config, ranks), []
    planned, sent = Counter[Any](), Counter[Any]()
    for rank, rows in enumerate(ranks):
        for one in communication(step.course(rank)):
            planned[_key(rank, one)] += one.total
        for row in rows:
            if isinstance(row, SpanRow) and row.span_kind == "comm" and row.end_ns is not None and not row.step:
                sent[_key(rank, row)] += row.bytes or 0
    for key in sorted(planned.keys() | sent.keys(), key=str):
        if planned[key] != sent[key]:
            found.append(
                f"rank {key[0]} {key[1]}/{key[2] or ''} {key[3]} over {key[4]}: recorded {sent[key]}, planned {planned[key]}"
            )
    return found


def _key(rank: int, one: Any) -> tuple[Any, ...]:
    together = one.comm_type == "all_to_all" and one.stage not in (None, "balance") and one.group in ("ep", "dp")
    return ("*" if together else rank), one.stage, one.phase, one.comm_type, one.group
