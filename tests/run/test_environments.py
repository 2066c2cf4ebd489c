"""Environments: what a function is given and may answer, how its text becomes tokens, and that no loss ever sees them."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowledger import cli
from flowledger.cli import page
from flowledger.config.schema import Data, Rollout
from flowledger.diagnose import laws
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.run import loop, stages, tiny
from flowledger.run.environments import KEYWORDS, Conversations, Environment, open_environment
from flowledger.run.problems import Problem
from tests.run.worlds import EXAMPLES, config

# In the manner of ChatML, with the specials of the byte tokenizer, which writes `<|eos|>` as one token.
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
SOURCE = """
def wants_more(messages, question): return None
def positional(messages, /): return None
def anything(**known): return ",".join(sorted(known))
async def later(messages): return None
"""


def chats(function: Callable[..., Any], *words: str, template: str | None = None, **data: Any) -> Conversations:
    """Conversations over two problems with two samples each, numbered from 40."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    environment = Environment(
        function=function, words=words, key="rollout.environment = 'mine'", data=Data(path="p.jsonl", **data)
    )
    problems = [Problem(text=f"p{n}", answer=n, index=n, extra={"hint": n}) for n in range(2)]
    return Conversations(
        environment=environment, tokenizer=tokenizer, problems=problems, sample_id=torch.arange(40, 44)
    )


def test_a_function_is_given_the_chat_so_far_and_what_is_known_of_the_sample() -> None:
    seen: list[dict[str, Any]] = []

    def remember(**known: Any) -> str:
        seen.append(known)
        return "go on"

    talk = chats(remember, *KEYWORDS, system_prompt="be brief")
    assert talk.answer(3, [*b"one", tiny.EOS]) == list(b"go on")
    talk.answer(0, list(b"else"))
    talk.answer(3, list(b"two"))
    start = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "p1"}]
    said = [("assistant", "one"), ("user", "go on"), ("assistant", "two")]
    assert seen[2] == {
        "messages": [*start, *({"role": role, "content": text} for role, text in said)],
        "prompt": "p1", "answer": 1, "sample_id": 43, "extra": {"hint": 1},
    }  # fmt: skip
    assert seen[1]["prompt"] == "p0"


def test_none_ends_and_a_message_has_a_role_of_its_own() -> None:
    assert chats(lambda: None).answer(0, [1]) is None
    tool = {"role": "tool", "content": "42"}
    talk = chats(lambda: tool, template=TEMPLATE)
    assert (
        bytes(token for token in talk.answer(0, [49, tiny.EOS]) or () if token < 256)
        == b"\n<|bos|>tool\n42<|eos|>\n<|bos|>assistant\n"
    )


@pytest.mark.parametrize("stop", ["<|eos|>", ";"])
def test_with_a_chat_template_the_whole_reads_as_the_template_writes_it(stop: str) -> None:
    """Also where a turn ends with another token than the template's own: then that is the environment's to write."""
    talk = chats(lambda messages: "why?", "messages", template=TEMPLATE)
    tokenizer = talk.tokenizer
    user, start = {"role": "user", "content": "p0"}, "<|bos|>assistant\n"
    text = str(tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True))
    last = tiny.EOS if stop == "<|eos|>" else ord(stop)
    for turn in (b"so", b"yes"):
        ids = [*turn, last]
        answered = talk.answer(0, ids)
        assert answered is not None
        text += tokenizer.decode(ids) + tokenizer.decode(answered)
    spoken = [{"role": "assistant", "content": said + stop.replace("<|eos|>", "")} for said in ("so", "yes")]
    whole = [user, spoken[0], {"role": "user", "content": "why?"}, spoken[1], {"role": "user", "content": "why?"}]
    assert text == tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert text.endswith(start)


def test_with_no_template_asked_for_the_text_is_all_there_is() -> None:
    talk = chats(lambda: "why?", template=TEMPLATE, chat_template=False)
    assert talk.answer(0, [49, tiny.EOS]) == list(b"why?")


