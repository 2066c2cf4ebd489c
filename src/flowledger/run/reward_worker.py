"""The process in which rule rewards run: `python -m flowledger.run.reward_worker`, spoken to by `reward_process`.

Frames go over stdin and stdout: four bytes of length, then msgpack. The first frame says which components there are and
is answered by {} or {"error": text}; each further frame is a list of jobs, answered job by job, in order. Whatever a
reward prints goes to stderr. It runs in the main thread (math-verify sets signal handlers) and imports no torch.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any

import msgspec

from flowledger.flow.errors import BadInput
from flowledger.run.exceptions import told
from flowledger.run.gym import Gym
from flowledger.run.imports import load_function
from flowledger.run.keywords import accepted

# A reward function is called with those of these that its signature accepts; the second row are verl's names.
KEYWORDS = ("prompt", "response", "answer", "response_ids", "response_mask", "sample_id", "extra")
VERL_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")

# Beyond this, the squares and sums that an advantage is made of leave float32.
LARGEST = 1e15

Job = Mapping[str, Any]
Rule = Callable[[Job], Any]


class Unsendable(Exception):  # noqa: N818  (it names what was to be sent)
    """Something that no frame can carry."""


def main() -> None:
    """Answer frames until the other side closes."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a print must not end up between frames
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    setup = read_frame(incoming)
    if setup is None:
        return
    try:
        rules = build(setup)
    except BadInput as error:
        write_frame(outgoing, {"error": str(error)})
        return
    write_frame(outgoing, {})
    while (jobs := read_frame(incoming)) is not None:
        for job in jobs:
            write_frame(outgoing, answer(rules[job["component"]], job))


def build(setup: Mapping[str, Any]) -> dict[str, Rule]:
    """Component name -> its rule. Raises BadInput for an import that fails or an unknown task."""
    return {component["name"]: _rule(component, setup) for component in setup["components"]}


def answer(rule: Rule, job: Job) -> dict[str, Any]:
    """{"value": number or list of numbers}, or {"error": text} when the rule raised or gave something else."""
    try:
        return {"value": _number(rule(job), len(job["response_ids"]))}
    except Exception as error:  # noqa: BLE001  (whatever a reward raises marks its sample and nothing more)
        return {"error": told(error)}


def read_frame(stream: IO[bytes]) -> Any:
    """The next frame's content, or None when the other side has closed, even in the middle of a frame."""
    head = _exactly(stream, 4)
    body = _exactly(stream, int.from_bytes(head, "big")) if head else None
    return msgspec.msgpack.decode(body) if body is not None else None


def encode(content: Any) -> bytes:
    """A frame's body. Raises Unsendable for what msgpack has no form for: half a surrogate pair, an endless nesting."""
    try:
        return msgspec.msgpack.encode(content, enc_hook=str)
    except Exception as error:  # noqa: BLE001  (`str` of what the user's data holds may raise anything)
        raise Unsendable(told(error)) from None


def write_frame(stream: IO[bytes], content: Any) -> None:
    """Send one frame. What msgpack does not know is sent as its text."""
    body = encode(content)
    left = memoryview(len(body).to_bytes(4, "big") + body)
    while left:  # an unbuffered pipe may take a part only
        left = left[stream.write(left) :]
    stream.flush()


def _exactly(stream: IO[bytes], count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = stream.read(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _rule(component: Mapping[str, str], setup: Mapping[str, Any]) -> Rule:
    match component["kind"]:
        case "task":
            gym = Gym(setup["task"], setup["task_options"], setup["seed"])
            return lambda job: gym.score(job["response"], job["index"])
        case "math_verify":
            return _math_verify()
        case "function":
            key = f"reward component {component['name']!r}: path"
            return _called_with_what_it_takes(
                load_function(component["path"], key=key), f"{key} = {component['path']!r}"
            )
    raise AssertionError(component["kind"])


def _math_verify() -> Rule:
    from math_verify import parse, verify  # noqa: PLC0415  (it loads sympy; only where asked for)

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse, verify = (
        partial(parse, parsing_timeout=None),
        partial(verify, timeout_seconds=None),
    )  # the process has a limit

    def rule(job: Job) -> float:
        if job["answer"] is None:
            raise ValueError("the problem has no answer to verify against (data.answer_key)")
        text = str(job["answer"])
        gold = parse(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}")
        return float(verify(gold, parse(job["response"])))

    return rule


def _called_with_what_it_takes(function: Callable[..., Any], key: str) -> Rule:
    words = accepted(function, (*KEYWORDS, *VERL_KEYWORDS), key=key)

    def rule(job: Job) -> Any:
        extra = job["extra"]
        known = {
            **job,
            "data_source": extra.get("data_source", ""),
            "solution_str": job["response"],
            "ground_truth": job["answer"],
            "extra_info": extra.get("extra_info", extra),
        }
        return function(**{word: known[word] for word in words})

    return rule


def _number(value: Any, tokens: int) -> float | list[float]:
    if isinstance(value, Mapping) and "score" in value:  # verl's functions may return more beside the score
        value = value["score"]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != tokens:
            raise ValueError(f"it returned {len(value)} rewards for {tokens} response tokens")
        return [_bounded(part) for part in value]
    return _bounded(value)


def _bounded(value: Any) -> float:
    if getattr(value, "shape", None) == ():  # a number of NumPy or torch
        value = value.item()
    if not isinstance(value, int | float):
        shown = repr(value)
        raise TypeError(f"it returned {shown[:80]}, must be a number or one number per response token")
    if math.isfinite(value) and abs(value) > LARGEST:
        raise ValueError(f"it returned {value!r}; a reward must lie within ±{LARGEST:g}")
    return float(value)


def _follow(parent: int) -> None:
    """End this process when its parent has gone, even in the midst of a reward that never returns."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
