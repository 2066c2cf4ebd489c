"""The shell reader against bash itself: the same scripts run by bash, with shims in place of the programs they start."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flowledger.config.shell.launches import flags, launches
from flowledger.flow.errors import BadInput

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
PROGRAMS = ("python", "python3", "torchrun", "ray", "accelerate", "deepspeed", "uv", "trl")
SHIM = '#!/bin/sh\n{ printf "%s\\0" "$#" "${0##*/}"; for w in "$@"; do printf "%s\\0" "$w"; done; } >> "$SHIM_OUT"\n'
SRUN = '#!/bin/sh\nwhile [ "$#" -gt 0 ] && [ "$1" != bash ]; do shift; done\nexec "$@"\n'
HOME = "/home/somebody"


def real(folder: Path, script: Path, argv: Sequence[str], variables: Mapping[str, str]) -> list[list[str]]:
    """The command lines that bash runs: each program is a shim that writes down its words."""
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (bin_ / name).write_text(SHIM)
    (bin_ / "srun").write_text(SRUN)
    for quiet in ("pkill", "sleep", "nvidia-smi"):
        (bin_ / quiet).write_text("#!/bin/sh\nexit 0\n")
    for path in bin_.iterdir():
        path.chmod(0o755)
    out = folder / "out"
    out.write_bytes(b"")
    environment = {
        "PATH": f"{bin_}:/usr/bin:/bin",
        "HOME": HOME,
        "SHIM_OUT": str(out),
        "LC_ALL": "C.UTF-8",
        **variables,
    }
    subprocess.run(
        ["bash", str(script), *argv], env=environment, cwd=folder, capture_output=True, timeout=60, check=False
    )
    words = out.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    found = []
    while words:
        count = int(words[0])
        found.append(words[1 : count + 2])
        words = words[count + 2 :]
    return [command for command in found if command[0] != "ray" or command[1:3] == ["job", "submit"]]


def read(folder: Path, script: Path, argv: Sequence[str], variables: Mapping[str, str]) -> list[list[str]]:
    """The same by the reader."""
    kept = Path.cwd()
    os.chdir(folder)
    try:
        return [list(launched.argv) for launched in launches(script, argv, {"HOME": HOME, **variables})]
    finally:
        os.chdir(kept)


CASES: list[tuple[str, list[str], dict[str, str]]] = [
    ("verl_fsdp.sh", [], {}),
    ("verl_fsdp.sh", ["trainer.nnodes=2", "a b"], {"MODEL_PATH": "/models/my model", "DATA": "/d"}),
    ("verl_megatron_arrays.sh", [], {}),
    ("verl_megatron_arrays.sh", ["x=1", "y=a b", ""], {"NNODES": "1", "TP": "2", "OFFLOAD": "False"}),
    ("verl_arguments.sh", ["8", "/ckpt/run 7", "optim.lr=1e-5", "trainer.logger=['console']"], {}),
    ("verl_functions.sh", [], {}),
    ("verl_functions.sh", ["--size", "30b-a3b", "-n", "--", "k=v w"], {}),
    ("verl_functions.sh", ["--size=4b", "a=1"], {}),
    ("verl_one_step_off.sh", ["a=b"], {}),
    ("verl_one_step_off.sh", [], {"RAY_DATA_HOME": "/mnt", "NGPUS_PER_NODE": "16"}),
    ("verl_fully_async.sh", [], {}),
    ("verl_npu.sh", [], {}),
    ("verl_npu.sh", ["8b", "a=1", "b=c d"], {"VAL": "True"}),
    ("verl_ray_multinode.sh", [], {"MASTER_ADDR": "10.0.0.1"}),
    ("verl_ray_multinode.sh", [], {"MASTER_ADDR": "10.0.0.1", "NUM_NODES": "12", "PROJECT_NAME": ""}),
    ("verl_slurm.sh", [], {}),
    ("verl_dapo_continuation.sh", [], {}),
    ("openrlhf_grpo.sh", [], {}),
    ("openrlhf_ppo_underscores.sh", [], {}),
    ("slime_qwen3_4b.sh", [], {}),
    ("slime_async.sh", [], {"EXTRA_ARGS": "--a 1 --b"}),
    ("trl_accelerate.sh", [], {}),
    ("trl_accelerate.sh", [], {"ACCELERATE_CONFIG": "fsdp2"}),
    ("torchrun_sweep.sh", [], {}),
    ("torchrun_sweep.sh", ["its", "b", "c d"], {"SEED_LIST": "7,,2", "NNODES": "2"}),
    ("odd_syntax.sh", [], {}),
    ("env_indirect.sh", ["a", "b  c"], {}),
    ("env_indirect.sh", [], {"WHICH": "large"}),
]


@pytest.mark.parametrize(("name", "argv", "variables"), CASES, ids=lambda value: str(value)[:30])
def test_a_script_gives_the_command_lines_that_bash_runs(
    name: str, argv: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    expected = real(tmp_path, SCRIPTS / name, argv, variables)
    assert expected, "bash ran nothing: the case proves nothing"
    assert read(tmp_path, SCRIPTS / name, argv, variables) == expected


# Random scripts: assignments, then commands whose words mix literals, quotes and expansions of what was assigned.
NAMES = st.sampled_from(["A", "B", "C", "UNSET", "EMPTY", "P"])
LETTERS = "ab/._-=:,+@% é"
VALUES = st.text(LETTERS + " \t\n*?#~", max_size=8)
PATTERNS = st.sampled_from(
    ["*", "?", "a*", "*/", "/*", "b", "[ab]", "[!a]*", ".", "a/", "\\*", "'*'", '"a"*', "*a*b", "-"]
)
NUMBERS = st.integers(-3, 12).map(str)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def literal(text: str) -> str:
    return "".join("\\" + letter if not (letter.isalnum() or letter in "/._-=:,+@%") else letter for letter in text)


def parameter(name: str, operator: str, pattern: str, word: str, number: str) -> str:
    closed = word.split("'")[0] if word == "it's" else word  # in a replacement bash takes it for a quote
    inside = {
        "plain": f"{name}",
        "length": f"#{name}",
        "cut": f"{name}{operator}{pattern}",
        "default": f"{name}{operator}{word}",
        "replace": f"{name}{operator}{pattern}/{closed}",
        "case": f"{name}{operator}",
        "slice": f"{name}: {number}",
        "slice2": f"{name}: {number}:2",
        "indirect": "!P",
    }
    kind = {"": "plain", "L": "length", "S": "slice", "T": "slice2", "I": "indirect"}.get(operator)
    kind = kind or (
        "default"
        if operator[-1] in "-+="
        else "replace"
        if operator[0] == "/"
        else "case"
        if operator[0] in "^,"
        else "cut"
    )
    return "${" + inside[kind] + "}"


OPERATORS = st.sampled_from(
    [
        "",
        "",
        "L",
        "S",
        "T",
        "I",
        ":-",
        "-",
        ":+",
        "+",
        "#",
        "##",
        "%",
        "%%",
        "/",
        "//",
        "/#",
        "/%",
        "^",
        "^^",
        ",",
        ",,",
    ]
)
WORDS = st.sampled_from(["", "x", "a b", '"a b"', "'c d'", "$B", '"$A"', "${C:-q r}", "\\ y", "$@", '"$@"'])
IN_QUOTES = st.sampled_from(["", "x", "a b", "$B", "${C:-q r}", "it's", "$@", "$(echo 1)"])
UNQUOTED = st.builds(parameter, NAMES, OPERATORS, PATTERNS, WORDS, NUMBERS)
QUOTED = st.builds(parameter, NAMES, OPERATORS, PATTERNS, IN_QUOTES, NUMBERS)
LISTS = st.sampled_from(
    [
        "$@",
        "$*",
        "${L[@]}",
        "${L[*]}",
        "${#L[@]}",
        "${L[1]}",
        "${L[-1]}",
        "${L[@]:1}",
        "${L[@]#a}",
        "$#",
        "$1",
        "${2:-z}",
    ]
)
SUMS = st.builds(
    lambda a, op, b, op2, c: f"$(({a} {op} {b} {op2} {c}))",
    st.sampled_from(["1", "N", "$N", "0x1f", "-2", "(N+1)"]),
    st.sampled_from(["+", "-", "*", "**", "<<", "&", "|", "^", "<", "==", "&&", "||", ",", "?1:"]),
    st.sampled_from(["2", "N", "3", "!N"]),
    st.sampled_from(["+", "*", "%", "/", ">>", "-", ">="]),
    st.sampled_from(["4", "7", "5"]),
)
PARTS = st.one_of(
    st.text(LETTERS, min_size=1, max_size=5).map(literal),
    st.text(LETTERS + '$"\\`', max_size=5).map(quoted),
    UNQUOTED,
    LISTS,
    SUMS,
    st.sampled_from(
        [
            "$(echo a  b)",
            "`echo $A`",
            "$'t\\tx\\n\\''",
            "$'\\x41'",
            "{1,2}",
            "{a,b{c,d}}",
            "{3..1}",
            "{x}",
            '$(basename "/q/$A")',
            "\\\n",
        ]
    ),
    st.lists(
        st.one_of(st.text("ab c/", max_size=4), QUOTED, LISTS, SUMS, st.sampled_from(["\\$", '\\"', "\\a", "'"])),
        max_size=3,
    ).map(lambda parts: '"' + "".join(parts) + '"'),
)
COMMAND = st.lists(st.lists(PARTS, min_size=1, max_size=3).map("".join), max_size=4)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    values=st.tuples(VALUES, VALUES, VALUES),
    elements=st.lists(VALUES, max_size=3),
    arguments=st.lists(VALUES, max_size=3),
    number=st.integers(-5, 9),
    commands=st.lists(COMMAND, min_size=1, max_size=4),
)
def test_random_words_expand_as_in_bash(
    tmp_path: Path,
    values: tuple[str, str, str],
    elements: list[str],
    arguments: list[str],
    number: int,
    commands: list[list[str]],
) -> None:
    a, b, c = map(quoted, values)
    lines = ["set -f", f"A={a} B={b}", f"C={c}; EMPTY=; P=A; N={number}", f"L=({' '.join(map(quoted, elements))})"]
    lines += ["python3 = " + " ".join(words) for words in commands]
    script = tmp_path / "random.sh"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    expected = real(tmp_path, script, arguments, {})
    assume(len(expected) == len(commands))  # bash refused a line, as one that divides by zero
    assume(
        not any("\x7f" in word for command in expected for word in command)
    )  # a slip of bash 5.2: its own quoting mark
    assert read(tmp_path, script, arguments, {}) == expected


def reading(folder: Path, text: str, argv: Sequence[str] = (), **variables: str) -> list[Any]:
    script = folder / "run.sh"
    script.write_text(text, encoding="utf-8")
    return launches(script, argv, {"HOME": HOME, **variables})


def test_each_word_has_the_place_where_it_was_written(tmp_path: Path) -> None:
    text = '#!/bin/bash\nA=(\n  a=1\n  b=2\n)\nX=x=3\npython3 -m m \\\n  "${A[@]}" \\\n  c=$X $X\n'
    (launched,) = reading(tmp_path, text)
    lines = [place.rpartition(":")[2] for place in launched.places]
    assert launched.argv == ("python3", "-m", "m", "a=1", "b=2", "c=x=3", "x=3")
    assert lines == ["7", "7", "7", "3", "4", "9", "6"]
    assert launched.line == 7
    assert launched.places[0] == f"{tmp_path / 'run.sh'}:7"


def test_a_variable_that_is_not_set_is_named_where_it_reaches_the_launch(tmp_path: Path) -> None:
    text = 'M=$ROOT/model\nN=$OTHER\n[ -z "$CHECKED" ] && true\npython3 t.py --m $M --d ${DATA:-/d} --e "$MISSING"\n'
    (launched,) = reading(tmp_path, text)
    run = tmp_path / "run.sh"
    assert launched.unset == (("ROOT", f"{run}:1"), ("MISSING", f"{run}:4"))
    assert launched.argv == ("python3", "t.py", "--m", "/model", "--d", "/d", "--e", "")
    assert reading(tmp_path, text, ROOT="/r", MISSING="")[0].unset == ()


def test_what_only_the_run_knows_is_kept_as_text_and_named(tmp_path: Path) -> None:
    text = "N=$(nvidia-smi -L | wc -l)\nG=$((N * 2))\nif [ $N -gt 4 ]; then X=big; else X=small; fi\npython3 t.py --n $N --g=$G --x $X\n"
    (launched,) = reading(tmp_path, text)
    assert launched.argv[3] == "$(nvidia-smi -L | wc -l)"
    assert launched.argv[-1] == "small"
    assert launched.unknown[0] == "$(nvidia-smi -L | wc -l)"
    assert any("[ $N -gt 4 ]" in note and ":3:" in note for note in launched.notes)


def test_pure_commands_are_evaluated(tmp_path: Path) -> None:
    text = """D=$(dirname "$0"); B=$(basename /a/b.sh .sh)
