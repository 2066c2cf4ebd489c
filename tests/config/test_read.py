"""Settings come from a file and the command line, each remembers where from, and each fault is one clear line."""

from pathlib import Path

import pytest

from flowledger.config.read import read
from flowledger.flow.errors import BadInput

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def written(tmp_path):
    """A function that writes a file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "a.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def faults(path, *overrides: str) -> list[str]:
    """The lines of complaint, with the file's folder taken off."""
    with pytest.raises(BadInput) as caught:
        read(path, overrides)
    folder = "" if path is None else f"{Path(path).parent}/"
    return [line.replace(folder, "") for line in str(caught.value).splitlines()]


def test_values_are_read_and_each_knows_its_line(written):
    path = written("data:\n  task: chain_sum\nsteps: 7\noptim:\n  lr: 1e-4\n")
    config = read(path, ["seed=3"])
    assert (config.steps, config.seed, config.optim.lr) == (7, 3, 1e-4)
    assert config.source_of("steps") == f"{path}:3"
    assert config.source_of("optim.lr") == f"{path}:5"
    assert config.source_of("seed") == "command line"
    assert config.source_of("rollout.temperature").startswith("default@")


def test_a_default_inside_a_section_of_the_file_still_counts_as_a_default(written):
    config = read(written("data: {task: x}\noptim:\n  lr: 0.1\n"))
    assert config.source_of("optim.eps").startswith("default@")


def test_the_command_line_wins_over_the_file_and_takes_over_its_source(written):
    config = read(written("data: {task: x}\nsteps: 7\n"), ["steps=2"])
    assert (config.steps, config.source_of("steps")) == (2, "command line")


def test_an_override_replaces_a_whole_section(written):
    path = written("data: {task: x}\nref: {path: start}\ncheckpoint: {every_steps: 2}\n")
    config = read(path, ["ref=null", "checkpoint.every_steps=5", "critic={}", "algorithm.advantage=gae"])
    assert config.ref is None and config.checkpoint.every_steps == 5 and config.critic is not None
    assert config.source_of("ref") == "command line"


def test_overrides_alone_make_a_configuration():
    config = read(None, ["data.task=chain_sum", "rollout.stop_token_ids=[1, 2]", "ref.path=start"])
    assert config.data.task == "chain_sum" and config.rollout.stop_token_ids == (1, 2) and config.ref is not None


def test_an_item_of_a_list_can_be_overridden(written):
    path = written("data: {task: x}\nreward: {components: [{name: a, kind: task}]}\n")
    assert read(path, ["reward.components.0.weight=2"]).reward.components[0].weight == 2.0
    for number in ("3", "x", "9" * 5000):
        assert faults(path, f"reward.components.{number}.weight=2")[0].endswith("is a list of 1; name an item from 0")


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1E3", 1000.0), ("-2e0", -2.0), ("0.5", 0.5)])
def test_numbers_with_an_exponent_are_numbers(text, value):
    assert read(None, ["data.task=x", f"algorithm.entropy_coef={text}"]).algorithm.entropy_coef == value
    assert read(None, ["data.task=x", f"data.task_options={{p: {text}}}"]).data.task_options == {"p": value}


