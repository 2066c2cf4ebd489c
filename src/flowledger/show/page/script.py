"""The page's modules as one script, for a file that has nobody to fetch from.

Each module becomes a function whose exports are what it returns, in the order in which they need one another. They are plain ES
modules that keep to two forms: `import { a, b } from "./other.js";` and `export` before `function`, `async function` or `const`.
"""

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files

FIRST = "main.js"
IMPORT = re.compile(r'^import \{ (\w+(?:, \w+)*) \} from "\./([\w-]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (async function|function|const) (\w+)", re.MULTILINE)


@cache
def script() -> str:
    """All modules that the first one needs, joined. Raises ValueError for a module that keeps to other forms, or a circle."""
    needs: dict[str, set[str]] = {}
    waiting = [FIRST]
    while waiting:
        name = waiting.pop()
        if name not in needs:
            needs[name] = {other for _, other in IMPORT.findall(source(name))}
            waiting += needs[name]
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError as error:
        raise ValueError(f"modules of the page need each other in a circle: {' → '.join(error.args[1])}") from None
    return inline("\n".join(["'use strict';", *(_wrapped(name, source(name)) for name in order)]))


def inline(text: str) -> str:
    """A script as it may stand in HTML: no string in it can end its element or begin a comment."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def source(name: str) -> str:
    """A file of the page, as it stands."""
    return files("flowledger.show.page").joinpath(name).read_text(encoding="utf-8")


def _wrapped(name: str, text: str) -> str:
    exports = [found for _, found in EXPORT.findall(text)]
    body = IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_variable(found[2])};", text)
    body = EXPORT.sub(lambda found: f"{found[1]} {found[2]}", body)
    if stray := re.search(r"^(import|export)\b.*$", body, re.MULTILINE):
        raise ValueError(f"{name}: {stray[0]}: another form of import or export than the page's modules keep to")
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + name.removesuffix(".js").replace("-", "_")
