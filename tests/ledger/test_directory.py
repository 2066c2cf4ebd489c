import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger import directory as rooms
from flowledger.ledger.directory import create, open_run, spared
from flowledger.ledger.manifest import Manifest, Process
from flowledger.ledger.secrets import MASK, masked


def manifest(**fields: object) -> Manifest:
    return Manifest(run="a", **fields)  # type: ignore[arg-type]


def test_what_was_created_is_what_is_opened(tmp_path: Path) -> None:
    made = create(tmp_path / "a", manifest(bindings={"G": 4}, config={"steps": 2}, level="tokens"))
    assert made.state == "open"
    made.close("interrupted")
    found = open_run(tmp_path / "a")
    assert (found.state, found.manifest.bindings, found.manifest.level) == ("interrupted", {"G": 4}, "tokens")
    assert found.manifest.hardware["memory_bytes"] > 1 << 20 and found.manifest.hardware["cores"] >= 1
    assert [file.name for file in (tmp_path / "a").iterdir() if file.name.startswith(".")] == []


def test_an_existing_run_is_refused_with_a_place_that_is_free(tmp_path: Path) -> None:
    create(tmp_path / "a", manifest())
    (tmp_path / "a-2").mkdir()
    with pytest.raises(BadInput, match=r"a is a run already and is never overwritten; .* -o .*/a-3, or remove it"):
        create(tmp_path / "a", manifest())


def test_an_empty_directory_is_taken_and_a_filled_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    create(tmp_path / "a", manifest())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="not empty already"):
        create(tmp_path / "b", manifest())
    assert (tmp_path / "b" / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(BadInput, match="a is a file"):
        create(tmp_path / "a", manifest())
    with pytest.raises(BadInput, match="a part of that path is a file"):
        create(tmp_path / "a" / "b", manifest())


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "no space left"), (errno.EACCES, "permission denied"), (errno.EROFS, "read-only")],
)
def test_a_place_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rooms.os, "fsync", full)
    with pytest.raises(BadInput, match=said) as caught:
        create(tmp_path / "a", manifest())
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "a").glob(".manifest*")) == []


def test_a_run_that_cannot_be_closed_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create(tmp_path / "a", manifest())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(rooms.os, "fsync", full)
    assert made.close() is False
    assert open_run(tmp_path / "a").state == "open"


def test_a_run_whose_launcher_died_reads_as_crashed(tmp_path: Path) -> None:
    code = (
        "import sys, os; from flowledger.ledger.directory import create; "
        "from flowledger.ledger.manifest import Manifest; "
        "create(sys.argv[1], Manifest(run='a')); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], timeout=60, check=False)
    assert open_run(tmp_path / "a").manifest.state == "open"
    assert open_run(tmp_path / "a").state == "crashed"


def test_a_launcher_elsewhere_or_with_a_reused_pid_is_judged_rightly() -> None:
    here = Process.this()
    assert not here.is_gone()
    assert msgspec.structs.replace(here, started=here.started - 100).is_gone()
    assert not msgspec.structs.replace(here, host="elsewhere", pid=2**22 + 1).is_gone()


def test_a_clock_that_is_set_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Process.this()
    booted = psutil.boot_time()
    for set_by in (3600, -3600):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda by=set_by: booted + by)
        assert abs(psutil.Process().create_time() - booted - here.started - set_by) < 2  # so psutil is misled
        assert not here.is_gone()


def test_what_is_no_run_is_said_with_the_nearest_run(tmp_path: Path) -> None:
    create(tmp_path / "first", manifest())
    with pytest.raises(BadInput, match=r"no such directory; did you mean .*/first"):
        open_run(tmp_path / "fisrt")
    with pytest.raises(BadInput, match=r"is not a run: it has no manifest.json; did you mean .*/first"):
        open_run(tmp_path)


