"""Vega, Vega-Lite and Vega-Embed as one script, from the installed package `vl-convert-python`; made once and kept."""

import os
from importlib.metadata import version
from pathlib import Path


def bundle() -> str:
    """The script that defines `vegaEmbed`. Making it takes two seconds, so it is kept under `~/.cache/flowledger`."""
    kept = _folder() / f"vega-{version('vl-convert-python')}.js"
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


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowledger"