def fails(**_: Any) -> str:
    raise ValueError("no good")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (fails, r"raised ValueError: no good after turn 2"),
        (lambda **_: sys.exit(3), r"raised SystemExit: 3 after turn 2"),
        (lambda **_: 3, r"returned a int \(it must return a text, a message .* or None.* after turn 2"),
        (lambda **_: {"role": "tool"}, r"returned a dict .* after turn 2"),
        (lambda **_: "half a pair \udc80", r"returned what is no text \(UnicodeEncodeError: .* after turn 2"),
        (lambda **_: {"role": "\ud83d", "content": "x"}, r"returned what is no text .* after turn 2"),
    ],
)
def test_a_function_that_fails_ends_its_response_and_says_why(function: Callable[..., Any], says: str) -> None:
    """The second turn of sample index 1; index 2 is answered before and after."""
    good = iter([True, False])
    talk = chats(
        lambda **known: function() if known["sample_id"] == 41 and not next(good) else "go on", *KEYWORDS,
        template=TEMPLATE,
    )  # fmt: skip
    assert talk.answer(1, [1]) and talk.answer(2, [1])
    assert not talk.errors
    assert talk.answer(1, [1]) is None
    assert talk.answer(2, [1])
    assert list(talk.errors) == [1]
    assert re.match(rf"rollout\.environment = 'mine' {says}", talk.errors[1])


def test_a_message_that_the_function_fills_anew_changes_nothing_that_was_said() -> None:
    said = {"role": "user", "content": ""}
    seen: list[list[str]] = []

    def counted(messages: list[dict[str, Any]]) -> dict[str, str]:
        seen.append([message["content"] for message in messages])
        said["content"] = str(len(seen))
        return said

    talk = chats(counted, "messages")
    for turn in (b"a", b"b", b"c"):
        talk.answer(0, list(turn))
    assert seen[2] == ["p0", "a", "1", "b", "2", "c"]


def test_a_template_that_refuses_the_answer_says_what_to_do() -> None:
    talk = chats(lambda: "x", template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        BadInput, match=r"refuses a message of role 'user'.*roles must alternate.*chat_template to false"
    ):
        talk.answer(0, [1])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[-1].content }}", r"leaves out a turn of the policy once it is answered"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }};{% endfor %}",
            r"leaves out what a message of role 'tool' says",
        ),
    ],
)
def test_a_template_that_would_lose_the_answer_is_refused(template: str, says: str) -> None:
    talk = chats(lambda: {"role": "tool", "content": "42"}, template=template)
    with pytest.raises(BadInput, match=rf"^rollout\.environment = 'mine': the chat template {says}.*chat_template"):
        talk.answer(0, [1])
    assert chats(lambda: {"role": "tool", "content": ""}, template=TEMPLATE).answer(0, [1])


