"""Vega, Vega-Lite and Vega-Embed as one script, from the installed package `vl-convert-python`; made once and kept."""

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path


@cache
def begin() -> subprocess.Popen[bytes] | None:
    """Have the script made by a process of its own where it is not kept yet: it takes two seconds, and lets nothing else run beside it."""
    if _kept().exists():
        return None
    command = [sys.executable, "-c", f"from {__name__} import bundle; bundle()"]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def bundle() -> str:
    """The script that defines `vegaEmbed`, kept under `~/.cache/flowledger`; made here where nobody has made it."""
    if begin.cache_info().currsize and (making := begin()) is not None:
        making.wait()
    kept = _kept()
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        pass
    import vl_convert  # noqa: PLC0415 33 MB that only this needs

    made: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    aside = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(made, encoding="utf-8")
        aside.replace(kept)
    except OSError:
        pass  # a home that cannot be written to: it is made again next time
    return made


def _kept() -> Path:
    """Where it is kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "flowledger" / f"vega-{version('vl-convert-python')}.js"
