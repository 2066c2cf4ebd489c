"""Simple commands: assignments, declarations, builtins, functions; and the program that a command starts, written down."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowledger.config.shell import commands
from flowledger.config.shell.assign import Assigning, noting
from flowledger.config.shell.conditions import Truth, bracket
from flowledger.config.shell.lexer import DECLARATIONS, simple_commands
from flowledger.config.shell.parameters import arithmetic
from flowledger.config.shell.scope import Command, Missing, Scope, Text, Variable, is_unknown, plain, unknown
from flowledger.config.shell.statements import Script, Walker, call
from flowledger.config.shown import shown_setting
from flowledger.flow.errors import BadInput

LARGEST_SOURCED = 1 << 20
_SETTING = re.compile(r"--[A-Za-z]|[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")


def simple(walker: Walker, text: str, line: int, script: Script, scope: Scope) -> Truth:
    """Run the text of one simple command (or of several, joined by operators)."""
    truth: Truth = True
    skips = ""
    for parsed in simple_commands(text, line, script.file):
        runs = not skips or (skips == "&&") == (truth is not False)
        if runs and (parsed.words or parsed.assignments):
            truth = _Run(walker, scope, script, parsed).run()
        skips = parsed.operator if parsed.operator in ("&&", "||") else ""
    return truth


class _Run(Assigning):
    """One simple command in its scope."""

    def run(self) -> Truth:
        words = self.parsed.words
        if words and words[0].text in DECLARATIONS:
            return self.declare()
        with noting(self.scope) as missing:
            fields = [field for word in words for field in self.at(word.line).words(word.text)]
            if not fields:
                for assignment in self.parsed.assignments:
                    self.assign(assignment)
                return True
            environment = {a.name: self.at(a.line).one(a.value.text, assigned=True) for a in self.parsed.assignments}
            return self.command(fields, environment, frozenset(missing))

    def command(self, fields: list[Text], environment: dict[str, str], missing: frozenset[Missing]) -> Truth:
        scope = self.scope
        if fields[0].text in scope.functions:
            with self.lent(environment):
                return call(self.walker, fields[0].text, fields[1:], scope)
        builtin = self.builtin(fields[0].text, fields[1:], environment)
        if builtin is not NotImplemented:
            return builtin  # type: ignore[return-value]  # NotImplemented was taken out above
        ends = fields[0].text == "exec" and len(fields) > 1
        environment |= commands.assigned_by_env(fields)
        inner = commands.unwrapped(fields)
        name = commands.base(inner[0].text)
        if name in commands.SHELLS:
            truth = self.shell(inner, environment)
        elif inner is not fields and inner[0].text in scope.functions:
            truth = call(self.walker, inner[0].text, inner[1:], scope)
        elif commands.starts_program(inner) and scope.output is None:
            self.launch(inner, environment, missing)
            truth = None
        else:
            truth = self.outside(inner)
        if ends:
            scope.found.ended = scope.found.ended or self.place
            raise commands.Exit
        return truth

    def launch(self, words: list[Text], environment: dict[str, str], missing: frozenset[Missing]) -> None:
        whole = {**self.scope.environment(), **environment}
        self.scope.found.commands.append(Command(words, whole, missing, self.place))

    def outside(self, words: list[Text]) -> Truth:
        """A command that is not run. Inside `$(…)` its output may be known."""
        name, scope = words[0].text, self.scope
        if scope.output is None and _SETTING.match(name):
            scope.found.notes.append(
                f"{self.place}: {shown_setting(plain(name))} stands alone as a command and is not read; "
                "is a backslash missing at the end of the line before it?"
            )
        if scope.output is None or self.parsed.output_lost:
            return commands.QUIET.get(name)
        printed = commands.output_of(name, [word.text for word in words[1:]], self.input() or "", scope)
        if printed is None:
            raise commands.NotKnown
        scope.output.append(printed)
        return True

    def input(self) -> str | None:
        here = self.parsed.input
        return self.at(here.line).one(here.text) + "\n" if here else self.scope.input

    def builtin(self, name: str, words: list[Text], environment: dict[str, str]) -> object:
        """The status of a builtin; NotImplemented where the name is none."""
        scope, texts = self.scope, [word.text for word in words]
        match name:
            case "cd" | "pushd":
                return commands.change_directory(scope, texts)
            case "shift":
                return commands.shift(scope, texts)
            case "set":
                return commands.set_arguments(scope, words)
            case "unset":
                return commands.unset(scope, texts, lambda text: arithmetic(self.at(self.line), text))
            case "exit":
                scope.found.ended = scope.found.ended or self.place
                raise commands.Exit
            case "return":
                raise commands.Return({"0": True}.get(texts[0] if texts else "0", False))
            case "break" | "continue":
                return commands.leave(name, texts)
            case "source" | ".":
                with self.lent(environment):
                    return self.source(words)
            case "eval":
                with self.lent(environment):
                    return self.nested(" ".join(texts), scope)
            case _:
                return self.builtin_of_values(name, words, environment)

    def builtin_of_values(self, name: str, words: list[Text], environment: dict[str, str]) -> object:
        """Builtins that compute, compare or read."""
        scope, texts = self.scope, [word.text for word in words]
        match name:
            case "let":
                return commands.let(scope, texts, self.place)
            case "read":
                return commands.read_into(scope, texts, self.input(), self.place, environment.get("IFS", scope.ifs))
            case "printf" if texts[:1] == ["-v"] and len(texts) > 2:
                printed = commands.output_of("printf", texts[2:], "", scope)
                value = unknown(f"$(printf {' '.join(texts[2:])})") if printed is None else printed
                scope.assign(texts[1], Text(value, self.place))
                return True
            case "test":
                return bracket(texts, scope, self.place)
            case "[":
                return bracket(texts[:-1], scope, self.place)
            case "mapfile" | "readarray":
                target = texts[-1] if texts and not texts[-1].startswith("-") else "MAPFILE"
                scope.variables[target] = Variable({"0": Text(unknown(f"$({name})"), self.place)}, "array")
                return None
            case _:
                return NotImplemented

    @contextmanager
    def lent(self, environment: dict[str, str]) -> Iterator[None]:
        """`A=1 source file`: variables that stand only while the command runs."""
        kept = {name: self.scope.variables.get(name) for name in environment}
        for name, value in environment.items():
            self.scope.variables[name] = Variable({"0": Text(value, self.place)}, exported=True)
        try:
            yield
        finally:
            self.scope.restore(kept)

    def nested(self, text: str, scope: Scope) -> Truth:
        return self.walker.run(Script(plain(text).encode(), self.script.file, self.line), scope)

    def shell(self, words: list[Text], environment: dict[str, str]) -> Truth:
        """`bash -c 'text' name args`, or `bash script args` where the script is there: in a scope of its own."""
        rest = words[1:]
        text_follows = False
        while rest and rest[0].text[:1] in ("-", "+") and len(rest[0].text) > 1:
            text_follows |= not rest[0].text.startswith("--") and "c" in rest[0].text
            rest = rest[1:]
        if not rest:
            return None
        inner = self.scope.fork()
        inner.variables = {name: v for name, v in inner.variables.items() if v.exported}
        for name, value in environment.items():
            inner.variables[name] = Variable({"0": Text(value, self.place)}, exported=True)
        inner.functions = {}
        try:
            if text_follows:
                inner.arguments = rest[2:]
                inner.file = rest[1].text if len(rest) > 1 else words[0].text
                return self.nested(rest[0].text, inner)
            inner.arguments, inner.file = rest[1:], rest[0].text
            return self.follow(rest[0], inner)
        except commands.Exit:
            return True

    def source(self, words: list[Text]) -> Truth:
        if not words:
            return False
        scope = self.scope
        kept, file = scope.arguments, scope.file
        scope.arguments = words[1:] or kept
        scope.file = words[0].text
        scope.depth += 1
        try:
            return self.follow(words[0], scope)
        except commands.Return as end:
            return end.truth
        finally:
            scope.depth -= 1
            scope.file = file
            scope.arguments = kept if words[1:] else scope.arguments

    def follow(self, named: Text, scope: Scope) -> Truth:
        """Run another file in this scope; where it is not there, say so and go on."""
        path = self.found(named.text)
        if path is None:
            scope.found.notes.append(
                f"{self.place}: {plain(named.text)} is not here; what it sets or starts is not known"
            )
            return None
        try:
            source = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{self.place}: {path}: {error.strerror}") from None
        if len(source) > LARGEST_SOURCED or b"\0" in source:
            raise BadInput(f"{self.place}: {path} is no text that a shell would read")
        return self.walker.run(Script(source.replace(b"\r\n", b"\n"), _shown(named.text)), scope)

    def found(self, name: str) -> Path | None:
        """The file as bash looks for it, else beside the script."""
        if is_unknown(name):
            return None
        for folder in (self.scope.directory, Path(self.script.file).parent):
            try:
                if (folder / name).is_file():
                    return folder / name
            except (OSError, ValueError):
                return None
        return None


def _shown(name: str) -> str:
    """A path as people write it: relative where it lies beneath the current directory."""
    here = Path.cwd()
    return str(Path(name).relative_to(here)) if Path(name).is_relative_to(here) else name
