import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from flowledger.config.schema import Data
from flowledger.flow.errors import BadInput
from flowledger.run import prompts, tiny

TOKENIZER = tiny.tokenizer()


def written(folder: Path, *records: Any) -> str:
    path = folder / "p.jsonl"
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_are_padded_on_the_left_and_positions_count_real_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "abc"}, {"prompt": "e"})
    taken = prompts.take(
        prompts.open_source(Data(path=path, shuffle=False), seed=0),
        TOKENIZER,
        Data(path=path, shuffle=False, prompts_per_step=2),
        0,
    )
    assert taken.prompt_ids.tolist() == [[97, 98, 99], [tiny.PAD, tiny.PAD, 101]]
    assert taken.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert taken.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert taken.prompt_length.tolist() == [3, 1]


def test_each_pass_over_a_file_takes_every_problem_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": str(n)} for n in range(12)))
    source = prompts.open_source(Data(path=path), seed=5)
    passes = [[p.text for step in range(3) for p in source.batch(3 * turn + step, 4)] for turn in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(str(n) for n in range(12))
    assert passes[0] != passes[1]
    again = prompts.open_source(Data(path=path), seed=5)
    assert [p.text for p in again.batch(4, 4)] == passes[1][4:8]  # no need to have seen the steps before


def test_a_batch_larger_than_the_file_goes_around(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    source = prompts.open_source(Data(path=path, shuffle=False), seed=0)
    assert [p.text for p in source.batch(0, 5)] == list("ababa")
    assert [p.text for p in source.batch(1, 5)] == list("babab")


def test_a_reasoning_gym_task_never_ends_and_depends_on_seed_and_step_alone() -> None:
    def texts(seed: int, step: int) -> list[str]:
        source = prompts.open_source(Data(task="spell_backward"), seed=seed)
        return [p.text for p in source.batch(step, 3)]

    assert texts(0, 7) == texts(0, 7)
    assert texts(0, 7) != texts(1, 7)
    assert texts(0, 7) != texts(0, 8)
    assert len(texts(0, 10_000)) == 3  # beyond the size of any one data set


def test_chat_messages_and_nested_keys_are_read(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    path = written(tmp_path, {"prompt": chat, "reward_model": {"ground_truth": "4"}, "level": 3})
    (problem,) = prompts.open_source(Data(path=path, answer_key="reward_model.ground_truth"), seed=0).batch(0, 1)
    assert problem.text == "be brief\n\n2+2?"
    assert problem.messages == tuple(chat)
    assert problem.answer == "4"
    assert problem.extra["level"] == 3


def test_parquet_gives_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "2"})
    target = tmp_path / "p.parquet"
    duckdb.sql(f"copy (select * from read_json('{path}')) to '{target}' (format parquet)")
    pairs = [
        [(p.text, str(p.answer)) for p in prompts.open_source(Data(path=str(file), shuffle=False), seed=0).batch(0, 2)]
        for file in (path, target)
    ]
    assert pairs[0] == pairs[1] == [("x", "1"), ("y", "2")]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"p\.jsonl:2: not JSON at column \d+"),
        (['{"prompt": "a"}', "", "[1]"], r"p\.jsonl:3: a list, must be an object"),
        (['{"promt": "a"}'], r"p\.jsonl:1: no key 'prompt'.*did you mean promt\?"),
        (['{"prompt": "  "}'], r"p\.jsonl:1: the prompt is empty"),
        (['{"prompt": 4}'], r"p\.jsonl:1: the prompt is a int"),
        (['{"prompt": [{"role": "user"}]}'], r"p\.jsonl:1: .* is no message"),
        ([""], r"holds no prompts"),
        (['{"prompt": []}'], r"p\.jsonl:1: the prompt is an empty list"),
        (['{"prompt": "a\\ud800"}'], r"p\.jsonl:1: prompt holds half a surrogate pair \(\\ud800\)"),
        (['{"prompt": "a", "x": {"y": ["\\udfff"]}}'], r"p\.jsonl:1: x\.y holds half a surrogate pair"),
        (['{"prompt": "a", "\\ud800": 1}'], r"p\.jsonl:1: a key holds half a surrogate pair"),
        (['{"prompt": "a", "answer": 18446744073709551616}'], r"p\.jsonl:1: the integer 18446744073709551616 has more"),
        (['{"prompt": "a", "answer": %s}' % ("9" * 5000)], r"p\.jsonl:1: the integer 9+… \(5000 digits\)"),
        (["[" * 100_000], r"p\.jsonl:1: nested too deeply"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, records: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        prompts.open_source(Data(path=written(tmp_path, *records)), seed=0)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 18446744073709551615}\n')
    (problem,) = prompts.open_source(Data(path=str(tmp_path / "p.jsonl")), seed=0).batch(0, 1)
    assert (problem.text, problem.answer) == ("a", 2**64 - 1)


