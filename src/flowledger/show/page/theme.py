"""A chart's specification in the colours of a page and in its language.

Charts name the colours of `page.css`, where they stand for a light page and for a dark one: `var(--grad)`. What they say stands in
them in both languages, as `{"en": …, "zh": …}`.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from flowledger.show.page.script import source

BLOCK = re.compile(r':root(\[data-theme="dark"\])? \{(.*?)\}', re.DOTALL)
COLOUR = re.compile(r"--([\w-]+): (#[0-9a-f]{6})\b")
NAMED = re.compile(r"var\(--([\w-]+)\)")
# Of a machine that draws without a browser, which takes the first of them that it has.
SANS = {
    "en": "Noto Sans, DejaVu Sans, Helvetica, Arial, sans-serif",
    "zh": "Noto Sans CJK SC, Noto Sans SC, WenQuanYi Zen Hei, PingFang SC, sans-serif",
}

# What the page sets for every chart; beside it as pictures they have a ground of their own.
CONFIG: dict[str, Any] = {
    "background": "var(--paper)",
    "font": SANS,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)", "titleColor": "var(--soft)", "gridColor": "var(--line)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "titleFontWeight": 500,
    },
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--soft)"},
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--soft)"},
    "title": {"color": "var(--ink)", "subtitleColor": "var(--soft)", "anchor": "start", "fontWeight": 600},
    "text": {"color": "var(--ink)"},
    "rule": {"color": "var(--soft)"},
}  # fmt: skip


@cache
def colours(*, dark: bool = False) -> Mapping[str, str]:
    """Name -> colour, of the light page or the dark one. What the dark page does not say it has from the light one."""
    found: dict[str, str] = {}
    for is_dark, block in BLOCK.findall(source("page.css")):
        if dark or not is_dark:
            found |= dict(COLOUR.findall(block))
    return found


def dressed(spec: Any, lang: str = "en", *, dark: bool = False) -> Any:
    """The specification with colours and words in place of their names: the same as `theme.js` makes of it in a page."""
    if isinstance(spec, Mapping):
        if spec.keys() == {"en", "zh"}:
            return spec[lang]
        return {key: dressed(value, lang, dark=dark) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return [dressed(value, lang, dark=dark) for value in spec]
    if isinstance(spec, str) and (named := NAMED.fullmatch(spec)):
        return colours(dark=dark).get(named[1], spec)
    return spec
