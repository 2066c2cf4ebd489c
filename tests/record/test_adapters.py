"""The table of probes fits the loop: every target, parameter, result field and tensor is there."""

import dataclasses
import inspect
import typing

import pytest

from flowledger.flow.seams import locate
from flowledger.flow.tensors import tensors
from flowledger.record.adapters.loop import PROBES

IDS = [probe.target.rpartition(":")[2] for probe in PROBES]
STAGES = "flowledger.run.stages:"


@pytest.mark.parametrize("probe", PROBES, ids=IDS)
def test_parameters_and_result_fields_are_those_of_the_function(probe):
    _, _, function = locate(probe.target)
    parameters = inspect.signature(function).parameters
    written = {key.removeprefix("args.") for key in probe.results if key.startswith("args.")}
    assert {key.partition(".")[0] for key in {*probe.args, *written}} <= set(parameters)
    made = typing.get_type_hints(function).get("return")
    fields = {key for key in (*probe.results, *probe.metrics) if key and not key.startswith("args.")}
    if probe.target.endswith(":exchanged"):  # a mapping by name, of what `balance` hands over
        made = typing.get_type_hints(locate(f"{STAGES}balance")[2])["return"]
    if fields:
        assert dataclasses.is_dataclass(made)
        assert fields <= {field.name for field in dataclasses.fields(made)}


@pytest.mark.parametrize("probe", PROBES, ids=IDS)
def test_what_is_not_a_fact_is_a_tensor_of_the_flow(probe):
    names = {name for told in (*probe.args.values(), *probe.results.values()) for name in told.split(" & ")}
    assert {name for name in names if not name.startswith("@")} <= set(tensors())


def test_every_tensor_field_of_every_stage_is_watched():
    for probe in PROBES:
        if probe.target.startswith(STAGES):
            made = typing.get_type_hints(locate(probe.target)[2]).get("return")
            fields = dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
            named = {field.name for field in fields if field.name in tensors()}
            within = probe.stage in ("update_actor", "update_critic") or probe.target.endswith(":baseline_rollout")
            if probe.stage == "balance":  # it makes none on one process; on several, what it exchanges
                probe = next(one for one in PROBES if one.target.endswith(":exchanged"))
            if not within:  # losses are those of the probes within, and greedy responses no samples of the step
                assert named <= set(probe.results), probe.target