def test_a_file_that_is_missing_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"is a directory; give a \.jsonl"):
        prompts.open_source(Data(path=str(tmp_path)), seed=0)
    with pytest.raises(BadInput, match="there is no such file"):
        prompts.open_source(Data(path=str(tmp_path / "no.jsonl")), seed=0)
    (tmp_path / "p.csv").write_text("prompt")
    with pytest.raises(BadInput, match=r"ends in '\.csv'; it must be \.jsonl or \.parquet"):
        prompts.open_source(Data(path=str(tmp_path / "p.csv")), seed=0)
    (tmp_path / "p.parquet").write_text("no parquet at all")
    with pytest.raises(BadInput, match="not Parquet"):
        prompts.open_source(Data(path=str(tmp_path / "p.parquet")), seed=0)


def test_an_unknown_task_or_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match=r"data\.task = 'spell_backwards' is none.*did you mean spell_backward\?"):
        prompts.open_source(Data(task="spell_backwards"), seed=0)
    with pytest.raises(BadInput, match=r"task_options.*spell_backward refuses them.*did you mean min_word_len\?"):
        prompts.open_source(Data(task="spell_backward", task_options={"min_word_length": 3}), seed=0)


def test_a_prompt_over_the_limit_is_an_error_skipped_or_cut_on_the_left(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "abcdef"}, {"prompt": "gh"}, {"prompt": "ij"})

    def taken(too_long: Any) -> prompts.Taken:
        data = Data(path=path, shuffle=False, prompts_per_step=2, max_prompt_tokens=4, too_long=too_long)
        return prompts.take(prompts.open_source(data, seed=0), TOKENIZER, data, 0)

    with pytest.raises(
        BadInput, match=r"p\.jsonl:1: the prompt has 6 tokens, data\.max_prompt_tokens = 4; set it to 6"
    ):
        taken("error")
    assert [p.text for p in taken("skip").problems] == ["gh", "ij"]
    assert TOKENIZER.decode(taken("truncate_left").prompt_ids[0]) == "cdef"


def test_skipping_everything_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    data = Data(path=written(tmp_path, {"prompt": "abcdef"}), max_prompt_tokens=2, too_long="skip")
    with pytest.raises(BadInput, match=r"all 1 prompts are longer"):
        prompts.take(prompts.open_source(data, seed=0), TOKENIZER, data, 0)


def test_the_chat_template_is_applied_where_there_is_one(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    data = Data(path=written(tmp_path, {"prompt": "hi"}), prompts_per_step=1, system_prompt="S")
    source = prompts.open_source(data, seed=0)
    seen = tokenizer.decode(prompts.take(source, tokenizer, data, 0).prompt_ids[0])
    assert seen == "<system>S<user>hi<assistant>"
    off = data.model_copy(update={"chat_template": False})
    assert tokenizer.decode(prompts.take(source, tokenizer, off, 0).prompt_ids[0]) == "S\n\nhi"