@pytest.mark.parametrize(
    ("name", "turns", "says"),
    [
        (None, 3, r"rollout\.max_turns = 3 with rollout\.environment = None: name one, or set it to 1"),
        ("anything", 1, r"rollout\.max_turns = 1 with .*: set it to 2 or more"),
        ("wants_more", 2, r"cannot be called with messages, prompt, answer, sample_id, extra by name: .*question"),
        ("positional", 2, r"cannot be called with .*messages'"),
        ("later", 2, r"later' is an async function; give one that returns its answer"),
        ("anythin", 2, r"has no function anythin.*did you mean anything"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(tmp_path: Path, name: str, turns: int, says: str) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    path = name and f"{tmp_path / 'mine.py'}:{name}"
    with pytest.raises(BadInput, match=says):
        open_environment(Rollout(environment=path, max_turns=turns), Data(path="p.jsonl"))


def test_a_function_is_called_with_the_words_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    made = open_environment(Rollout(environment=f"{tmp_path / 'mine.py'}:anything", max_turns=2), Data(path="p.jsonl"))
    assert made is not None
    assert made.words == KEYWORDS
    assert open_environment(Rollout(), Data(path="p.jsonl")) is None


# ------------------------------------------------------------ in a step

LETTERS = tuple(range(0, 256, 4))  # a quarter of the bytes end a turn, so that a model that is not trained has several


def talking(tmp_path: Path, **changes: Any) -> Any:
    """Samples of up to four turns, answered with two bytes each."""
    (tmp_path / "mine.py").write_text("def answer(sample_id): return 'ab' if sample_id % 3 else 'xyz'\n")
    rollout = {
        "samples_per_prompt": 3, "max_response_tokens": 16, "max_turns": 4, "stop_token_ids": LETTERS,
        "environment": f"{tmp_path / 'mine.py'}:answer",
    }  # fmt: skip
    return config(rollout=rollout, **changes)


def caught(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[dict[str, Any]], None]) -> list[Any]:
    """Results of a stage, called with arguments that `change` has seen and may have changed."""
    original, results = getattr(stages, name), []

    def wrapper(**arguments: Any) -> Any:
        change(arguments)
        results.append(original(**arguments))
        return results[-1]

    monkeypatch.setattr(stages, name, wrapper)
    return results


ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {}, "reinforce_plus_plus": {}, "opo": {}, "tir_optimal_token_baseline": {"old_log_prob": True},
}  # fmt: skip


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_that_stands_on_an_environment_token_reaches_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    """The step is run twice: as it is, and with large numbers in all masked places of what stages hand on."""
    made = talking(
        tmp_path, algorithm={"advantage": estimator}, actor={"micro_batch": {"samples": 6}, **ESTIMATORS[estimator]}
    )

    def spoil(arguments: dict[str, Any]) -> None:
        masked = arguments["loss_mask"] == 0
        assert int(masked.sum()) > 5
        for name in ("rollout_log_prob", "old_log_prob", "advantages", "sum_pi_squared"):
            if arguments.get(name) is not None:
                arguments[name] = torch.where(masked, 3.0, arguments[name])

    def weights() -> list[torch.Tensor]:
        with loop.prepared(made) as world:
            loop.rl_step(step=0, world=world)
            return [parameter.detach().clone() for parameter in world.policy.model.parameters()]

    plain = weights()
    for stage in ("advantage", "update_actor"):
        caught(monkeypatch, stage, spoil)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights(), strict=True))


def test_masks_positions_and_rewards_of_a_conversation_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = caught(monkeypatch, "rollout", lambda arguments: None)
    scored = caught(monkeypatch, "reward", lambda arguments: None)
    kept = caught(monkeypatch, "filter", lambda arguments: None)
    with loop.prepared(talking(tmp_path)) as world:
        report = loop.rl_step(step=0, world=world)
    r, s, f = rolled[0], scored[0], kept[0]
    width = r.response_mask.shape[1]
    written, sampled = r.attention_mask[:, -width:].bool(), r.response_mask.bool()
    assert not (sampled & ~written).any()
    assert not (f.loss_mask.bool() & ~sampled).any()
    answers = bytes(r.response_ids[written & ~sampled].tolist())
    assert len(answers) > 6
    assert answers == b"".join(b"ab" if sample % 3 else b"xyz" for sample in _speakers(written, sampled))
    for row, mask in zip(r.position_ids, r.attention_mask.bool(), strict=True):
        assert row[mask].tolist() == list(range(int(mask.sum())))
    lies = s.token_level_reward != 0
    assert not (lies & ~sampled).any()
    assert all(
        int(row.nonzero().max()) == int(own.nonzero().max())
        for row, own in zip(lies, sampled, strict=True)
        if row.any()
    )
    # In the trainer's forward each sampled token has the log-prob with which it was sampled.
    assert report.metrics["rollout_gap/max"] < 1e-4
    assert report.metrics["environment_tokens"] == pytest.approx(len(answers) / int(written.sum()))


