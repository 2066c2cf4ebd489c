"""What an exception from the user's own code says, as one short line. Its `str()` is the user's code too, and may fail."""

LONGEST = 300


def told(error: BaseException) -> str:
    """`ValueError: no good`: one line of text that any stream and any frame can carry."""
    try:
        said = str(error)
    except Exception as fault:  # noqa: BLE001  (a message may be computed, by code that raises anything)
        said = f"(its own message raised {type(fault).__name__})"
    line = " ".join(said.encode("utf-8", "replace").decode("utf-8").split())[:LONGEST]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
