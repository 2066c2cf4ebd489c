import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flowledger.flow.errors import BadInput
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.show import token_strip
from flowledger.show.passport import HOPS, draw, passport
from flowledger.show.token_strip import STRIP
from tests.ledger.synthetic import STAGE_MS, synthetic_run


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(synthetic_run(tmp_path_factory.mktemp("passport") / "a")) as opened:
        yield opened


def drawn(ledger: Ledger, sample: str) -> str:
    screen = Console(width=100, record=True, file=io.StringIO(), highlight=False)
    draw(passport(ledger, sample), screen)
    return screen.export_text()


def test_a_sample_is_followed_through_every_stage_in_order(ledger: Ledger) -> None:
    hops = passport(ledger, "5").hops
    assert [hop["stage"] for hop in hops if hop["phase"] is None] == list(STAGE_MS)
    assert [hop["phase"] for hop in hops if hop["phase"]] == ["forward", "loss", "backward"]
    at = [hop["at_ms"] for hop in hops if hop["phase"] is None]
    assert at == [sum(list(STAGE_MS.values())[:n]) for n in range(len(STAGE_MS))]


def test_every_stage_of_a_sample_is_a_hop_in_its_place() -> None:
    of_samples = [name for name in stages() if name not in ("checkpoint", "validate")]
    assert [stage for stage, phase in HOPS if phase is None] == of_samples


def test_every_number_that_is_written_per_token_is_in_the_strip() -> None:
    """What is left has columns of its own: the token, its text, and the masks."""
    columns = {row.token_column for row in tensors().values() if row.token_column}
    assert columns - {name for name, _ in STRIP} == {"token_id", "attention_mask", "response_mask", "loss_mask"}


def test_forward_loss_and_backward_are_those_of_its_own_micro_batch(ledger: Ledger) -> None:
    first, second = passport(ledger, "0"), passport(ledger, "2")
    phases = {
        kind: [hop for hop in found.hops if hop["phase"]] for kind, found in (("first", first), ("second", second))
    }
    assert [hop["latency_ms"] for hop in phases["first"]] == [4.0, 4.0, 4.0]
    assert [b["at_ms"] - a["at_ms"] for a, b in zip(phases["first"], phases["second"], strict=True)] == [
        12.0,
        12.0,
        12.0,
    ]


def test_a_hop_names_what_was_read_and_written_with_the_shape_of_its_slice(ledger: Ledger) -> None:
    hops = {(hop["stage"], hop["phase"]): hop for hop in passport(ledger, "5").hops}
    rollout = {(t["tensor_name"], t["access"]): t["slice"] for t in hops["rollout", None]["tensors"]}
    assert rollout["prompt_ids", "read"] == [4] and rollout["full_sequence", "write"] == [7]
    assert hops["rollout", None]["values"] == {"response_length": 2, "finish_reason": "stop", "versions": [1]}
    assert hops["advantage", None]["values"] == {"advantage": -1.0}


def test_the_strip_has_every_token_and_the_group_is_beside_it(ledger: Ledger) -> None:
    found = passport(ledger, "5")
    assert [token["position"] for token in found.tokens] == list(range(6))
    assert [row["sample_id"] for row in found.group] == ["4", "5"]
    text = drawn(ledger, "5")
    assert "loss share" in text and "▸ 5" in text and "1.105" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def token(position: int, **known: float | str | bool) -> dict[str, object]:
    masks = dict.fromkeys(("attention_mask", "response_mask", "loss_mask"), True)
    return {**dict.fromkeys(name for name, _ in STRIP), "position": position, "token_id": 151_643, "text": "x", "clipped": False, **masks, **known}  # fmt: skip


def strip(tokens: list[dict[str, object]], width: int) -> str:
    screen = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    token_strip.draw(tokens, screen)
    return screen.export_text()


def test_a_column_that_says_nothing_is_named_beneath_the_strip() -> None:
    grpo = {
        "rollout_log_prob": -5.31,
        "old_log_prob": -5.31,
        "kl": 0.0,
        "reward": 0.25,
        "advantage": 1.5,
        "return": 1.5,
    }
    text = strip([token(0, **grpo), token(1, **{**grpo, "rollout_log_prob": -5.62, "old_log_prob": -5.62})], 100)
    assert "old = rollout; return = adv: to the digits shown. kl = 0 throughout." in text
    assert "(in GRPO, without a critic, the advantage)" in text
    head = next(line for line in text.splitlines() if line.startswith(" pos"))
    assert head.split() == ["pos", "id", "text", "A", "R", "L", "rollout", "reward", "adv"]
    ppo = strip([token(0, advantage=1.5, **{"return": 2.5}), token(1, advantage=0.5, **{"return": 2.5})], 100)
    assert "adv  return" in ppo and "= adv" not in ppo


@pytest.mark.parametrize("width", [100, 80, 60, 44])
def test_no_number_of_a_strip_is_cut_however_narrow_the_terminal(width: int) -> None:
    numbers = {name: -(at + 1.2345) for at, (name, _) in enumerate(STRIP)}
    text = strip([token(at, **{name: value - at / 100 for name, value in numbers.items()}) for at in range(3)], width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert {"151643", "-1.234", "-13.23"} <= {*text.split()}
    for heading in (heading for _, heading in STRIP):
        assert heading in text
    assert text.count(" pos ") == {100: 2, 80: 2, 60: 3, 44: 4}[width]


@pytest.mark.parametrize("width", [100, 80])
def test_no_name_of_a_hop_is_broken(ledger: Ledger, width: int) -> None:
    screen = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    draw(passport(ledger, "5"), screen)
    text = screen.export_text()
    assert ("read → written" in text) == (width == 80)
    for name in ("prompt_ids", "full_sequence"):
        assert name in text


def test_a_sample_outside_the_written_groups_says_whose_tokens_there_are(ledger: Ledger) -> None:
    assert passport(ledger, "7").notes == (
        "no tokens: this sample's group was not among the record.groups groups written; of step 1 those of 4, 5 were",
    )


def test_below_level_tokens_the_level_that_is_needed_is_named(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a", level="tensors")) as ledger:
        found = passport(ledger, "1")
        assert found.tokens == [] and found.hops
        assert "recorded at level 'tensors'; record.level=tokens" in found.notes[0]
        assert "recorded at level 'tensors'" in drawn(ledger, "1")


def test_an_unknown_sample_is_answered_with_the_range_that_exists(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no sample '80'; it has 0 to 7"):
        passport(ledger, "80")
    create(tmp_path / "empty", Manifest(run="empty", level="steps"))
    with Ledger(tmp_path / "empty") as empty, pytest.raises(BadInput, match=r"has no samples \(level 'steps'\)"):
        passport(empty, "0")
    create(tmp_path / "told", Manifest(run="told", level="tokens"))
    with Ledger(tmp_path / "told") as told, pytest.raises(BadInput, match="none was told") as error:
        passport(told, "0")
    assert "needs level" not in str(error.value)  # it has the highest
