"""Commands whose output follows from their words and input alone, as they stand inside `$(…)`."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from flowledger.config.shell.arithmetic import ArithmeticFault, integer
from flowledger.config.shell.expand import ansi

NOON = datetime(2000, 1, 1, 12, tzinfo=UTC)  # stands for the time of the run, so that two plans of one script agree
LARGEST = 1 << 16  # bytes of a file that `cat` may bring in

Filter = Callable[
    [list[str], str, Path], str | None
]  # words after the name, input, directory -> output; None: not known


def _basename(words: list[str], text: str, directory: Path) -> str | None:
    given = [word for word in words if word != "--"]
    if not 1 <= len(given) <= 2 or given[0].startswith("-"):
        return None
    name = given[0].rstrip("/").rpartition("/")[2] or ("/" if given[0] else "")
    suffix = given[1] if len(given) > 1 else ""
    return (name.removesuffix(suffix) if suffix != name else name) + "\n"


def _dirname(words: list[str], text: str, directory: Path) -> str | None:
    given = [word for word in words if word != "--"]
    if len(given) != 1 or given[0].startswith("-"):
        return None
    head, slash, _ = given[0].rstrip("/").rpartition("/")
    return ((head.rstrip("/") or "/") if slash else "." if given[0].strip("/") or not given[0] else "/") + "\n"


def _realpath(words: list[str], text: str, directory: Path) -> str | None:
    given = [word for word in words if not word.startswith("-")]
    return f"{(directory / given[0]).resolve()}\n" if len(given) == 1 else None


def _date(words: list[str], text: str, directory: Path) -> str | None:
    form = next((word[1:] for word in words if word.startswith("+")), None)
    form = "%a %b %d %H:%M:%S UTC %Y" if form is None else form
    form = form.replace("%s", str(int(NOON.timestamp()))).replace("%N", "000000000").replace("%-", "%")
    try:
        return NOON.strftime(form) + "\n"
    except ValueError:
        return None


def _cat(words: list[str], text: str, directory: Path) -> str | None:
    if not words:
        return text
    found = []
    for word in words:
        path = directory / word
        try:
            if word.startswith("-") or not path.is_file() or path.stat().st_size > LARGEST:
                return None
            found.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return None
    return "".join(found)


def _expr(words: list[str], text: str, directory: Path) -> str | None:
    if not all(re.fullmatch(r"-?\d+|[-+*/%()]|[<>=!]=?", word) for word in words):
        return None
    try:
        return f"{integer(' '.join('==' if word == '=' else word for word in words), lambda name: '')}\n"
    except ArithmeticFault:
        return None


def _seq(words: list[str], text: str, directory: Path) -> str | None:
    if words[:1] == ["-s"] and len(words) > 2:
        inner = _seq(words[2:], text, directory)
        return None if inner is None else inner.strip().replace("\n", words[1]) + "\n"
    if not words or len(words) > 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), tuple(numbers))
    if step == 0 or abs(last - first) // abs(step) > LARGEST:
        return None
    return "".join(f"{n}\n" for n in range(first, last + (1 if step > 0 else -1), step))


def _tr(words: list[str], text: str, directory: Path) -> str | None:
    delete = words[:1] == ["-d"]
    sets = [_letters(word) for word in (words[1:] if delete else words)]
    if any(one is None for one in sets) or len(sets) != (1 if delete else 2):
        return None
    first = sets[0] or ""
    if delete:
        return "".join(letter for letter in text if letter not in first)
    second = sets[1] or ""
    if not second:
        return None
    table = {letter: second[min(n, len(second) - 1)] for n, letter in enumerate(first)}
    return "".join(table.get(letter, letter) for letter in text)


def _letters(word: str) -> str | None:
    if word.startswith("-"):
        return None
    named = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9"}
    for name, span in named.items():
        word = word.replace(name, span)
    if "[:" in word:
        return None
    spans = re.sub(r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m.group(1)), ord(m.group(2)) + 1))), ansi(word))
    return spans


def _cut(words: list[str], text: str, directory: Path) -> str | None:
    match = re.fullmatch(r"(?:-d ?(.)|-f ?(\d+)) (?:-d ?(.)|-f ?(\d+))", " ".join(words))
    if not match or (match.group(1) or match.group(3)) is None or (match.group(2) or match.group(4)) is None:
        return None
    between, n = match.group(1) or match.group(3), int(match.group(2) or match.group(4))
    lines = [line.split(between) for line in text.splitlines()]
    return "".join(
        (parts[n - 1] if n <= len(parts) else "") + "\n" if len(parts) > 1 else parts[0] + "\n" for parts in lines
    )


def _wc(words: list[str], text: str, directory: Path) -> str | None:
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return f"{counts[words[0]]}\n" if len(words) == 1 and words[0] in counts else None


def _head(words: list[str], text: str, directory: Path) -> str | None:
    match = re.fullmatch(r"(?:-n ?|-)(\d+)|", " ".join(words))
    if not match:
        return None
    return "".join(text.splitlines(keepends=True)[: int(match.group(1) or 10)])


def _xargs(words: list[str], text: str, directory: Path) -> str | None:
    return " ".join(text.split()) + "\n" if not words else None


def _which(words: list[str], text: str, directory: Path) -> str | None:
    return words[0] + "\n" if len(words) == 1 and not words[0].startswith("-") else None


FILTERS: Mapping[str, Filter] = {
    "basename": _basename,
    "dirname": _dirname,
    "realpath": _realpath,
    "date": _date,
    "cat": _cat,
    "expr": _expr,
    "seq": _seq,
    "tr": _tr,
    "cut": _cut,
    "wc": _wc,
    "head": _head,
    "xargs": _xargs,
    "which": _which,
}


def echo(words: list[str]) -> str:
    """What the builtin prints."""
    newline, escapes = True, False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        newline &= "n" not in words[0]
        escapes = (escapes or "e" in words[0]) and "E" not in words[0]
        words = words[1:]
    text = " ".join(words)
    return (ansi(text) if escapes else text) + ("\n" if newline else "")


def printf(words: list[str]) -> str | None:
    """What the builtin prints for `%s`, `%d`, `%q`-free formats, used again while words are left."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        return None
    form, given = ansi(words[0]), words[1:]
    parts = re.split(r"(%-?0?\d*(?:\.\d+)?[sdibf%])", form)
    if any("%" in part for part in parts[::2]):
        return None
    out, first = [], True
    while first or (given and len(parts) > 1):
        first = False
        before = len(given)
        for n, part in enumerate(parts):
            if n % 2 == 0:
                out.append(part)
            elif part == "%%":
                out.append("%")
            else:
                word = given.pop(0) if given else ""
                shown = _formatted(part, word)
                if shown is None:
                    return None
                out.append(shown)
        if before == len(given):
            break
    return "".join(out)


def _formatted(part: str, word: str) -> str | None:
    try:
        if part[-1] in "sb":
            return (part[:-1] + "s") % (ansi(word) if part[-1] == "b" else word)
        return (part[:-1] + "d") % int(word or 0) if part[-1] in "di" else part % float(word or 0)
    except (ValueError, TypeError):
        return None
