"""`${…}` in all its forms: defaults, prefixes and suffixes cut off, replacement, case, length, slices, arrays, indirection."""

import re

from flowledger.config.shell.arithmetic import ArithmeticFault, integer
from flowledger.config.shell.expand import Expander, Piece, joined
from flowledger.config.shell.lexer import closing, past
from flowledger.config.shell.scope import ASSUMED, Missing, Text, is_unknown, plain
from flowledger.flow.errors import BadInput

PER_READ = 100  # what a variable of an expression counts for: expressions may name each other
_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_OPERATOR = re.compile(r":-|:=|:\?|:\+|:|-|=|\?|\+|##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,|@")


def parameter(expander: Expander, body: str, double: bool) -> list[Piece]:
    """The pieces of `${body}` (or `$body`). Raises BadInput for `${NAME:?message}` where NAME is not set."""
    if body.startswith("#") and len(body) > 1 and (length := _length(expander, body[1:])) is not None:
        return [expander.made(length, double)]
    if body.startswith("!") and len(body) > 1 and (named := _indirect(expander, body[1:], double)) is not None:
        return named
    match = _NAME.match(body)
    if not match:
        raise BadInput(f"{expander.place}: ${{{body}}} is no expansion that bash knows")
    name, rest = match.group(), body[match.end() :]
    key, rest = _subscript(rest) if name[0].isalpha() or name[0] == "_" else (None, rest)
    operator = _OPERATOR.match(rest)
    if rest and not operator:
        raise BadInput(f"{expander.place}: ${{{body}}} is no expansion that bash knows")
    sign = operator.group() if operator else ""
    return _applied(expander, name, key, sign, rest[len(sign) :], double)


def _applied(e: Expander, name: str, key: str | None, sign: str, word: str, double: bool) -> list[Piece]:
    values = read(e, name, key)
    many = name in ("@", "*") or key in ("@", "*")
    star = name == "*" or key == "*"
    if sign in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
        empty = values is None or (sign[0] == ":" and not "".join(v.text for v in values))
        chosen = _alternative(e, name, key, sign, word, double, empty)
        if chosen is not None:
            return chosen
    elif values is None:
        e.scope.missing.add(Missing(name, e.place))
    was_set = values is not None
    values = values or []
    if not many and not values:
        values = [Text("", e.place)] if double else []
    if sign == ":":
        values = _slice(e, values, word, name, many)
    elif sign and was_set and sign not in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
        values = [Text(_changed(e, v.text, sign, word, double), v.place) for v in values]
    return _given(e, values, many=many, star=star, double=double)


def _given(e: Expander, values: list[Text], *, many: bool, star: bool, double: bool) -> list[Piece]:
    if star and double:
        between = e.scope.ifs[:1]
        return [Piece((Text(between.join(v.text for v in values), e.place),), quoted=True)]
    if many:
        return [Piece(tuple(values), quoted=double, splits=not double)]
    return [Piece((value,), quoted=double, splits=not double) for value in values]


def read(e: Expander, name: str, key: str | None) -> list[Text] | None:
    """The values of a parameter; None where it is not set."""
    scope = e.scope
    if name in ("@", "*"):
        return list(scope.arguments) or None
    if name.isdigit():
        index = int(name)
        if index == 0:
            return [Text(scope.file, e.place)]
        return [scope.arguments[index - 1]] if index <= len(scope.arguments) else None
    if name in "#?$!-":
        known = {"#": str(len(scope.arguments)), "?": "0", "-": "hB"}
        return [Text(known.get(name) or e.unknown(f"${name}"), e.place)]
    if name in ("RANDOM", "SECONDS", "BASHPID", "PPID", "EPOCHSECONDS") and name not in scope.variables:
        return [Text(e.unknown(f"${name}"), e.place)]
    if name in ("LINENO", "BASH_SOURCE", "FUNCNAME"):
        return [Text(scope.file if name == "BASH_SOURCE" else e.place.rpartition(":")[2], e.place)]
    variable = scope.variables.get(name)
    if variable is None:
        return None
    scope.missing.update(variable.missing)
    if name in scope.found.assumed and any(item.place == ASSUMED for item in variable.items.values()):
        scope.found.used.add(name)
    if key in ("@", "*"):
        return variable.values or None
    index_text = subscript(e, name, key)
    item = variable.items.get(index_text)
    return None if item is None else [item]


