"""Assignments and declarations: `A=1`, `A+=(x)`, `export`, `declare -A`, `local`. What a value lacks is kept with it."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowledger.config.shell.conditions import Truth
from flowledger.config.shell.expand import Expander
from flowledger.config.shell.lexer import Assignment, Simple
from flowledger.config.shell.parameters import arithmetic, subscript
from flowledger.config.shell.scope import Missing, Scope, Text, Variable
from flowledger.config.shell.statements import Script, Walker


@contextmanager
def noting(scope: Scope) -> Iterator[set[Missing]]:
    """What is missing in the expansions made here, apart from what was missing before."""
    before = set(scope.missing)
    scope.missing.clear()
    try:
        yield scope.missing
    finally:
        scope.missing.update(before)


class Assigning:
    """A simple command in its scope, as far as it sets variables."""

    def __init__(self, walker: Walker, scope: Scope, script: Script, parsed: Simple) -> None:
        self.walker, self.scope, self.script, self.parsed = walker, scope, script, parsed
        first = (parsed.words or [a.value for a in parsed.assignments])[0]
        self.line = min([first.line, *(a.line for a in parsed.assignments)])

    def at(self, line: int) -> Expander:
        return self.walker.expander(self.scope, f"{self.script.file}:{line}")

    @property
    def place(self) -> str:
        return f"{self.script.file}:{self.line}"

    def assign(self, assignment: Assignment, *, local: bool = False) -> None:
        scope, e = self.scope, self.at(assignment.line)
        if local:
            scope.hide(assignment.name)
            if not assignment.append:
                scope.variables.pop(assignment.name, None)
        with noting(scope) as missing:
            if assignment.elements is not None:
                self.assign_array(assignment)
                return
            text = e.one(assignment.value.text, assigned=True)
            key = subscript(e, assignment.name, assignment.key)
            if assignment.append:
                text = self.appended(assignment.name, key, text)
            lacks = frozenset(missing)
            scope.assign(assignment.name, Text(text, e.place, lacks), missing=lacks, key=key)

    def appended(self, name: str, key: str, text: str) -> str:
        old = self.scope.variables.get(name)
        item = old.items.get(key) if old else None
        self.scope.missing.update(old.missing if old else ())
        return (item.text if item else "") + text

    def assign_array(self, assignment: Assignment) -> None:
        scope, name = self.scope, assignment.name
        old = scope.variables.get(name)
        kind = "map" if old and old.kind == "map" else "array"
        items = dict(old.items) if old and assignment.append else {}
        index = max([int(key) for key in items], default=-1) + 1 if kind == "array" else 0
        for word in assignment.elements or ():
            e = self.at(word.line)
            if word.text.startswith("[") and "]=" in word.text:
                raw_key, raw = word.text[1:].split("]=", 1)
                key = e.one(raw_key) if kind == "map" else arithmetic(e, raw_key)
                items[key] = Text(e.one(raw), e.place)
                index = int(key) + 1 if kind == "array" and key.isdigit() else index
                continue
            for field in e.words(word.text):
                items[str(index)] = field
                index += 1
        kept = old.missing if old and assignment.append else frozenset()
        exported = bool(old and old.exported)
        missing = kept | frozenset(scope.missing)
        scope.variables[name] = Variable(items, "map" if kind == "map" else "array", missing, exported)

    def declare(self) -> Truth:
        """`export`, `declare`, `local`, `readonly`, `typeset`."""
        scope, name = self.scope, self.parsed.words[0].text
        fields = [f.text for word in self.parsed.words[1:] for f in self.at(word.line).fields(word.text)]
        options = "".join(field[1:] for field in fields if field.startswith("-"))
        local = name == "local" or (name in ("declare", "typeset") and bool(scope.locals) and "g" not in options)
        names = [field for field in fields if field[:1] not in ("-", "+")]
        for declared in names:
            self.declare_name(declared, local, options)
        for assignment in self.parsed.assignments:
            if "A" in options and assignment.elements is not None:
                self.declare_name(assignment.name, local, options)
            self.assign(assignment, local=local and "A" not in options)
            names.append(assignment.name)
        if name == "export" or "x" in options:
            for declared in names:
                if "f" not in options:
                    scope.export(declared.split("=")[0])
        return True

    def declare_name(self, declared: str, local: bool, options: str) -> None:
        """A name without a value, or `NAME=value` that came out of an expansion."""
        name, equals, value = declared.partition("=")
        if local:
            self.scope.hide(name)
            self.scope.variables.pop(name, None)
        if "A" in options or "a" in options:
            if name not in self.scope.variables:
                self.scope.variables[name] = Variable({}, "map" if "A" in options else "array")
        elif equals:
            self.scope.assign(name, Text(value, self.place))
