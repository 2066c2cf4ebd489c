"""Problems from JSONL and Parquet files; every complaint names the file and the line or row."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from flowledger.config.schema import Data
from flowledger.flow.errors import BadInput, nearest
from flowledger.run.problems import Problem

Record = dict[str, Any]
LOWEST, HIGHEST = -(2**63), 2**64 - 1  # the integers that the reward process can be sent


def read(settings: Data) -> tuple[Problem, ...]:
    """Every problem of `data.path`. Raises BadInput for a file that is missing, empty or malformed."""
    path = Path(settings.path or "").expanduser()
    if path.is_dir():
        raise BadInput(f"data.path = {settings.path!r} is a directory; give a .jsonl or .parquet file in it")
    if not path.is_file():
        raise BadInput(f"data.path = {settings.path!r}: there is no such file (seen from {Path.cwd()})")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise BadInput(f"data.path = {settings.path!r} ends in {path.suffix!r}; it must be .jsonl or .parquet")
    records = readers[path.suffix](path)
    problems = tuple(_problem(record, where, index, settings) for index, (where, record) in enumerate(records))
    if not problems:
        raise BadInput(f"data.path = {settings.path!r} holds no prompts; it must have at least one")
    return problems


def _jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start}; write the file as UTF-8") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _record(line, f"{path}:{number}")
        if not isinstance(record, dict):
            raise BadInput(f'{path}:{number}: a {type(record).__name__}, must be an object such as {{"prompt": "…"}}')
        yield f"{path}:{number}", record


def _record(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON at column {error.colno} ({error.msg}); one object a line") from None
    except RecursionError:
        raise BadInput(f"{where}: nested too deeply; a prompt needs an object of a few levels") from None
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None


def _whole(digits: str) -> int:
    if len(digits) > 20 or not LOWEST <= int(digits) <= HIGHEST:
        shown = digits if len(digits) <= 40 else f"{digits[:20]}… ({len(digits)} digits)"
        raise ValueError(f"the integer {shown} has more than 64 bits; write it as a text, in quotes")
    return int(digits)


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    with duckdb.connect() as connection:
        try:
            found = connection.execute("select * from read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description or ()]
            rows = found.fetchall()
        except duckdb.Error as error:
            raise BadInput(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}:row {number}", dict(zip(names, row, strict=True))


def _problem(record: Record, where: str, index: int, settings: Data) -> Problem:
    _refuse_unsendable(record, where)
    prompt = _lookup(record, settings.prompt_key)
    if prompt is None:
        near = nearest(settings.prompt_key, record)
        raise BadInput(f"{where}: no key {settings.prompt_key!r} (data.prompt_key); it has {', '.join(record)}{near}")
    messages = _messages(prompt, where) if isinstance(prompt, list) else None
    if messages is None and not isinstance(prompt, str):
        raise BadInput(f"{where}: the prompt is a {type(prompt).__name__}; it must be a text or a list of messages")
    text = "\n\n".join(message["content"] for message in messages) if messages else prompt
    if not text.strip():
        raise BadInput(f"{where}: the prompt is empty; remove the line or give it a text")
    answer = _lookup(record, settings.answer_key)
    if answer is None and settings.answer_key != Data.model_fields["answer_key"].default:
        near = nearest(settings.answer_key, record)
        raise BadInput(f"{where}: no key {settings.answer_key!r} (data.answer_key); it has {', '.join(record)}{near}")
    extra = {key: value for key, value in record.items() if key not in (settings.prompt_key, settings.answer_key)}
    return Problem(text=text, answer=answer, index=index, extra=extra, messages=messages, where=where)


def _refuse_unsendable(value: Any, where: str, key: str = "") -> None:
    """What no tokenizer and no other process can be given. Raises BadInput with the dotted key."""
    match value:
        case dict():
            for name, inner in value.items():
                _refuse_unsendable(name, where, key)
                _refuse_unsendable(inner, where, f"{key}.{name}".lstrip("."))
        case list():
            for inner in value:
                _refuse_unsendable(inner, where, key)
        case str():
            half = (
                next((letter for letter in value if "\ud800" <= letter <= "\udfff"), None)
                if not value.isascii()
                else None
            )
            if half:
                raise BadInput(
                    f"{where}: {key or 'a key'} holds half a surrogate pair (\\u{ord(half):04x}); write the whole character"
                )
        case int():
            if not LOWEST <= value <= HIGHEST:
                raise BadInput(f"{where}: {key} holds an integer of more than 64 bits; write it as a text")


def _messages(prompt: list[Any], where: str) -> tuple[dict[str, str], ...]:
    if not prompt:
        raise BadInput(f'{where}: the prompt is an empty list; write [{{"role": "user", "content": "…"}}]')
    for message in prompt:
        fine = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
        if not fine:
            raise BadInput(f'{where}: {str(message)[:80]!r} is no message; write {{"role": "user", "content": "…"}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _lookup(record: Record, key: str) -> Any:
    """The value of a key; `reward_model.ground_truth` goes one level down where no key is spelled so."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    return _lookup(record[outer], inner) if dot and isinstance(record.get(outer), dict) else None
