"""A script with all that stands in quotes, expansions and here-documents blanked out, byte for byte.

What is left is the structure that a grammar of bash has to know: commands, operators, keywords. Words are cut and expanded
from the original text, so nothing is lost; and no odd quoting inside a word can make the grammar lose its way.
"""

import re

from flowledger.config.shell.lexer import closing, past
from flowledger.flow.errors import BadInput

_HEREDOC = re.compile(r"<<(-?)[ \t]*('[^'\n]*'|\"[^\"\n]*\"|[^\s<>|&;()]+)")
_REDIRECT = re.compile(r"(&>>|&>|<<<|>>|>&|<&|<>|>\||>|<)[ \t]*")
_DESCRIPTOR = re.compile(r"\d+(?=[<>])")
_ENDS_COMPOUND = re.compile(r"(?:\b(?:done|fi|esac)|[})\]])[ \t]*$")  # after these no word may follow


def masked(text: str, file: str, first: int) -> bytes:
    """UTF-8 of the text, of equal length: quotes, expansions and redirections replaced by `x`, documents by blanks.

    Raises BadInput with the line of a quote or bracket that is never closed.
    """
    out: list[bytes] = []
    at, blanked = 0, -1  # where the last redirection of a compound command ended
    delimiters: list[tuple[str, bool]] = []
    while at < len(text):
        letter = text[at]
        if letter == "#" and (at == 0 or text[at - 1] in " \t\n;&|()"):
            end = text.find("\n", at)
            end = end if end >= 0 else len(text)
            out.append(b"#" + b"x" * (len(text[at:end].encode()) - 1))
        elif letter == "\n":
            end = _past_bodies(text, at + 1, delimiters)
            out.append(re.sub(rb"[^\n]", b" ", text[at:end].encode()))
            delimiters = []
        elif (letter in "<>&" or letter.isdigit()) and (end := _past_redirect(text, at, delimiters)) > 0:
            alone = _ENDS_COMPOUND.search(text[max(0, at - 8) : at]) or (
                blanked >= 0 and not text[blanked:at].strip(" \t")
            )
            blanked = end if alone else blanked
            out.append((b" " if alone else b"x") * len(text[at:end].encode()))
        elif text.startswith("((", at) and (end := closing(text, at + 2, ")") + 2) > 1:
            inner = re.sub(r"[^;]", lambda match: "1" * len(match.group().encode()), text[at + 2 : end - 2])
            out.append(b"((" + inner.encode() + text[end - 2 : end].encode())
        elif letter == "[" and (at == 0 or text[at - 1] in " \t\n;&|(!") and (end := _past_test(text, at)) > 0:
            out.append(_test(text[at:end]))
        elif letter in "\\'\"`$":
            end = _closed(text, at, file, first)
            out.append(_blank(text[at:end]))
        else:
            end = at + 1
            out.append(letter.encode())
        at = end
    return b"".join(out)


def _closed(text: str, at: int, file: str, first: int) -> int:
    end = past(text, at)
    if end < 0:
        shown = text[at : at + 6].split("\n")[0]
        line = first + text.count("\n", 0, at)
        raise BadInput(f"{file}:{line}: {shown} is opened and never closed; close the quote or bracket")
    return end


def _past_redirect(text: str, at: int, delimiters: list[tuple[str, bool]]) -> int:
    """The index after a redirection with its target; -1 where none begins. Here-documents are noted in `delimiters`."""
    if text.startswith(("<(", ">("), at):
        return closing(text, at + 2, ")") + 1 or -1
    if text[at].isdigit():
        number = _DESCRIPTOR.match(text, at)
        if not number or (at and text[at - 1] not in " \t\n;&|()}"):
            return -1
        at = number.end()
    if not text.startswith("<<<", at) and (document := _HEREDOC.match(text, at)):
        delimiters.append((re.sub(r"[\\'\"]", "", document.group(2)), document.group(1) == "-"))
        return document.end()
    sign = _REDIRECT.match(text, at)
    if not sign:
        return -1
    end = sign.end()
    if text.startswith(("<(", ">("), end):
        return closing(text, end + 2, ")") + 1 or -1
    while end < len(text) and text[end] not in " \t\n;&|()<>":
        step = past(text, end) if text[end] in "\\'\"`$" else end + 1
        if step < 0:
            return -1
        end = step
    return end


def _past_bodies(text: str, at: int, delimiters: list[tuple[str, bool]]) -> int:
    """The index of the line break before what follows the documents that begin at `at`."""
    for delimiter, tabs in delimiters:
        while at < len(text):
            end = text.find("\n", at)
            line = text[at : end if end >= 0 else len(text)]
            at = end + 1 if end >= 0 else len(text)
            if (line.lstrip("\t") if tabs else line) == delimiter:
                break
    return at


def _past_test(text: str, at: int) -> int:
    """The index after the `]` or `]]` of a test; -1 where it is none."""
    sign = "[[" if text.startswith("[[", at) else "["
    if text[at + len(sign) : at + len(sign) + 1] not in (" ", "\t", "\n"):
        return -1
    close, scan = "]" * len(sign), at + len(sign)
    while scan < len(text):
        letter = text[scan]
        if letter in " \t\n" and re.match(rf"{re.escape(close)}(?=[\s;&|)]|$)", text[scan + 1 : scan + 4]):
            return scan + 1 + len(close)
        if letter == ";" or (letter == "\n" and sign == "["):
            return -1
        scan = past(text, scan) if letter in "\\'\"`$" else scan + 1
        if scan < 0:
            return -1
    return -1


def _test(piece: str) -> bytes:
    """`[ xxxx ]`: what stands inside is read from the original text."""
    size = 2 if piece.startswith("[[") else 1
    inside = len(piece[size + 1 : -size - 1].encode())
    return b"[" * size + b" " + b"x" * inside + (b" " if len(piece) > 2 * size + 1 else b"") + b"]" * size


def _blank(piece: str) -> bytes:
    if piece in ("\\\n", "$", "\\"):
        return piece.encode()
    return b"x" * len(piece.encode())