python3 t.py $B $(expr 3 + 4) $(seq 3) $(echo Ab | tr a-z A-Z) "$(printf '%s-%02d' x 7)" $(date +%Y) $(cd / && pwd) $(echo a:b | cut -d: -f2)
[ "$D" = "$PWD" ] || python3 where.py "$D"
"""
    first, second = reading(tmp_path, text)
    assert first.argv[2:] == ("b", "7", "1", "2", "3", "AB", "x-07", "2000", "/", "b")
    assert second.argv == ("python3", "where.py", str(tmp_path))


def test_nothing_is_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = f"touch {canary}; X=$(touch {canary}; echo `touch {canary}`)\n: > {canary}\neval \"touch {canary}\"\nbash -c 'touch {canary}'\npython3 x.py $X\n"
    reading(tmp_path, text)
    assert not canary.exists()


def test_environment_holds_what_the_script_exports_and_puts_before_the_command(tmp_path: Path) -> None:
    text = "export A=1\nB=2\nexport C\nC=3\nCUDA_VISIBLE_DEVICES=0,1 nohup env D='4 5' python3 t.py x &\n"
    (launched,) = reading(tmp_path, text)
    assert launched.argv == ("python3", "t.py", "x")
    assert launched.environment == {"A": "1", "C": "3", "CUDA_VISIBLE_DEVICES": "0,1", "D": "4 5"}


def test_flags_of_a_command_with_their_places(tmp_path: Path) -> None:
    (launched,) = reading(tmp_path, "python3 t.py --a.b c --d=e=f \\\n --bare --betas 0.9 0.95 --n -1 --a.b z\n")
    found = flags(launched)
    run = tmp_path / "run.sh"
    assert [value for value, _ in found["--a.b"]] == ["c", "z"]
    assert found["--d"] == [("e=f", f"{run}:1")]
    assert found["--bare"] == [(None, f"{run}:2")]
    assert [value for value, _ in found["--betas"]] == ["0.9", "0.95"]
    assert [value for value, _ in found["--n"]] == ["-1"]


def test_a_file_that_is_sourced_and_not_there_is_said(tmp_path: Path) -> None:
    (launched,) = reading(tmp_path, "source ./env/none.sh\npython3 t.py x\n")
    assert launched.notes == (
        f"{tmp_path / 'run.sh'}:1: ./env/none.sh is not here; what it sets or starts is not known",
    )


BAD: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"\n\n", "is empty"),
    (b"python3 a\0b\n", "binary file"),
    (b"\x7fELF\x02\x01\x01\0", "binary file"),
    (b"\xef\xbb\xbfpython3 t.py\n", ":1: begins with a byte-order mark"),
    (b"X=1\npython3 t.py\r\n", ":2: ends with CR LF"),
    (b"X=1\npython3 \xff\n", ":2: byte 0xff is no UTF-8"),
    (b"x" * (1 << 20) + b"y", "has 1048577 bytes"),
    (b"X=1\nif true; then\npython3 t.py\n", ":"),
    (b'X=1\npython3 "t.py\n\n', ':2: "t.py is opened and never closed'),
    (b"A=(a b\npython3 t.py\n", ":1:"),
    (b"python3 ${X\n", ":1: ${X is opened and never closed"),
    (b"echo hi\n", "starts no program"),
    (
        b"if [ $# -lt 2 ]; then exit 1; fi\npython3 t.py $1\n",
        "starts no program (python, torchrun, accelerate, deepspeed, ray job submit, …); it ends at",
    ),
    (b"set -e\npython3 t.py --m ${MODEL:?name a model}\n", ":2: MODEL is not set (name a model); give --assume MODEL="),
    (b"python3 t.py $((1 / 0))\n", ":1: $((1 / 0)) = $((1 / 0)): division by 0"),
    (b'A=xyz\npython3 t.py ${A:"1:2"}\n', ':2: "1 is opened and never closed'),
    (b"while true; do :; done\npython3 t.py\n", ":1: more than 20000 statements"),
    (b"f() { f; }\nf\npython3 t.py\n", ":1: functions, sourced files or substitutions nest deeper"),
]


@pytest.mark.parametrize(("source", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_scripts_get_one_clear_line(source: bytes, said: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_bytes(source)
    with pytest.raises(BadInput) as caught:
        launches(script)
    message = str(caught.value)
    assert said in message
    assert message.startswith(str(script))
    assert "\n" not in message


@pytest.mark.parametrize("name", ["none.sh", ".", "a\0b"])
def test_a_script_that_cannot_be_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        launches(f"{tmp_path}/{name}")


@settings(max_examples=200, deadline=None)
@given(text=st.text("abAB01 \t\n\\\"'`$(){}[]<>|&;=+-*/%#!?:~,.@^\u00e9if done case esac", max_size=60))
def test_any_text_gives_launches_or_one_clear_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.getbasetemp() / "any.sh"
    script.write_text(f"A=1\n{text}\npython3 t.py\n", encoding="utf-8")
    try:
        assert launches(script)
    except BadInput as fault:
        assert str(fault)


def test_reading_a_long_script_takes_less_than_100_ms() -> None:
    script = SCRIPTS / "slime_qwen3_4b.sh"
    best = 1.0
    for _ in range(5):
        started = time.process_time()
        launches(script)
        best = min(best, time.process_time() - started)
    assert best < 0.1
