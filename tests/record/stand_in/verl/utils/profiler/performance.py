import time
from contextlib import contextmanager


def _timer(name, timing_raw):
    began = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0) + time.perf_counter() - began


@contextmanager
def marked_timer(name, timing_raw, color=None):
    yield from _timer(name, timing_raw)
