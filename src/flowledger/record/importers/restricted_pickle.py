"""A pickle read as data: numbers, texts, bytes, lists, tuples and dicts, and nothing else.

Python's own unpickler calls whatever a file names, and is kept from it by a list of what is refused. This one has no code
that could call anything: an instruction that is none of `STEPS` ends the reading, by its name. It reads a window at a time,
never recurses, keeps an account of the memory that it builds, and takes no keys but texts and whole numbers, whose hashes
cost nothing. Protocols 2 to 5; format: the comments of CPython's Lib/pickletools.py.
"""

import pickletools
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from typing import Any

from flowledger.flow.errors import BadInput

ROOM = 700 << 20  # bytes that what is built may take, by estimate
KEPT = 144  # bytes that what is kept in a dict's place may take
LONGEST_NUMBER = 16  # bytes; sizes and addresses have 8
_AHEAD = 16  # bytes: more than an instruction and its fixed argument have
_VALUE, _PAIR, _TEXT, _CONTAINER = (
    48,
    40,
    57,
    72,
)  # bytes in CPython on 64 bits: a number and its place; the others empty
_NAMES = {ord(one.code): one.name for one in pickletools.opcodes}
_CALLS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "PERSID", "BINPERSID"} | {
    f"EXT{size}" for size in (1, 2, 4)
}
_BYTE, _SHORT, _INT, _UNSIGNED, _LONG, _DOUBLE = (Struct(form) for form in ("B", "<H", "<i", "<I", "<Q", ">d"))
_GET, _GET_LONG, _SMALL, _WHOLE, _STOP = b"hjKJ."  # numbers and what came before: nearly all of a file

Made = Callable[[dict[Any, Any]], Any]  # a dict that is complete -> what to keep in its place


class Torn(Exception):  # noqa: N818  (it is what happened to the file)
    """The file ends before its pickle does; `stack` is what had been read, the outermost first."""

    def __init__(self, stack: list[Any], at: int) -> None:
        super().__init__(f"ends in the middle, after {at:,} bytes")
        self.stack = stack


def load(pieces: Iterator[bytes], name: str, made: Made | None = None) -> Any:
    """What a pickle holds. A dict for which `made` gives another object is emptied, and that one kept.

    Raises BadInput where the file asks for anything but plain data, takes too much memory or is no pickle; Torn where it
    ends too early.
    """
    reading = _Reading(pieces, made)
    try:
        return reading.run()
    except BadInput as error:
        raise BadInput(f"{name} {error}") from None
    except (IndexError, TypeError, ValueError) as error:
        raise BadInput(f"{name} is damaged, or no pickle: before byte {reading.place:,}: {error}") from None