def subscript(e: Expander, name: str, key: str | None) -> str:
    """The key of an element: a word for a map, else the value of an integer expression, counted from the end below 0."""
    variable = e.scope.variables.get(name)
    if key is None:
        return "0"
    if variable and variable.kind == "map":
        return e.one(key)
    text = arithmetic(e, key)
    if is_unknown(text):
        return text
    index = int(text)
    if index < 0 and variable and variable.items:
        index += max(map(int, variable.items)) + 1
    return str(index)


def arithmetic(e: Expander, expression: str) -> str:
    """The text of `$((expression))`; unknown where a part of it is. Raises BadInput for what is no arithmetic."""
    text = joined(e.pieces(expression, double=True), e.scope.ifs)

    def variable(name: str) -> str:
        e.scope.found.spend(PER_READ, e.place)
        found = read(e, name, None)
        if found is None:
            e.miss(name)
        value = found[0].text if found else ""
        if is_unknown(value):
            raise ArithmeticFault("unknown")
        return value

    if is_unknown(text):
        return e.unknown(f"$(({plain(text)}))")
    try:
        return str(integer(text, variable, lambda name, value: e.scope.assign(name, Text(str(value), e.place))))
    except ArithmeticFault as fault:
        if str(fault) == "unknown":
            return e.unknown(f"$(({expression}))")
        raise BadInput(f"{e.place}: $(({expression})) = $(({text})): {fault}") from None


def _subscript(rest: str) -> tuple[str | None, str]:
    if not rest.startswith("["):
        return None, rest
    end = closing(rest, 1, "]")
    return (rest[1:end], rest[end + 1 :]) if end > 0 else (None, rest)


def _length(e: Expander, body: str) -> str | None:
    match = _NAME.match(body)
    if not match:
        return None
    key, rest = _subscript(body[match.end() :])
    if rest:
        return None
    name = match.group()
    values = read(e, name, key)
    if name in ("@", "*") or key in ("@", "*"):
        return str(len(values or []))
    if values is None:
        e.miss(name)
        return "0"
    return e.unknown(f"${{#{body}}}") if is_unknown(values[0].text) else str(len(values[0].text))


def _indirect(e: Expander, body: str, double: bool) -> list[Piece] | None:
    match = re.match(r"[A-Za-z_]\w*|\d+|#", body)
    if not match:
        return None
    name, rest = match.group(), body[match.end() :]
    if rest in ("[@]", "[*]"):
        variable = e.scope.variables.get(name)
        keys = [Text(key, e.place) for key in variable.keys] if variable else []
        return _given(e, keys, many=True, star=rest == "[*]", double=double)
    if rest in ("@", "*"):
        names = [Text(known, e.place) for known in sorted(e.scope.variables) if known.startswith(name)]
        return _given(e, names, many=True, star=rest == "*", double=double)
    if name == "#":
        found: list[Text] | None = e.scope.arguments[-1:]
    else:
        found = read(e, name, None)
        if found and found[0].text:
            return parameter(e, found[0].text + rest, double)
        e.miss(name)
        found = None
    return [Piece((found[0] if found else Text("", e.place),), quoted=double, splits=not double)]


def _alternative(
    e: Expander, name: str, key: str | None, sign: str, word: str, double: bool, empty: bool
) -> list[Piece] | None:
    """What a default or alternative puts in place of the value; None: the value itself."""
    kind = sign[-1]
    if kind == "+":
        return ([Piece((), quoted=double)] if key in ("@", "*") else []) if empty else _word(e, word, double)
    if not empty:
        return None
    if kind == "?":
        message = e.one(word) if word else "parameter null or not set"
        raise BadInput(f"{e.place}: {name} is not set ({plain(message)}); give --assume {name}=…")
    pieces = _word(e, word, double)
    if kind == "=":
        text = joined(pieces, e.scope.ifs)
        e.scope.assign(name, Text(text, e.place), key=subscript(e, name, key))
        return [Piece((Text(text, e.place),), quoted=double, splits=not double)]
    return pieces


