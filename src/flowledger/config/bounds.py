"""What a single value may be: names, paths, and how large a number."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # goes into file names, metrics and pages
LONGEST_NAME = 100
LONGEST_PART = 255

# Upper bounds keep a slip of the finger from reaching an allocator: far above what is used, far below what overflows.
TOKENS = 2**24  # tokens of one sequence
SIZE = 2**16  # a dimension of a model
COUNT = 2**31
WEIGHT = 1e6  # a factor of a loss or a reward
SECONDS = 10**6
BYTES = 2**60
STEP_SAMPLES = 2**24  # samples of one step
STEP_TOKENS = 2**34  # response tokens of one step
TINY_PARAMETERS = 2**31


def _a_possible_file(text: str) -> str:
    """Refuse what no file system can be asked about, so that who opens it meets only files that are there or not."""
    if not text.isprintable():
        raise ValueError("a path holds no control characters")
    if any(len(part.encode()) > LONGEST_PART for part in text.split("/")):
        raise ValueError(f"a path has no part of more than {LONGEST_PART} bytes")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError("no user of that name has a home directory") from None
    return text


File = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_a_possible_file)]
Beta = Annotated[float, Field(ge=0, lt=1)]
