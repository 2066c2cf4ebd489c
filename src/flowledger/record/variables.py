"""The environment variables by which a job is recorded. Read at the start of an interpreter: nothing else is imported here."""

import os
from collections.abc import MutableMapping

RUN, JOB = "FLOWLEDGER_RUN", "FLOWLEDGER_JOB"
FIRST = "FLOWLEDGER_FIRST"  # handed down by the first process of a job that nobody has named
LEVEL, OPS_EVERY, GROUPS = "FLOWLEDGER_LEVEL", "FLOWLEDGER_OPS_EVERY", "FLOWLEDGER_GROUPS"
MEMORY_HISTORY = "FLOWLEDGER_MEMORY_HISTORY"  # entries that a GPU's allocator is to remember
USUAL_LEVEL = "tensors"


def first(environ: MutableMapping[str, str]) -> str:
    """The name of a job that nobody has named, the same in all that its first process starts."""
    return environ.setdefault(FIRST, new_job())


def new_job() -> str:
    """A name that no other job has."""
    return os.urandom(8).hex()
