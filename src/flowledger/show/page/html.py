"""The page as one HTML file: style, scripts and data in it, nothing from outside, and a policy that allows nothing else."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from flowledger.show.page import vega
from flowledger.show.page.script import inline, script, source

SHELL = """<!DOCTYPE html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page is drawn by JavaScript, which is switched off here.</noscript>
<div id="page"></div>
<script type="application/json" id="data">{data}</script>
<script>{vega}</script>
<script>{script}</script>
</body>
</html>
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole file. `document`: what `document.document` makes."""
    style, scripts = source("page.css"), (inline(vega.bundle()), script())
    return SHELL.format(
        lang=document["lang"],
        title=escape(f"{document['about']['run']} · flowledger"),
        policy=policy(style, scripts, live=bool(document["live"])),
        style=style,
        data=as_data(document),
        vega=scripts[0],
        script=scripts[1],
    )


def policy(style: str, scripts: Sequence[str], *, live: bool) -> str:
    """What a browser may run and load: these very texts; of a live page its own server besides."""
    run = " ".join(_hash(text) for text in scripts)
    ask = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; script-src {run}; style-src {_hash(style)}; {ask}img-src data:; base-uri 'none'; form-action 'none'"


def as_data(document: Mapping[str, Any]) -> str:
    """JSON that may stand in HTML: no string in it can end its element or begin a comment."""
    text = msgspec.json.encode(document, enc_hook=_plain).decode()  # NaN and infinity as null
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
