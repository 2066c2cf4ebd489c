"""The rank that is sick where only one is: the last of several."""

import os

from flowledger.run.parallel import environment


def is_last_rank() -> bool:
    """Whether this process is the last of several ranks."""
    return environment.started() > 1 and int(os.environ[environment.RANK]) == environment.started() - 1
