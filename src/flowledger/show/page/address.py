"""Where the live page listens: on this machine alone, unless it is told otherwise."""

import errno
import re
import socket
from dataclasses import dataclass

from flowledger.flow.errors import BadInput

HOST = "127.0.0.1"
ADDRESS = re.compile(r"(?:(?P<host>\[[^\[\]\s]+\]|[^\[\]:/\s]+):)?(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0: any free one."""

    host: str = HOST
    port: int = 0


def is_address(word: str) -> bool:
    """Whether a word has the form of PORT or HOST:PORT."""
    return ADDRESS.fullmatch(word) is not None


def address_of(word: str) -> Address:
    """`8765`, `0.0.0.0:8765`, `[::1]:8765`; nothing is any free port here. Raises BadInput for anything else."""
    found = ADDRESS.fullmatch(word or "0")
    if found is None:
        raise BadInput(f"--serve {word!r}: give a PORT, or HOST:PORT such as {HOST}:8765; nothing for any free port")
    port = int(found["port"])
    if port > 65535:
        raise BadInput(f"--serve {word!r}: a port is at most 65535")
    return Address((found["host"] or HOST).strip("[]"), port)


def bind(address: Address) -> socket.socket:
    """A socket that listens there. Raises BadInput where it cannot, with what can."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        return _bound(family, where)
    except socket.gaierror:
        raise BadInput(
            f"--serve: this machine knows no {address.host!r}; use {HOST}, or 0.0.0.0 for all its addresses"
        ) from None
    except OSError as error:
        raise BadInput(_why(address, error)) from None


def _bound(family: int, where: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def _why(address: Address, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--serve: this machine has no address {address.host}; use {HOST}, or 0.0.0.0 for all that it has"
    told = {errno.EADDRINUSE: "is in use", errno.EACCES: "may not be taken by this user"}.get(
        error.errno or 0, error.strerror
    )
    free = _nearest_free(address)
    way_out = f"; the nearest free port is {free}: --serve {_named(address.host, free)}" if free else ""
    return f"--serve: port {address.port} of {address.host} {told}{way_out}"


def _nearest_free(address: Address) -> int | None:
    for far in range(1, 2000):
        for port in (address.port + far, address.port - far):
            if 1024 <= port <= 65535:
                try:
                    family, _, _, _, where = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)[0]
                    _bound(family, where).close()
                except OSError:
                    continue
                return port
    return None


def _named(host: str, port: int) -> str:
    return str(port) if host == HOST else f"{f'[{host}]' if ':' in host else host}:{port}"
