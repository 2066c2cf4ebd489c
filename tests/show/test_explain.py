"""Every word of the flow can be explained, in two languages, with the facts that the flow holds."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules

import pytest
from rich.cells import cell_len

from flowledger import show
from flowledger.config.dotted import flat
from flowledger.config.schema import RunConfig
from flowledger.flow.dims import SYMBOLS
from flowledger.flow.errors import BadInput
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.show import explain_settings
from flowledger.show.columns import Column
from flowledger.show.explain import explain, explain_rows, meanings
from flowledger.show.explain_algorithms import MADE_BY, algorithm_words
from flowledger.tables import verl
from flowledger.tables.algorithms import WHATS, algorithms, names
from flowledger.tables.metrics import metrics

WORDS = sorted({*tensors(), *stages(), *SYMBOLS, *KINDS, *metrics(), *algorithm_words()})


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


@pytest.mark.parametrize(
    ("word", "meanings_"),
    [
        ("SP", ["Megatron SP", "Ulysses", "sp"]), ("sp", ["sp", "Megatron SP", "Ulysses"]), ("Ulysses", ["Ulysses", "sp"]),
        ("ring", ["CP ring", "cp"]), ("Megatron-SP", ["Megatron SP", "tp"]), ("scheme:ring", ["CP ring"]),
        ("context parallelism", ["CP ring", "CP all-to-all", "cp"]), ("mesh", ["mesh", "batch-vs-sequence"]),
        ("sequence cut", ["batch-vs-sequence"]), ("expert_parallel", ["ep"]),
    ],
)  # fmt: skip
def test_splits_are_found_under_the_names_that_people_use(word, meanings_):
    assert [facts["name"] for facts in meanings(word)] == meanings_
    assert explain(word, "zh").count("\n\n") == len(meanings_) - 1


def test_a_cut_of_the_batch_stands_beside_a_cut_of_sequences():
    text = explain("mesh")
    for fact in ("batch cut: how many samples run at once", "sequence cut: how the tokens within a sample",
                 "[B, S, H] -> [B/dp, S, H]", "[B, S, H] -> [B, S/n, H]", "dp: Cuts the batch", "ep: Cuts experts"):  # fmt: skip
        assert fact in text
    for fact in ("切 batch：同时跑多少条样本", "切序列：一条样本内部", "混淆时"):
        assert fact in explain("mesh", "zh")


def test_the_name_of_a_framework_leads_to_ours():
    assert explain("completion_ids").startswith("response_ids  (= completion_ids)")


def test_an_instance_of_a_metric_pattern_is_explained():
    assert explain_rows("stage_time_s/rollout")["name"] == "stage_time_s/<stage>"


@pytest.mark.parametrize("row", algorithms().values(), ids=lambda row: f"{row.what}:{row.name}")
def test_an_algorithm_shows_every_fact_of_its_row(row):
    asked = f"{row.what}:{row.name}"
    for lang, facts in (
        ("en", (row.formula, row.purpose, row.to_tokens, row.bug)),
        ("zh", (row.formula_zh or row.formula, row.purpose_zh, row.to_tokens_zh, row.bug_zh)),
    ):
        text = explain(asked, lang)
        for fact in (row.source, *facts, *row.inputs, *row.settings, *row.aliases):
            assert fact in text
        assert ((row.surprise if lang == "en" else row.surprise_zh) or "") in text
    rows = explain_rows(asked)
    assert (rows["what"], rows["name"], rows["formula"]) == (row.what, row.name, row.formula)
    assert set(rows["needs"]) == row.needs and rows["chosen_by"] == WHATS[row.what][2]
    json.dumps(rows, allow_nan=False)


def test_inputs_come_with_the_shapes_in_which_the_algorithm_meets_them():
    def shapes(word):
        return {one["tensor"]: one["shape"] for one in explain_rows(word)["inputs"]}

    assert shapes("grpo") == {
        "token_level_reward": "[B_prompt*G, S_resp]", "loss_mask": "[B_prompt*G, S_resp]", "group_id": "[B_prompt*G]",
    }  # fmt: skip
    assert shapes("gspo")["new_log_prob"] == shapes("gspo")["old_log_prob"] == "[B_micro, S_resp]"
    assert shapes("gdpo")["reward_components"] == "[B_prompt*G, N_reward]"
    assert shapes("remax")["baseline_reward"] == "[B_prompt]"


def test_grpo_says_how_one_number_reaches_the_tokens():
    text = explain("grpo")
    for fact in ("(r - mean) / (std + 1e-6)", "2402.03300", "per sample", "repeated on each of its unmasked tokens",
                 "at least 2 samples per prompt", "algorithm.norm_by_std", "A group of one keeps its raw reward"):  # fmt: skip
        assert fact in text
    assert "per token" in explain("gae") and "`critic:`" in explain("gae")
    assert "per sequence" in explain("gspo")


def test_a_name_that_is_an_estimator_and_a_loss_shows_both_and_can_be_told_apart():
    assert [facts["what"] for facts in meanings("gpg")] == ["advantage", "policy_loss"]
    assert [facts["formula"] for facts in meanings("policy_loss:gpg")] == ["-A·log π_new"]
    assert "gpg  [policy_loss]" not in explain("advantage:gpg")


def test_an_alias_of_an_algorithm_leads_to_it():
    assert explain("low_var_kl").startswith("k3  (= low_var_kl)  [kl_form]")
    assert explain("kl_form:kl").startswith("k1  (= kl)")


@pytest.mark.parametrize(
    ("asked", "heading"),
    [
        ("PPO", "gae  (= ppo)  [advantage]"),
        ("Dr-GRPO", "dr_grpo  [advantage]"),
        ("loss-share", "loss_share  [column]"),
        ("clipped", "clipped  [column]"),
        ("weight", "rollout_is_weights  (= weight)  [tensor]"),
    ],
)
def test_a_name_need_not_be_spelt_exactly_and_may_be_that_of_a_column(asked: str, heading: str) -> None:
    assert explain(asked).splitlines()[0] == heading


def test_a_tensor_names_the_algorithms_that_may_fill_it():
    assert explain_rows("advantage")["what"] == "tensor"
    assert explain_rows("advantages")["algorithms"] == {"algorithm.advantage": list(names("advantage"))}
    assert explain_rows("stage:advantage")["algorithms"] == {"algorithm.advantage": list(names("advantage"))}
    assert "seq-mean-token-mean" in explain("tensor:policy_loss")
    assert "algorithms" not in explain("tensor:reward")
    assert set(MADE_BY) <= tensors().keys() | stages().keys()


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("advantagess", "advantages"),
        ("roll_out", "rollout"),
        ("S_rsp", "S_resp"),
        ("reinforce_plusplus", "reinforce_plus_plus"),
        ("policy_loss:gsp", "gspo"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(word, near):
    with pytest.raises(BadInput, match=f"did you mean {near}"):
        explain(word)


def test_a_word_asked_for_under_the_wrong_heading_is_refused():
    with pytest.raises(BadInput):
        explain_rows("stage:logits")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_values_stand_in_one_column_of_the_terminal(lang):
    for line in explain("gae", lang).splitlines()[1:]:
        assert cell_len(re.match(r"  (\S+( \S+)*)? +", line)[0]) == 18, line
    assert f"critic{'：' if lang == 'zh' else ': '}" in explain("gae", lang)


@pytest.mark.parametrize(
    ("asked", "name", "fact"),
    [
        ("placement", "placement", "Shard(d)"), ("shards", "shards", "shapes_conserved"), ("collectives", "collectives", "all_reduce"),
        ("hang", "hang", "record.hang_after_s"), ("owner rank", "owner_rank", "0-12:4"), ("owner_rank", "owner_rank", "0-12:4"),
        ("Waiting", "waiting", "is_there"),
    ],
)  # fmt: skip
def test_words_of_shards_and_recordings_are_defined(asked, name, fact):
    (facts,) = meanings(asked)
    assert (facts["what"], facts["name"]) == ("word", name)
    for lang in ("en", "zh"):
        assert fact in explain(asked, lang)
    assert explain(f"word:{asked}").endswith(explain(asked).partition("\n")[2])


@pytest.mark.parametrize(
    ("asked", "two"), [("SP", ("Megatron SP", "Ulysses")), ("context_parallel", ("CP ring", "CP all-to-all"))]
)
def test_a_name_of_two_schemes_begins_by_saying_so(asked, two):
    line, chinese = explain(asked).splitlines()[0], explain(asked, "zh").splitlines()[0]
    assert line.startswith(f"There are two that are called {asked}:") and chinese.startswith(f"叫 {asked} 的有两种：")
    assert all(name in line and name in chinese for name in two)
    assert not explain("ring").startswith("There are") and not explain("values").startswith("There are")


@pytest.mark.parametrize(("asked", "name", "key"), [
    ("beta", "beta", "actor_rollout_ref.actor.kl_loss_coef"), ("kl_coef", "beta", "algorithm.kl_coef"),
    ("mini_batch", "mini_batch", "ppo_mini_batch_size"), ("micro batch", "micro_batch", "per_device_train_batch_size"),
    ("batch size", "batch_size", "data.train_batch_size"), ("lr", "learning_rate", "optim.lr"), ("num_generations", "group_size", "rollout.n"),
    ("actor_rollout_ref.rollout.temperature", "temperature", "rollout.temperature"), ("eps_clip", "clip_range", "algorithm.clip_low"),
])  # fmt: skip
def test_settings_are_explained_by_the_names_that_people_use(asked, name, key):
    found = next(one for one in meanings(asked) if one["what"] == "setting")
    assert found["name"] == name and any(key in text for text in found["keys"].values())
    assert "[setting]" in explain(asked) and "各框架的键" in explain(asked, "zh")


def test_the_keys_of_settings_are_those_of_the_frameworks_and_other_words_are_explained():
    own, of_verl = RunConfig.model_json_schema(), flat(verl.defaults(verl.HEAD, "ppo_trainer"))
    trl = tomllib.loads(files("flowledger.tables").joinpath("trl.toml").read_text(encoding="utf-8"))
    of_trl = set(trl["unset"]).union(*(rows for rows in trl.values() if isinstance(rows, dict)))
    for one in explain_settings.SETTINGS:
        for framework, text in one.keys.items():
            for key in (word.partition(" (")[0].strip() for word in text.split(",")):
                if framework == "flowledger":
                    section = own
                    for word in key.split("."):
                        found = section["properties"][word]
                        refs = [part["$ref"] for part in (found, *found.get("anyOf", ())) if "$ref" in part]
                        section = own["$defs"][refs[0].rpartition("/")[2]] if refs else found
                elif framework in ("verl", "trl"):
                    assert key in (of_verl if framework == "verl" else of_trl), key
        assert all(meanings(word) for word in one.see)


def columns_of(value: object) -> Iterator[Column]:
    """Every column in a table, or in a constant that holds some."""
    if isinstance(value, Column):
        yield value
    elif isinstance(value, Mapping):
        yield from (column for one in value.values() for column in columns_of(one))
    elif isinstance(value, tuple | list):
        yield from (column for one in value for column in columns_of(one))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (column for one in fields(value) for column in columns_of(getattr(value, one.name)))


EXPORTS = ("export_otlp_post",)  # without tables, and with a library that need not be there


def test_every_heading_of_every_table_is_explained_in_both_languages() -> None:
    modules = [
        import_module(f"flowledger.show.{one.name}") for one in iter_modules(show.__path__) if one.name not in EXPORTS
    ]
    found = {column.heading for module in modules for value in vars(module).values() for column in columns_of(value)}
    assert {"resid", "frag", "local shard shape", "needed until", "of device", "noticed by", "outcome"} <= found
    for heading in sorted(found):
        assert explain(heading).startswith(meanings(heading)[0]["name"])
        assert all(facts.get("meaning") != facts_zh.get("meaning") for facts, facts_zh in zip(meanings(heading), meanings(heading, "zh"), strict=True) if facts["what"] == "heading")  # fmt: skip


@pytest.mark.parametrize(("asked", "symbols"), [("B_prompt*G", ["B_prompt", "G"]), ("[B_micro, S_prompt + S_resp]", ["B_micro", "S_prompt", "S_resp"])])  # fmt: skip
def test_a_shape_is_explained_by_its_symbols(asked: str, symbols: list[str]) -> None:
    assert [facts["name"] for facts in meanings(asked)] == symbols
    with pytest.raises(BadInput):
        meanings(f"{asked.strip('[]')}*nobody")