def test_a_tool_that_fails_once_costs_one_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = caught(monkeypatch, "rollout", lambda arguments: None)
    kept = caught(monkeypatch, "filter", lambda arguments: None)
    made = talking(tmp_path)
    calls: list[int] = []

    def flaky(sample_id: int) -> str:
        calls.append(sample_id)
        if len(calls) == 3:
            raise ConnectionError("the tool is down")
        return "ab"

    with loop.prepared(made) as world:
        assert world.environment is not None
        loop.rl_step(step=0, world=replace(world, environment=replace(world.environment, function=flaky)))
    reasons, errors = kept[0].dropped_reason, rolled[0].environment_errors
    assert [sample for sample, reason in enumerate(reasons) if reason == "environment_error"] == [calls[2]]
    assert errors[calls[2]].endswith("raised ConnectionError: the tool is down after turn 1")
    assert int(kept[0].loss_mask[calls[2]].sum()) == 0 < int(rolled[0].response_mask[calls[2]].sum())
    assert sum(reason is None for reason in reasons) == sum(error is None for error in errors) == 5


def test_an_environment_that_always_fails_ends_the_run_and_is_quoted(tmp_path: Path) -> None:
    made = talking(tmp_path)
    (tmp_path / "mine.py").write_text("def answer(): raise ConnectionError('the tool is down')\n")
    stops = {**made.rollout.model_dump(), "stop_token_ids": tuple(range(256))}
    with (
        pytest.raises(BadInput, match=r"\(environment_error 6\).*; sample 0: .*the tool is down after turn 1; mend"),
        loop.prepared(config(rollout=stops)) as world,
    ):
        loop.rl_step(step=0, world=world)


def _speakers(written: torch.Tensor, sampled: torch.Tensor) -> list[int]:
    """The sample of each answer, in reading order."""
    inside = (written & ~sampled).long()
    begins = inside.diff(dim=1, prepend=torch.zeros_like(inside[:, :1])) == 1
    return [int(row) for row in begins.nonzero()[:, 0]]


def test_the_example_runs_and_the_passport_shows_what_the_calculator_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["flowledger", *words])
        try:
            cli.main()
        except SystemExit as leave:
            assert not leave.code, capsys.readouterr().err
        return capsys.readouterr().out

    run = tmp_path / "talk"
    monkeypatch.setattr(page, "write", lambda *_: None)  # its longest part, which nothing here reads
    # Hot enough, and long enough, for a model that is not trained to write `=` in the one step that is run.
    call(
        "run",
        f"{EXAMPLES / 'multi_turn.yaml'}",
        "steps=1",
        "rollout.max_response_tokens=64",
        "record.groups=4",
        "-o",
        str(run),
    )
    with Ledger(run) as ledger:
        said = ledger.rows(
            "SELECT sample_id, position, text, response_mask, loss_mask, rollout_log_prob FROM tokens_merged "
            "WHERE attention_mask = 1 AND response_mask = 0 ORDER BY sample_id, position"
        )
        lengths = ledger.rows(
            "SELECT t.sample_id, count(*) AS n, any_value(s.prompt_length + s.response_length) AS due "
            "FROM tokens_merged t JOIN samples_merged s USING (sample_id) WHERE t.attention_mask = 1 GROUP BY ALL"
        )
        broken = [finding.message for finding in laws.check(ledger) if finding.verdict == "fail"]
    assert {row["text"] for row in said} <= set("0123456789?\n\u010a")
    assert said
    assert {(row["response_mask"], row["loss_mask"], row["rollout_log_prob"]) for row in said} == {(0, 0, None)}
    assert all(row["n"] == row["due"] for row in lengths)
    shown = json.loads(call("sample", str(run), said[0]["sample_id"], "--json"))
    token = next(row for row in shown["tokens"] if row["position"] == said[0]["position"])
    assert (token["attention_mask"], token["response_mask"], token["loss_mask"]) == (1, 0, 0)
    assert not broken
