"""Compound commands: lists, pipelines, tests, `if`, `for`, `while`, `case`, functions, as far as their conditions are known."""

import re

from tree_sitter import Node

from flowledger.config.shell.commands import Exit, Leave
from flowledger.config.shell.conditions import DoubleBracket, Truth, both, bracket, either, negated
from flowledger.config.shell.lexer import array_words, closing, past
from flowledger.config.shell.parameters import arithmetic
from flowledger.config.shell.scope import Scope, is_unknown, plain
from flowledger.config.shell.statements import SIMPLE, Handler, Script, Walker


def _split_at(nodes: list[Node], word: str) -> tuple[list[Node], list[Node]]:
    at = next((n for n, node in enumerate(nodes) if node.type == word), len(nodes))
    return nodes[:at], nodes[at + 1 :]


def _compound(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    if node.children and node.children[0].type == "((":
        return _number(walker, script.text(node)[2:-2], script.place(node), scope)
    return walker.block(node.children, script, scope)


def _number(walker: Walker, expression: str, place: str, scope: Scope) -> Truth:
    value = arithmetic(walker.expander(scope, place), expression)
    return None if is_unknown(value) else int(value) != 0


def _subshell(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    try:
        return walker.block(node.children, script, scope.fork())
    except Exit:
        return True


def _list(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    left, operator, right = node.children[0], node.children[1].type, node.children[-1]
    truth = walker.statement(left, script, scope)
    if truth is None and left.type in ("test_command", "negated_command"):
        _note(scope, script.place(left), script.text(left))
        return None
    if (truth is not False) != (operator == "&&"):
        return truth
    other = walker.statement(right, script, scope)
    return both(truth, other) if operator == "&&" else either(truth, other)


def _note(scope: Scope, place: str, text: str) -> None:
    shown = " ".join(text.split())
    note = f"{place}: `{shown[:80]}` is not known before the run; taken as false"
    if note not in scope.found.notes:
        scope.found.notes.append(note)


def _pipeline(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    """Each part in a subshell. Inside `$(…)` the output of one is the input of the next."""
    truth: Truth = True
    parts = [child for child in node.children if child.is_named and child.type != "comment"]
    text: str | None = None
    for n, part in enumerate(parts):
        last = n == len(parts) - 1
        inner = scope.fork(output=scope.output if last or scope.output is None else [])
        inner.input = text if n else scope.input
        truth = walker.isolated(part, script, inner)
        text = "".join(inner.output or []) if inner.output is not None else None
    return truth


def _negated(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    return negated(walker.statement(node.children[-1], script, scope))


def _redirected(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    body = node.child_by_field_name("body")
    if body is None or body.type in SIMPLE:
        return walker.simple(walker, script.text(node), script.line(node), script, scope)
    return walker.statement(body, script, scope)


def _test(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    text, place = script.text(node), script.place(node)
    expander = walker.expander(scope, place)
    if text.startswith("(("):
        return _number(walker, text[2:-2], place, scope)
    if text.startswith("[["):
        return DoubleBracket(text[2:-2], expander).truth()
    words = array_words(text[1:-1], script.line(node), script.file)
    return bracket([field.text for word in words for field in expander.fields(word.text)], scope, place)


def _if(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    condition, rest = _split_at(node.children[1:], "then")
    body = [child for child in rest if child.type not in ("elif_clause", "else_clause", "fi")]
    branches = [(condition, body)]
    otherwise: list[Node] = []
    for clause in rest:
        if clause.type == "elif_clause":
            branches.append(_split_at(clause.children[1:], "then"))
        elif clause.type == "else_clause":
            otherwise = clause.children[1:]
    for condition, body in branches:
        truth = walker.block(condition, script, scope)
        if truth:
            return walker.block(body, script, scope)
        if truth is None:
            named = [child for child in condition if child.is_named]
            _note(scope, script.place(named[0]), script.between(named[0].start_byte, named[-1].end_byte))
    return walker.block(otherwise, script, scope)


def _loop(walker: Walker, body: Node, script: Script, scope: Scope) -> bool:
    """One round of a loop; false where it is left."""
    try:
        walker.statement(body, script, scope)
    except Leave as leave:
        if leave.loops > 1:
            raise Leave(leave.word, leave.loops - 1) from None
        return leave.word == "continue"
    return True


def _for(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    if variable is None or body is None or script.text(node).startswith("select"):
        return True
    head = script.between(variable.end_byte, body.start_byte).strip(" \t\n;")
    place = script.place(node)
    if not head:
        values = list(scope.arguments)
    else:
        words = array_words(head.removeprefix("in"), script.line(node), script.file)
        values = [field for word in words for field in walker.expander(scope, place).fields(word.text)]
    for value in values:
        scope.assign(script.text(variable), value, missing=frozenset(scope.missing))
        if not _loop(walker, body, script, scope):
            break
    return True


def _c_for(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    body = node.child_by_field_name("body")
    text, place = script.text(node), script.place(node)
    start = text.find("((") + 2
    parts = text[start : closing(text, start, ")")].split(";")
    if body is None or len(parts) != 3:
        return True
    _number(walker, parts[0], place, scope)
    while not parts[1].strip() or _number(walker, parts[1], place, scope):
        if not _loop(walker, body, script, scope):
            break
        _number(walker, parts[2], place, scope)
    return True


def _while(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    body = node.child_by_field_name("body")
    if body is None:
        return True
    wanted = node.children[0].type != "until"
    condition = [child for child in node.children[1:] if child.end_byte <= body.start_byte]
    while (truth := walker.block(condition, script, scope)) is wanted:
        if not _loop(walker, body, script, scope):
            return True
    if truth is None:
        _note(scope, script.place(node), script.between(condition[0].start_byte, condition[-1].end_byte))
    return True


def _case(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    value = node.child_by_field_name("value")
    if value is None:
        return True
    head = next((child for child in node.children if child.type == "in"), value)
    expander = walker.expander(scope, script.place(node))
    text = expander.one(script.between(node.children[0].end_byte, head.start_byte).strip())
    falls = False
    for item in (child for child in node.children if child.type == "case_item"):
        paren = next((child for child in item.children if child.type == ")"), None)
        if paren is None:
            continue
        patterns = _patterns(script.between(item.start_byte, paren.start_byte).strip().removeprefix("("))
        if is_unknown(text) and not falls and patterns != ["*"]:
            _note(scope, script.place(item), f"case {plain(text)} in {' | '.join(patterns)})")
        elif falls or any(re.fullmatch(expander.pattern(pattern), text, re.DOTALL) for pattern in patterns):
            body = [child for child in item.children if child.start_byte > paren.start_byte]
            truth = walker.block([child for child in body if child.type not in (";;", ";&", ";;&")], script, scope)
            endings = [child.type for child in body if child.type in (";&", ";;&")]
            if ";;&" not in endings and ";&" not in endings:
                return truth
            falls = ";&" in endings
    return True


def _patterns(text: str) -> list[str]:
    parts, start, at = [], 0, 0
    while at < len(text):
        if text[at] in "\\'\"`$":
            at = max(past(text, at), at + 1)
            continue
        if text[at] == "|":
            parts.append(text[start:at].strip())
            start = at + 1
        elif text[at] == "(":
            at = max(closing(text, at + 1, ")"), at)
        at += 1
    return [*parts, text[start:].strip()]


def _function(walker: Walker, node: Node, script: Script, scope: Scope) -> Truth:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name is not None and body is not None:
        scope.functions[script.text(name)] = (body, script)
    return True


HANDLERS: dict[str, Handler] = {
    "compound_statement": _compound,
    "do_group": _compound,
    "subshell": _subshell,
    "list": _list,
    "pipeline": _pipeline,
    "negated_command": _negated,
    "redirected_statement": _redirected,
    "test_command": _test,
    "if_statement": _if,
    "for_statement": _for,
    "c_style_for_statement": _c_for,
    "while_statement": _while,
    "case_statement": _case,
    "function_definition": _function,
}
