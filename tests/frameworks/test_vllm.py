"""vLLM itself, recorded: its answers stay the same, and the ledger has what it counts of itself."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import environments
import launch
import pytest

from flowledger.ledger.reader import Ledger


def _answers(folder: Path, log: Path, **more: str) -> dict[str, Any]:
    command = (str(environments.python("verl")), str(launch.HERE / "generate.py"), str(folder))
    printed = launch.run(launch.Launch(command=command, environment=launch.VERL_ENVIRONMENT), log, **more)
    (line,) = [line for line in printed.splitlines() if line.startswith('{"rounds"')]
    answers: dict[str, Any] = json.loads(line)
    return answers


@pytest.mark.timeout(2 * launch.TIMEOUT_S)
def test_recording_changes_nothing_and_the_ledger_has_what_the_engine_says(folder: Path, tmp_path: Path) -> None:
    plain = _answers(folder, tmp_path / "plain.txt")
    run = tmp_path / "run"
    told = _answers(folder, tmp_path / "recorded.txt", FLOWLEDGER_RUN=str(run), FLOWLEDGER_LEVEL="tensors")
    assert _of_those_that_ended(told) == _of_those_that_ended(plain)
    with Ledger(run) as ledger:
        _has_every_request(ledger, told)
        _has_the_numbers(ledger, told)
        assert ledger.rows("SELECT * FROM findings") == []
        weights = ledger.rows("SELECT role, stage FROM spans WHERE name = 'weight_sync' AND event = 'end'")
        assert weights == [{"role": "rollout", "stage": "weight_sync"}] * 2


def _of_those_that_ended(answers: dict[str, Any]) -> list[Any]:
    """When a request is given up in the middle, how much it has said depends on the clock; so does what is in the cache."""
    return [
        {name: value for name, value in one.items() if name != "cached_tokens"}
        for round_ in answers["rounds"]
        for one in round_
        if one["reason"] is not None
    ]


def _has_every_request(ledger: Ledger, told: dict[str, Any]) -> None:
    found = {row["request"].rpartition("-")[0]: row for row in ledger.rows("FROM requests")}
    everyone = [
        one | {"version": version} for version, round_ in zip((3, 4), told["rounds"], strict=True) for one in round_
    ]
    assert found.keys() == {one["name"] for one in everyone}
    for one in everyone:
        row = found[one["name"]]
        assert row["finish_reason"] == (one["reason"] or "abort")
        assert (row["prompt_tokens"], row["policy_version"]) == (one["prompt_tokens"], one["version"])
        assert row["cached_tokens"] == one["cached_tokens"]
        if one["reason"] is not None:
            assert row["response_tokens"] == len(one["response"])
        assert 0 <= row["queued_seconds"] <= row["seconds"] < 600


def _has_the_numbers(ledger: Ledger, told: dict[str, Any]) -> None:
    """Its own statistics, and what follows from the answers."""
    found = {row["name"].removeprefix("rollout/"): row["value"] for row in ledger.rows("FROM metrics_by_step")}
    counted, everyone = Counter(told["counted"]), [one for round_ in told["rounds"] for one in round_]
    assert counted["preemptions"] > 0 and counted["cached_tokens"] > 0
    for name in ("preemptions", "cached_tokens", "finished/stop", "finished/length"):
        assert found[name] == counted[name], name
    assert found["finished/abort"] == sum(one["reason"] is None for one in everyone)
    blocks = told["settings"]["num_gpu_blocks_override"] - 1  # one is never given to anybody
    assert found["kv_blocks"] == blocks and blocks / 2 < found["kv_blocks_used"] <= blocks
    most = ledger.rows("SELECT max(value) AS most FROM metrics WHERE name = 'rollout/running'")[0]["most"]
    assert 1 < most <= counted["most_running"] == told["settings"]["max_num_seqs"]
    # A token is sampled by a request's prefill, by each after a preemption, and by each step of decoding.
    (said,) = ledger.rows(
        "SELECT sum(response_tokens)::BIGINT AS tokens, sum(prompt_tokens - cached_tokens)::BIGINT AS prompts FROM requests"
    )
    sampled = found["decode_tokens"] + len(everyone) + found["preemptions"]
    assert 0 <= sampled - said["tokens"] <= found["finished/abort"]  # what was on its way when a request was given up
    assert found["prefill_tokens"] > said["prompts"]  # those of preempted requests twice