def test_paths_in_a_file_are_looked_for_beside_it_first(written, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    (tmp_path / "rewards.py").write_text("")
    path = written(
        "data: {path: prompts.jsonl}\nmodel: {path: tiny}\n"
        "reward: {components: [{name: a, kind: function, path: 'rewards.py:f'},"
        " {name: b, kind: function, path: 'elsewhere.py:f'}, {name: c, kind: function, path: 'package.module:f'}]}\n"
    )
    config = read(path)
    assert config.data.path == str(tmp_path / "prompts.jsonl")
    assert config.model.path == "tiny"
    assert [part.path for part in config.reward.components] == [
        f"{tmp_path / 'rewards.py'}:f",
        "elsewhere.py:f",
        "package.module:f",
    ]


def test_paths_on_the_command_line_are_relative_to_where_one_stands(written, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    path = written("data: {task: x}\nreward: {components: [{name: a, kind: math_verify}]}\n")
    assert read(path, ["data.task=null", "data.path=prompts.jsonl"]).data.path == "prompts.jsonl"


def test_the_example_is_valid_and_points_beside_itself():
    config = read(EXAMPLES / "tiny.yaml", ["steps=3"])
    assert (config.steps, config.algorithm.kl_coef, config.record.level) == (3, 0.04, "tensors")
    assert config.ref is not None
    assert Path(config.data.path).name == "classes.jsonl"


FAULTS = [
    ("data: {task: x}\nactor:\n  epoch: 2\n", "a.yaml:3: unknown key actor.epoch; did you mean actor.epochs?"),
    ("data: {task: x}\nlr: 1\n", "a.yaml:2: unknown key lr; did you mean critic.lr or optim.lr?"),
    ("data: {task: x}\nmesh: {zz: 1}\n", "a.yaml:2: unknown key mesh.zz; mesh has dp, tp, pp, sp, cp, ep"),
    ("data: {task: x}\nasynk: {}\n", "a.yaml:2: unknown key asynk; did you mean async?"),
    ("data: {task: x}\nsteps: 0\n", "a.yaml:2: steps = 0 should be greater than or equal to 1; use 1"),
    ("data: {task: x}\nsteps: true\n", "a.yaml:2: steps = true should be a number"),
    ("data: {task: x}\nsteps: yes\n", "a.yaml:2: steps = 'yes' should be a whole number"),
    ("data: {task: x}\nsteps: ten\n", "a.yaml:2: steps = 'ten' should be a whole number"),
    ("data: {task: x}\nmodel:\n  dtype: float16\n", "did you mean bfloat16?"),
    ("data: {task: x}\nmodel:\n", "a.yaml:2: model = null should be a section of keys, or left out"),
    ("data: {task: x, path: y}\n", "a.yaml:1: give exactly one of data.task"),
    ("steps: 1\n", "a.yaml: data is missing (Where prompts come from"),
    (
        "data: {task: x}\nactor:\n  mini_batch_prompts: 3\n",
        "a.yaml:3: actor.mini_batch_prompts = 3 does not divide data.prompts_per_step = 4",
    ),
    ("data: {task: x}\nalgorithm:\n  kl_coef: 0.1\n", "a.yaml:3: algorithm.kl_coef = 0.1 needs a reference policy"),
    ("data: {task: x\nsteps: 1\n", "a.yaml:2: malformed YAML"),
    ("a: 1\na: 2\n", "a.yaml:2: a is given twice (first in line 1)"),
    ("x: &here [*here]\n", "contains itself"),
    ("- a\n- b\n", "a.yaml:1: expected `key: value` lines, found a list"),
    ("1: 2\ndata: {task: x}\n", "a.yaml:1: key 1 should be a word"),
    ("", "a.yaml is empty"),
    ("# only a comment\n", "a.yaml is empty"),
]


@pytest.mark.parametrize(("text", "expected"), FAULTS)
def test_a_fault_is_one_line_with_place_key_value_and_rule(written, text, expected):
    lines = faults(written(text))
    assert len(lines) == 1
    assert expected in lines[0]


OVERRIDE_FAULTS = [
    ("steps", "command line: 'steps' is no setting; write key=value"),
    ("=3", "is no setting"),
    ("a..b=3", "is no setting"),
    ("steps=[1", "command line: malformed YAML"),
    ("seed.x=1", "command line: 'seed.x=1': seed is the value 5, not a section"),
    ("data.tsk=x", "command line: unknown key data.tsk; did you mean data.task?"),
    ("steps={a: 1}", "command line: steps = {'a': 1} should be a whole number"),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDE_FAULTS)
def test_a_fault_on_the_command_line_says_so(written, override, expected):
    (line,) = faults(written("data: {task: x}\nseed: 5\n"), override)
    assert expected in line


def test_several_faults_are_several_lines(written):
    lines = faults(written("data: {task: x}\nsteps: 0\nfoo: 1\noptim:\n  lr: -1\n"))
    assert len(lines) == 3
    assert {line.split(":")[1] for line in lines} == {"2", "3", "5"}


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path):
    (tmp_path / "tiny.yaml").write_text("data: {task: x}\n")
    assert faults(tmp_path / "tinny.yaml") == ["tinny.yaml: no such file; did you mean tiny.yaml?"]


def test_a_directory_and_a_binary_are_no_configuration(tmp_path):
    assert faults(tmp_path)[0].endswith("is a directory; give a .yaml file")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in faults(tmp_path / "b.yaml")[0]


def test_foreign_keys_keep_their_dots_and_types(written):
    config = read(written("data: {task: x}\nraw: {actor.lr: 1, deep: {3: [true, null]}}\n"))
    assert config.raw == {"actor.lr": 1, "deep": {3: [True, None]}}


WORDS = ["off", "on", "yes", "no", "Off", "2024-13-45", "2024-01-01", "12e", "1:30"]


@pytest.mark.parametrize("word", WORDS)
def test_words_that_older_yaml_takes_for_something_else_stay_words(written, word):
    assert read(written(f"data: {{task: {word}}}\n")).data.task == word
    assert read(None, [f"data.task={word}"]).data.task == word


def test_recording_can_be_switched_off_by_its_word(written):
    assert read(written("data: {task: x}\nrecord: {level: off}\n")).record.level == "off"
    assert read(None, ["data.task=x", "record.level=off"]).record.level == "off"


WEIRD = [
    "!!int abc",
    "!!int ''",
    "!!bool foo",
    "!!float x",
    "!!timestamp foo",
    "!!timestamp 2024-01-01",
    "!!binary aGk=",
    "!!set {a}",
    "!!python/object:os.system x",
    "9" * 5000,
    "99999999999999999999",
    "!!int 0x" + "f" * 5000,
    "[" * 1000 + "]" * 1000,
    "{a: " * 3000 + "}" * 3000,
    "a\x07b",
    "\x00",
    '"\\ud800"',
    "&a [*a]",
    "*nowhere",
    "? [1]\n: 2",
]


@pytest.mark.parametrize("value", WEIRD, ids=lambda value: repr(value[:20]))
def test_what_is_no_yaml_value_is_one_line_and_no_traceback(written, value):
    text = f"data: {{task: x}}\nraw:\n  x: {value}\n" if "?" not in value else f"data: {{task: x}}\nraw: {{{value}}}\n"
    (line,) = faults(written(text))
    assert line.startswith("a.yaml:") and len(line) < 300
    (line,) = faults(None, "data.task=x", f"raw.x={value}")
    assert line.startswith("command line") and len(line) < 300


def test_anchors_that_stand_for_more_keys_than_memory_holds_are_refused(written):
    layers = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
    assert faults(written(f"l0: &l0 [x]\n{layers}"))[0].endswith("more than 100000 keys; a run has a few dozen")


BOUNDS = [
    ("optim.lr", ".nan"),
    ("optim.lr", ".inf"),
    ("reward.timeout_s", ".inf"),
    ("rollout.timeout_s", "1e7"),
    ("seed", str(2**63)),
    ("seed", "-1"),
    ("threads", "1025"),
    ("data.prompts_per_step", str(2**20 + 1)),
    ("data.max_prompt_tokens", str(2**24 + 1)),
    ("rollout.max_response_tokens", str(2**24 + 1)),
    ("rollout.samples_per_prompt", str(2**16 + 1)),
    ("rollout.stop_token_ids", "[-1]"),
    ("model.tiny.hidden_size", str(2**16 + 4)),
    ("algorithm.loss_scale_factor", str(2**31 + 1)),
    ("optim.betas", "[0.9, 1.0]"),
    ("optim.betas", "[-0.1, 0.9]"),
    ("name", "a/b"),
    ("name", "x" * 101),
    ("model.path", "x" * 256),
    ("model.path", "~nobody-of-that-name/x"),
    ("checkpoint.path", "'a\tb'"),
    ("reward.components", "[{name: '<b>', kind: task}]"),
    ("reward.components", "[{name: '', kind: task}]"),
    ("reward.components", "[{name: a, kind: task, weight: 1e300}]"),
]


@pytest.mark.parametrize(("key", "value"), BOUNDS)
def test_what_no_machine_could_do_is_refused_by_its_key(key, value):
    (line,) = faults(None, "data.task=x", f"{key}={value}")
    assert line.startswith("command line: ") and key in line


def test_a_step_of_more_samples_than_memory_holds_is_refused():
    (line,) = faults(None, "data.task=x", "data.prompts_per_step=1048576", "rollout.samples_per_prompt=65536")
    assert "makes 68719476736 samples" in line


def test_a_foreign_key_with_a_dot_may_look_like_a_place_in_a_list(written):
    raw = {"x": [1], "x.y": 2, "x.5": 3}
    assert read(written("data: {task: x}\nraw: {x: [1], x.y: 2, x.5: 3}\n")).raw == raw
