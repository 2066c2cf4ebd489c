"""Every word of the flow can be explained, in two languages, with the facts that the flow holds."""

import json
import re

import pytest

from flowledger.flow.dims import SYMBOLS
from flowledger.flow.errors import BadInput
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.show.explain import explain, explain_rows
from flowledger.tables.metrics import metrics

WORDS = sorted({*tensors(), *stages(), *SYMBOLS, *KINDS, *metrics()})


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_explained_in_both_languages(word):
    assert word in explain(word)
    assert re.search(r"[\u4e00-\u9fff]", explain(word, "zh"))
    json.dumps(explain_rows(word), allow_nan=False)


def test_a_tensor_shows_every_fact_of_its_row():
    text = explain("advantages")
    for fact in ("[B_prompt*G, S_resp]", "repeats along S_resp", "from advantage", "float32", "loss_mask", "common bug",
                 "dp=Shard(0)", "update_actor/loss", "actor@update_actor", "tokens.advantage"):  # fmt: skip
        assert fact in text


def test_a_stage_shows_what_it_reads_writes_frees_works_on_and_aggregates():
    facts = explain_rows("stage:advantage")
    assert facts["what"] == "stage"
    assert "token_level_reward" in facts["reads"] and "advantages" in facts["writes"] and "reward" in facts["frees"]
    assert facts["works_on"] == ["group", "sample", "token"] and "group" in facts["aggregates"]


def test_a_word_with_two_meanings_shows_both_and_can_be_told_apart():
    assert "values  [tensor]" in explain("values") and "values  [stage]" in explain("values")
    assert "[stage]" not in explain("tensor:values")
    assert explain_rows("kind:kv_cache")["used_by"] == ["kv_cache"]


def test_the_two_sequence_parallelisms_are_kept_apart():
    assert "Ulysses" in explain("sp") and "rides on tp" in explain("sp")
    assert "Megatron" in explain("tp") and "Ulysses" not in explain("tp")
    assert explain_rows("hidden_states")["variants"]["megatron_sp"]["tp"] == "Shard(1)"


def test_the_name_of_a_framework_leads_to_ours():
    assert explain("completion_ids").startswith("response_ids  (= completion_ids)")


def test_an_instance_of_a_metric_pattern_is_explained():
    assert explain_rows("stage_time_s/rollout")["name"] == "stage_time_s/<stage>"


@pytest.mark.parametrize(
    ("word", "near"), [("advantagess", "advantages"), ("roll_out", "rollout"), ("S_rsp", "S_resp")]
)
def test_an_unknown_word_is_refused_with_the_nearest(word, near):
    with pytest.raises(BadInput, match=f"did you mean {near}"):
        explain(word)


def test_a_word_asked_for_under_the_wrong_heading_is_refused():
    with pytest.raises(BadInput):
        explain_rows("stage:logits")
