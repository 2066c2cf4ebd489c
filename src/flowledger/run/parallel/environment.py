"""What torchrun tells a process through its environment: how many there are, which one this is, and where they meet."""

import os

from flowledger.flow.errors import BadInput

WORLD, RANK, ADDRESS, PORT = "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"
NEEDED = (RANK, ADDRESS, PORT)
LOCAL_RANK, LOCAL_WORLD = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
LOCAL = ((LOCAL_RANK, 0), (LOCAL_WORLD, 1))  # and the least that they may be
LAST_PORT = 65535


def is_rank() -> bool:
    """Whether torchrun has started this process among others, as far as all is there that it sets."""
    return os.environ.get(WORLD, "1") != "1" and all(os.environ.get(name) for name in NEEDED)


def started() -> int:
    """Processes that were started together; 1 where there is only this one.

    Raises BadInput for an environment that is no rank's, such as what was left behind by another launch.
    """
    processes = 1 if WORLD not in os.environ else _number(WORLD, 1, None)
    if processes == 1:
        return 1
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        unset = "both" if RANK in os.environ and missing != [RANK] else "it"
        is_there = (
            f"RANK = {os.environ[RANK]} and WORLD_SIZE = {processes} are"
            if unset == "both"
            else f"{WORLD} = {processes} is"
        )
        raise BadInput(f"{is_there} set but {missing[0]} is not: unset {unset}, or start with --nproc {processes}")
    _number(RANK, 0, processes - 1)
    _number(PORT, 0, LAST_PORT)
    for name, least in LOCAL:
        if name in os.environ:
            _number(name, least, processes - 1 + least)
    return processes


def first_here() -> bool:
    """Whether this is the first process of its machine."""
    return os.environ.get(LOCAL_RANK, os.environ.get(RANK, "0")) == "0"


def processes_here() -> int:
    """Processes that were started on this machine; 1 where none were."""
    return int(os.environ.get(LOCAL_WORLD, "1"))


def local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get(LOCAL_RANK, "0"))


def _number(name: str, least: int, most: int | None) -> int:
    text = os.environ[name]
    if text.strip().isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    to = "" if most is None else f" to {most}"
    raise BadInput(
        f"{name} = {text!r} in the environment is no whole number from {least}{to}, as torchrun sets it for each of its "
        f"processes; unset {WORLD} and {RANK}, or start with --nproc"
    )
