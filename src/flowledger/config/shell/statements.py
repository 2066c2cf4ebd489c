"""Walks the syntax tree of a script as bash would run it, executing nothing: what it does to variables is done to a Scope."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from flowledger.config.shell.commands import Exit, NotKnown, Return
from flowledger.config.shell.conditions import Truth
from flowledger.config.shell.expand import Expander
from flowledger.config.shell.mask import masked
from flowledger.config.shell.parameters import arithmetic, parameter
from flowledger.config.shell.scope import Scope, Text, unknown
from flowledger.flow.errors import BadInput

LANGUAGE = Language(tree_sitter_bash.language())
_FOR_ARGUMENTS = re.compile(rb"((?:^|[;&|({])[ \t]*for[ \t]+[A-Za-z_]\w*)(?=[ \t]*(?:;|\n)?\s*do\b)", re.MULTILINE)
SIMPLE = frozenset(("command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"))
MOST_STATEMENTS = 20_000
DEEPEST = 60


@dataclass(frozen=True, slots=True)
class Script:
    """One text and where it stands: its file, and the line of its first character."""

    source: bytes
    file: str
    first: int = 1

    def text(self, node: Node) -> str:
        return self.between(node.start_byte, node.end_byte)

    def between(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def line(self, node: Node) -> int:
        return self.first + self.source.count(b"\n", 0, node.start_byte)

    def place(self, node: Node) -> str:
        return f"{self.file}:{self.line(node)}"


Simple = Callable[["Walker", str, int, Script, Scope], Truth]
Handler = Callable[["Walker", Node, Script, Scope], Truth]


@dataclass(frozen=True, slots=True)
class Walker:
    """`simple` runs the text of simple commands, a handler each kind of compound command."""

    simple: Simple
    handlers: Mapping[str, Handler]

    def run(self, script: Script, scope: Scope) -> Truth:
        """Run a whole text. Raises BadInput where it is no bash, with the line."""
        tree = Parser(LANGUAGE).parse(masked(script.source.decode(), script.file, script.first))
        if tree.root_node.has_error:  # the grammar does not know `for NAME` without `in`
            whole = _FOR_ARGUMENTS.sub(rb'\1 in "$@"', script.source)
            script = replace(script, source=whole)
            tree = Parser(LANGUAGE).parse(masked(whole.decode(), script.file, script.first))
            refuse_faults(tree.root_node, script)
        return self.block(tree.root_node.children, script, scope)

    def block(self, nodes: list[Node], script: Script, scope: Scope) -> Truth:
        truth: Truth = True
        for n, node in enumerate(nodes):
            if not node.is_named or node.type in ("comment", "heredoc_body"):
                continue
            background = n + 1 < len(nodes) and nodes[n + 1].type == "&"
            truth = self.isolated(node, script, scope.fork()) if background else self.statement(node, script, scope)
        return truth

    def isolated(self, node: Node, script: Script, scope: Scope) -> Truth:
        """In a subshell: its `exit` ends only itself."""
        try:
            return self.statement(node, script, scope)
        except Exit:
            return True

    def statement(self, node: Node, script: Script, scope: Scope) -> Truth:
        scope.found.statements += 1
        if scope.found.statements > MOST_STATEMENTS:
            raise BadInput(
                f"{script.place(node)}: more than {MOST_STATEMENTS} statements were run; does a loop not end?"
            )
        if scope.depth > DEEPEST:
            raise BadInput(
                f"{script.place(node)}: functions, sourced files or substitutions nest deeper than {DEEPEST}"
            )
        if node.type in SIMPLE:
            return self.simple(self, script.text(node), script.line(node), script, scope)
        handler = self.handlers.get(node.type)
        return handler(self, node, script, scope) if handler else True

    def expander(self, scope: Scope, place: str) -> Expander:
        return Expander(scope, place, self.substitute, parameter, arithmetic)

    def substitute(self, text: str, scope: Scope, place: str) -> str:
        """The output of `$(text)`; unknown text where only the run could tell."""
        inner = scope.fork(output=[])
        if scope.depth > DEEPEST:
            raise BadInput(f"{place}: substitutions nest deeper than {DEEPEST}")
        if match := re.fullmatch(r"\s*<\s*(\S+)\s*", text):
            text = f"cat {match.group(1)}"
        file, _, line = place.rpartition(":")
        try:
            self.run(Script(text.encode(), file, int(line)), inner)
        except Exit:
            pass
        except NotKnown:
            return unknown(f"$({text})")
        return "".join(inner.output or []).rstrip("\n")


def refuse_faults(root: Node, script: Script) -> None:
    """Raise BadInput for the first fault outside simple commands, whose words are cut by our own rules."""
    for node in _faults(root):
        place = script.place(node)
        if node.is_missing:
            raise BadInput(f"{place}: {node.type!r} is missing here; the script is not complete bash")
        shown = script.text(node).strip().split("\n")[0][:60]
        raise BadInput(
            f"{place}: {shown or 'this'!r} cannot be read as bash; check quotes, brackets, `fi`, `done` before it"
        )


def _faults(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    elif node.has_error and node.type not in SIMPLE:
        body = node.child_by_field_name("body") if node.type == "redirected_statement" else None
        if node.type == "redirected_statement" and (body is None or body.type in SIMPLE):
            return
        for child in node.children:
            yield from _faults(child)


def call(walker: Walker, name: str, words: list[Text], scope: Scope) -> Truth:
    """Run a function of the script: its own arguments and locals, the caller's variables."""
    body, script = scope.functions[name]
    kept = scope.arguments
    scope.arguments = words
    scope.locals.append({})
    scope.depth += 1
    try:
        return walker.statement(body, script, scope)
    except Return as end:
        return end.truth
    finally:
        scope.depth -= 1
        scope.arguments = kept
        scope.restore(scope.locals.pop())