def _word(e: Expander, word: str, double: bool) -> list[Piece]:
    """The pieces of a default; its literal text splits like an expansion, its quoted parts do not."""
    if double:
        return e.pieces(word, double=True) or [Piece((Text("", e.place),), quoted=True)]
    found = e.pieces(e.with_home(word))
    return [piece if piece.quoted or piece.splits else Piece(piece.items, splits=True) for piece in found]


def _slice(e: Expander, values: list[Text], word: str, name: str, many: bool) -> list[Text]:
    first, length = _slice_numbers(e, word)
    if first is None:
        return [Text(e.unknown(f"${{{name}:{word}}}"), e.place)]
    if many and name in ("@", "*"):
        values = [Text(e.scope.file, e.place), *values]
    if many:
        start = first if first >= 0 else len(values) + first
        return values[start:] if length is None else values[start : start + length]
    return [Text(_part(value.text, first, length), value.place) for value in values]


def _slice_numbers(e: Expander, word: str) -> tuple[int | None, int | None]:
    depth, colon = 0, -1
    for at, letter in enumerate(word):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1, "?": 1}.get(letter, 0)
        if letter == ":":
            if not depth:
                colon = at
                break
            depth -= 1
    first = arithmetic(e, word if colon < 0 else word[:colon])
    length = arithmetic(e, word[colon + 1 :]) if colon >= 0 else ""
    if is_unknown(first + length):
        return None, None
    return int(first), int(length) if length else None


def _part(text: str, first: int, length: int | None) -> str:
    start = first if first >= 0 else len(text) + first
    if start < 0:
        return ""
    if length is None:
        return text[start:]
    return text[start : start + length] if length >= 0 else text[start : len(text) + length]


def _changed(e: Expander, text: str, sign: str, word: str, double: bool) -> str:
    if is_unknown(text):
        return text
    if sign in ("#", "##", "%", "%%"):
        return _without(e, text, e.pattern(word), sign)
    if sign[0] == "/":
        return _replaced(e, text, sign, word, double)
    if sign[0] in "^,":
        pattern = e.pattern(word) if word else "."
        change = str.upper if sign[0] == "^" else str.lower
        letters = list(text)
        for at in range(len(letters) if len(sign) == 2 else min(1, len(letters))):
            if re.fullmatch(pattern, letters[at], re.DOTALL):
                letters[at] = change(letters[at])
        return "".join(letters)
    return {"U": text.upper(), "L": text.lower(), "u": text[:1].upper() + text[1:]}.get(word, text)


def _without(e: Expander, text: str, pattern: str, sign: str) -> str:
    """The text less the shortest (`#`, `%`) or longest (`##`, `%%`) match at its start or end."""
    e.scope.found.spend(len(text) ** 2 // 1000, e.place)
    ends = range(len(text) + 1)
    order = reversed(ends) if (sign == "##") or (sign == "%") else ends
    compiled = re.compile(pattern, re.DOTALL)
    for cut in order:
        piece = text[:cut] if sign[0] == "#" else text[cut:]
        if compiled.fullmatch(piece):
            return text[cut:] if sign[0] == "#" else text[:cut]
    return text


def _replaced(e: Expander, text: str, sign: str, word: str, double: bool) -> str:
    at = 1 if sign == "//" and word.startswith("/") else 0
    while at < len(word) and word[at] != "/":
        at = _step(word, at)
    pattern = e.pattern(word[:at])
    new = joined(e.pieces(word[at + 1 :], double=double), e.scope.ifs) if double else e.one(word[at + 1 :])
    if not pattern:
        return new + text if sign == "/#" else text + new if sign == "/%" else text
    anchored = {"/#": rf"\A(?:{pattern})", "/%": rf"(?:{pattern})\Z"}.get(sign, pattern)
    if sign == "/%":
        cut = next((n for n in range(len(text) + 1) if re.fullmatch(pattern, text[n:], re.DOTALL)), None)
        return text if cut is None else text[:cut] + new
    found = re.compile(anchored, re.DOTALL)
    if not text:
        return new if found.fullmatch(text) else text
    return found.sub(lambda match: new if match.group() or sign == "/#" else "", text, count=0 if sign == "//" else 1)


def _step(word: str, at: int) -> int:
    end = past(word, at) if word[at] in "\\'\"`$" else at + 1
    return end if end > at else at + 1
