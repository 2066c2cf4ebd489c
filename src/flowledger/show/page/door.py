"""Who may come in to the live page.

It is for the one who started it. On an address that only this machine reaches it answers to names of that address alone: a page
elsewhere whose own name is made to point here (DNS rebinding) asks by that name and is turned away. On any other address whoever
comes must know the token that is printed with the URL; the browser then keeps it in a cookie that no script can read.
"""

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, replace
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = "token"
METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Door:
    """Which names it answers to, and the token that it asks for; none on an address that only this machine reaches."""

    host: str
    port: int
    token: str | None
    names: frozenset[str] = frozenset()  # of this machine

    @classmethod
    def of(cls, listening: socket.socket) -> "Door":
        """The rules for a socket that listens."""
        host, port = listening.getsockname()[:2]
        if ipaddress.ip_address(host).is_loopback:
            return cls(host, port, None)
        name = socket.gethostname().lower()
        return cls(host, port, secrets.token_urlsafe(32), frozenset({name, f"{name}.local", socket.getfqdn().lower()}))

    @property
    def url(self) -> str:
        """What to open, also on other machines where those may; with the token, where there is one."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The same by each of its names: on all addresses at once the one that others reach, then this machine's name."""
        hosts = [self.host]
        if ipaddress.ip_address(self.host).is_unspecified:
            hosts = [*filter(None, [reached(self.host)]), socket.gethostname()]
        asked = f"?{TOKEN}={self.token}" if self.token else ""
        return tuple(f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{asked}" for host in hosts)

    def answers_to(self, host: str) -> bool:
        """Whether a Host header names this server: here by its own names; elsewhere by a number or this machine's name."""
        name, port = _split(host)
        if port != self.port:
            return False
        if name in ("localhost", "127.0.0.1", "[::1]", f"[{self.host}]" if ":" in self.host else self.host):
            return True
        return self.token is not None and (_is_number(name) or name in self.names)

    def lets_in(self, scope: Scope, headers: Headers) -> bool:
        """Whether who asks knows the token, by the URL or by the cookie that the first request left."""
        return self.token is None or self.named_in_url(scope) or self._same(_cookie(headers, self.cookie))

    def named_in_url(self, scope: Scope) -> bool:
        """Whether the URL has the token."""
        return self._same(next(iter(parse_qs(scope["query_string"].decode("latin-1")).get(TOKEN, [])), ""))

    @property
    def cookie(self) -> str:
        """Its name: cookies are one and the same for all ports of a host."""
        return f"flowledger-{self.port}"

    def _same(self, told: str) -> bool:
        return self.token is not None and hmac.compare_digest(told.encode(), self.token.encode())


class Guarded:
    """An application behind a door: who may not come in is told why, and every answer has the headers."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refused = self._refusal(scope, headers)
        app: ASGIApp = self._app if refused is None else refused

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    told.setdefault(name, value)
                if refused is None and self._door.named_in_url(scope):
                    told["Set-Cookie"] = f"{self._door.cookie}={self._door.token}; Path=/; HttpOnly; SameSite=Strict"
            await send(message)

        await app(scope, receive, dressed)

    def _refusal(self, scope: Scope, headers: Headers) -> PlainTextResponse | None:
        door = self._door
        if scope["method"] not in METHODS:
            return PlainTextResponse("A run is only looked at here.\n", 405, {"Allow": ", ".join(METHODS)})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not door.answers_to(hosts[0]):
            return PlainTextResponse(f"Open this page by its own name: {replace(door, token=None).url}\n", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Another page may not ask.\n", 403)
        if not door.lets_in(scope, headers):
            return PlainTextResponse("Open the whole URL that flowledger printed, with its token.\n", 403)
        return None


def reached(host: str) -> str | None:
    """The address of this machine that others reach, of the same family; None without a network. Nothing is sent."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect((elsewhere, 9))  # of a datagram socket: the route is looked up, no more
            found: str = one.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(found).is_loopback else found


def _split(host: str) -> tuple[str, int | None]:
    """A Host header's name, and its port; 80 where it has none."""
    name, _, port = host.lower().rpartition(":") if not host.endswith("]") and ":" in host else (host.lower(), "", "80")
    return name, int(port) if port.isdecimal() and port.isascii() else None


def _is_number(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