def test_a_newer_schema_is_refused_and_broken_json_is_named(tmp_path: Path) -> None:
    create(tmp_path / "a", manifest())
    file = tmp_path / "a" / "manifest.json"
    newer = {**json.loads(file.read_text()), "schema": 99}
    file.write_text(json.dumps(newer))
    with pytest.raises(BadInput, match="ledger schema 99, and this flowledger reads up to 1"):
        open_run(tmp_path / "a")
    file.write_text('{"run": ')
    with pytest.raises(BadInput, match="is not a manifest"):
        open_run(tmp_path / "a")


def test_every_part_is_a_directory_of_its_own(tmp_path: Path) -> None:
    made = create(tmp_path / "a", manifest())
    first, second = made.part("actor", 0), made.part("actor", 0, coordinates={"dp": 1})
    assert first != second and str(os.getpid()) in first.name and first.name.startswith("actor-r0-")
    process = json.loads((second / "process.json").read_text())
    assert process["coordinates"] == {"dp": 1} and process["wall_ns"] > process["monotonic_ns"] > 0


def test_secrets_are_masked_and_everyday_keys_are_not(tmp_path: Path) -> None:
    secret = {
        "hf_token": "abc", "wandb": {"api_key": "abc"}, "AWS_ACCESS_KEY_ID": "AKIA000", "password": 123, "token": "t",
        "clientSecret": "x", "credentials": {"user": "u", "deep": ["v"]}, "signing_key": "abc", "key": "f3a9c0ffee1234",
        "url": "https://me:hunter2@host/x", "env": ["HF_TOKEN=hf_abcdefgh12", "A=1"],
    }  # fmt: skip
    plain = {
        "max_tokens": 5, "max_response_tokens": 32, "prompt_key": "prompt", "answer_key": "data.answer",
        "pad_token": "<pad>",
        "stop_token_ids": [1, 2], "eos_token": "</s>", "loss_aggregation": "token-mean", "trust_remote_code": True,
        "tokenizer": "x", "url": "https://host/x", "keys": ["a"], "per_token": True, "hf_token": None,
    }  # fmt: skip
    assert masked(plain) == plain
    create(tmp_path / "a", manifest(config=secret))
    text = (tmp_path / "a" / "manifest.json").read_text()
    leaked = [word for word in ("abc", "AKIA000", "123,", "hunter2", '"x"', '"v"', "c0ffee", '"t"') if word in text]
    assert leaked == []
    assert masked(secret)["url"] == f"https://{MASK}@host/x"
    assert masked(secret)["env"][1] == "A=1"


OF_THE_RUN = (
    "manifest.json",
    "spans.parquet",
    "new.parquet",
    "parts",
    "parts/a/spans-0.jsonl",
    "plan/tensors.parquet",
    "compacted/x",
)


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_no_file_of_a_run_is_a_place_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = create(tmp_path / "a", manifest()).path
    (run / "spans.parquet").write_text("")
    (tmp_path / "link").symlink_to(run / name)
    (tmp_path / "also").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    places = [run / name, Path("a") / name, Path("a/../a/parts/..") / name, tmp_path / "link", tmp_path / "also" / name]
    for place in places:
        for path in (run, Path("a"), tmp_path / "also"):
            with pytest.raises(BadInput, match=r"is a file of the run; choose another place"):
                spared(path, place)


def test_a_link_in_place_of_a_runs_file_is_the_runs_too(tmp_path: Path) -> None:
    run = create(tmp_path / "a", manifest()).path
    (run / "manifest.json").rename(tmp_path / "kept.json")
    (run / "manifest.json").symlink_to(tmp_path / "kept.json")
    for place in (run / "manifest.json", tmp_path / "kept.json"):
        with pytest.raises(BadInput, match="is a file of the run"):
            spared(run, place)


@pytest.mark.parametrize(
    "name", ["a/report.html", "a/trace.json", "b/manifest.json", "a-parts", "a/charts/manifest.json"]
)
def test_any_other_place_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    create(tmp_path / "a", manifest())
    monkeypatch.chdir(tmp_path)
    spared(Path("a"), Path(name))
    spared(tmp_path / "a", tmp_path / name)