class _Reading:
    """The stack machine of a pickle, less everything that calls."""

    __slots__ = ("at", "before", "end", "made", "marks", "memo", "padded", "pieces", "room", "stack", "window")

    def __init__(self, pieces: Iterator[bytes], made: Made | None) -> None:
        self.pieces, self.made = pieces, made
        self.window, self.at, self.end = b"", 0, 0  # instructions begin before `end`, and arguments are whole there
        self.before, self.padded = 0, False  # bytes that have left the window; whether it has come to the file's end
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: list[Any] = []
        self.room = ROOM

    @property
    def place(self) -> int:
        return self.before + self.at

    def run(self) -> Any:
        """All instructions. The few that make up nearly all of a file are followed here."""
        window, at, stack, memo, end = self.window, self.at, self.stack, self.memo, self.end
        push, whole = stack.append, _INT.unpack_from
        while True:
            if at >= end:
                self.at = at
                self.fill(1)
                window, at, end = self.window, self.at, self.end
            code = window[at]
            if code == _GET:
                push(memo[window[at + 1]])
                at += 2
            elif code == _GET_LONG:
                push(memo[whole(window, at + 1)[0]])
                at += 5
            elif code == _SMALL:
                push(window[at + 1])
                at += 2
            elif code == _WHOLE:
                push(whole(window, at + 1)[0])
                at += 5
            elif code == _STOP:
                return stack.pop()
            else:
                self.at = at + 1
                STEPS.get(code, _refuse)(self)
                window, at, end = self.window, self.at, self.end

    def fill(self, need: int) -> None:
        """Have `need` bytes before `end`. Raises Torn where they are no more, BadInput where memory is."""
        if self.room < max(need, len(self.stack) * _VALUE):
            raise BadInput(
                f"takes more than {ROOM >> 20} MiB to read, from byte {self.place:,} on; "
                "record fewer entries, such as torch.cuda.memory._record_memory_history(max_entries=100000)"
            )
        parts = [self.window[self.at :]]
        self.before, self.at, have = self.before + self.at, 0, len(parts[0])
        while have < need + _AHEAD and (piece := next(self.pieces, None)) is not None:
            parts.append(piece)
            have += len(piece)
        if have < need + _AHEAD and not self.padded:  # an argument that is cut off is read, and then missed
            parts.append(bytes(_AHEAD))
            self.padded = True
        self.window = b"".join(parts)
        self.end = len(self.window) - _AHEAD
        if self.end < need:
            raise Torn(self.stack, self.before + self.end)

    def take(self, size: int) -> bytes:
        """The next bytes. Raises Torn."""
        if size > self.end - self.at:
            self.fill(size)
        self.at += size
        return self.window[self.at - size : self.at]

    def number(self, form: Struct) -> Any:
        (value,) = form.unpack_from(self.window, self.at)
        self.at += form.size
        return value

    def items(self) -> list[Any]:
        """What lies above the last mark."""
        height = self.marks.pop()
        found = self.stack[height:]
        del self.stack[height:]
        return found

    def remember(self, index: int) -> None:
        """Number what lies on top."""
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
            self.room -= 8
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise ValueError(f"it numbers {index:,} what is its {len(self.memo):,}th object")

    def fill_dict(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict on top."""
        target, keys = self.stack[-1], pairs[0::2]
        if type(target) is not dict or not {type(key) for key in keys} <= {str, int}:
            raise TypeError("keys of a dict are to be texts or whole numbers")
        target.update(zip(keys, pairs[1::2], strict=True))
        if self.made is not None and (kept := self.made(target)) is not target:
            self.stack[-1] = kept
            target.clear()
            self.room -= KEPT
        else:
            self.room -= (_PAIR + _VALUE) * len(keys)

    def extend(self, values: list[Any]) -> None:
        """Put values into the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError("items for what is no list")
        target.extend(values)
        self.room -= _VALUE * len(values)


def _refuse(reading: _Reading) -> None:
    code = reading.window[reading.at - 1]
    name = _NAMES.get(code)
    if name is None:
        raise ValueError(f"{code:#04x} is no instruction")
    what = ""
    if name in ("GLOBAL", "INST"):
        with suppress(Torn):
            reading.fill(200)
        what = ".".join(reading.window[reading.at :][:200].decode("utf-8", "replace").split("\n")[:2])
    elif name == "STACK_GLOBAL":
        what = ".".join(str(part) for part in reading.stack[-2:])
    asks = f"asks for {what[:100]!r}" if what else "asks for more than data"
    why = "refused, and nothing was run" if name in _CALLS else "only plain data in protocols 2 to 5 is read"
    raise BadInput(f"{asks} ({name} at byte {reading.place - 1:,}): {why}")


Step = Callable[[_Reading], Any]


def _atom(value: object) -> Step:
    return lambda reading: reading.stack.append(value)


def _fixed(form: Struct) -> Step:
    return lambda reading: reading.stack.append(reading.number(form))


def _wide(form: Struct) -> Step:
    """A whole number of as many bytes as is said before it."""

    def step(reading: _Reading) -> None:
        size = reading.number(form)
        if size > LONGEST_NUMBER:
            raise ValueError(f"a number of {size:,} bytes")
        reading.stack.append(int.from_bytes(reading.take(size), "little", signed=True))

    return step


def _bytes(form: Struct, text: bool) -> Step:
    def step(reading: _Reading) -> None:
        size = reading.number(form)
        found = reading.take(size)
        reading.room -= size + _TEXT
        reading.stack.append(found.decode("utf-8", "replace") if text else found)

    return step


def _empty(kind: type) -> Step:
    def step(reading: _Reading) -> None:
        reading.stack.append(kind())
        reading.room -= _CONTAINER

    return step


def _tuple(size: int | None) -> Step:
    """Of the last values, or of those above the mark."""

    def step(reading: _Reading) -> None:
        if size is None:
            found = reading.items()
        else:
            found = reading.stack[-size:]
            del reading.stack[-size:]
        if size is not None and len(found) < size:
            raise IndexError("a tuple of more than there is")
        reading.stack.append(tuple(found))
        reading.room -= _CONTAINER + _VALUE * len(found)

    return step


def _mark(reading: _Reading) -> None:
    reading.marks.append(len(reading.stack))
    reading.room -= 8


def _append(reading: _Reading) -> None:
    value = reading.stack.pop()
    reading.extend([value])


def _set_item(reading: _Reading) -> None:
    value, key = reading.stack.pop(), reading.stack.pop()
    reading.fill_dict([key, value])


def _marked(kind: type, fill: Callable[[_Reading, list[Any]], None]) -> Step:
    def step(reading: _Reading) -> None:
        found = reading.items()
        _empty(kind)(reading)
        fill(reading, found)

    return step


def _put(form: Struct) -> Step:
    return lambda reading: reading.remember(reading.number(form))


STEPS: dict[int, Step] = {
    ord("N"): _atom(None), 0x88: _atom(True), 0x89: _atom(False), ord("M"): _fixed(_SHORT), ord("G"): _fixed(_DOUBLE),
    0x8A: _wide(_BYTE), 0x8B: _wide(_UNSIGNED),
    ord("X"): _bytes(_UNSIGNED, True), 0x8C: _bytes(_BYTE, True), 0x8D: _bytes(_LONG, True),
    ord("U"): _bytes(_BYTE, True), ord("T"): _bytes(_UNSIGNED, True),
    ord("B"): _bytes(_UNSIGNED, False), ord("C"): _bytes(_BYTE, False), 0x8E: _bytes(_LONG, False),
    ord("}"): _empty(dict), ord("]"): _empty(list), ord(")"): _empty(tuple),
    ord("d"): _marked(dict, _Reading.fill_dict), ord("l"): _marked(list, _Reading.extend),
    ord("t"): _tuple(None), 0x85: _tuple(1), 0x86: _tuple(2), 0x87: _tuple(3),
    ord("("): _mark, ord("a"): _append, ord("s"): _set_item,
    ord("e"): lambda reading: reading.extend(reading.items()),
    ord("u"): lambda reading: reading.fill_dict(reading.items()),
    ord("0"): lambda reading: reading.stack.pop(), ord("1"): _Reading.items,
    ord("2"): lambda reading: reading.stack.append(reading.stack[-1]),
    ord("q"): _put(_BYTE), ord("r"): _put(_UNSIGNED), 0x94: lambda reading: reading.remember(len(reading.memo)),
    0x80: lambda reading: reading.number(_BYTE), 0x95: lambda reading: reading.number(_LONG),
}  # fmt: skip
