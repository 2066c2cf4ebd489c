"""Whether an exception means that another rank is gone: it then says what happened to its rank, and not what went wrong."""

import re

BACKENDS = ("gloo", "NCCL", "TCPStore")  # whose errors are RuntimeErrors that name them
CHAINED = 20  # exceptions that are looked through, each raised from the next; such chains may be rings


def lost(error: BaseException | None) -> str | None:
    """What a broken connection to other ranks says, in a sentence, where an exception is one or comes from one."""
    for _ in range(CHAINED):
        if error is None:
            return None
        names = {kind.__name__ for kind in type(error).__mro__}
        if "DistError" in names or ("RuntimeError" in names and any(word in str(error) for word in BACKENDS)):
            return _sentence(str(error)) or type(error).__name__
        error = error.__cause__ or error.__context__
    return None


def _sentence(text: str) -> str:
    """`Connection closed by peer [10.0.0.1]:5518`: the first sentence, without the line of C++ that it came from."""
    first = next(iter(text.splitlines()), "")
    return re.sub(r"^\[[^]]*\]\s*", "", first).partition(". ")[0][:120]
