"""Whether a framework is of a version that its table of probes was made for."""

import re
from itertools import zip_longest

_SIGNS = {"<": lambda order: order < 0, ">=": lambda order: order >= 0, "==": lambda order: order == 0}


def covers(wanted: str, version: str) -> bool:
    """Whether a version such as `1.16.2` lies in a range such as `>=1.16,<1.17`; what follows the numbers does not count."""
    return all(_SIGNS[sign](_order(version, limit)) for sign, limit in re.findall(r"(<|>=|==)\s*([\d.]+)", wanted))


def _order(version: str, limit: str) -> int:
    """Below 0, 0 or above, as a version comes before a limit, is it, or comes after."""
    numbers = [[int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])] for text in (version, limit)]
    for one, other in zip_longest(*numbers, fillvalue=0):
        if one != other:
            return one - other
    return 0
