"""A small job of coroutines and timers, as a framework's driver and agent loops are written."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


def _timer(name: str, spent: dict[str, float]) -> Iterator[None]:
    yield
    spent[name] = 1.0


@contextmanager
def timer(name: str, spent: dict[str, float]) -> Iterator[None]:
    yield from _timer(name, spent)


async def answer(sample: int) -> int:
    await asyncio.sleep(0.001 * (3 - sample))  # the last to begin is the first to end
    return await inner(sample)


async def inner(sample: int) -> int:
    await asyncio.sleep(0)
    if sample < 0:
        raise ValueError("no such sample")
    return sample * sample


async def answers() -> list[int]:
    return await asyncio.gather(*(answer(sample) for sample in range(3)))


def old_log_prob() -> None: ...
def ref_log_prob() -> None: ...
def update_actor() -> None: ...
def update_weights(global_steps: int) -> None: ...


def stream() -> Iterator[int]:
    yield 0


def scores() -> Iterator[int]:
    yield 1


def note(value: object = None) -> object:
    return value


async def notes() -> None:
    note()
    await asyncio.sleep(0.01)
    note()


class Holder:
    @property
    def value(self) -> int:
        return 7
