"""The live page: the same page as the file, which hears what is new in its run.

Three addresses: the page, a part of a view, and the stream of what is new (server-sent events). A browser says which part it looks
at, and gets that part when the run has grown; whatever else it holds it asks for again when it is looked at. So what a step
costs does not depend on how much a page could show.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowledger.flow.errors import BadInput
from flowledger.show.page import html, vega
from flowledger.show.page.choice import Choice, choice_of, number
from flowledger.show.page.growing import Growing
from flowledger.show.page.script import inline, script, source
from flowledger.show.page.views import BY_NAME
from flowledger.show.plain import clean

EVERY_S = 0.5  # between two looks at the run
HEARTBEAT_S = 5.0  # so that a browser that has gone is noticed, and one that is there knows that we are
FIRST_S = 1.0  # a page waits so long for the first look; what takes longer comes into it by itself
MOST_STREAMS = 256
REST = 3.0  # a view that takes long to make is made less often


class Live:
    """One run, and all who look at it."""

    def __init__(self, run: Growing, lang: str, every: float = EVERY_S) -> None:
        self.run, self.lang, self.every = run, lang, every
        self.streams = 0
        self.closing = False
        self.looked = asyncio.Event()  # for the first time
        self._news = asyncio.Condition()
        self._failed = ""

    async def follow(self) -> None:
        """Read what is new again and again, and tell everyone at once how far the run has come."""
        loop = asyncio.get_running_loop()
        self.run.heard = lambda: asyncio.run_coroutine_threadsafe(self.tell(), loop)
        while not self.closing:
            if await self._tried(self.run.read):
                await self.tell()
            await asyncio.sleep(0 if self.run.is_behind else self.every)

    async def turn(self) -> None:
        """Beside it, show what there is: that may take longer."""
        while not self.closing:
            turned = await self._tried(self.run.turn)
            self.looked.set()
            await (self.tell() if turned else self.wait(self.every))

    async def _tried(self, look: Callable[[], bool]) -> bool:
        """What came of a look; one that fails is told, once, and the page stays as it was."""
        try:
            return await asyncio.to_thread(look)
        except Exception as error:  # noqa: BLE001 whatever it was, the next look may succeed
            if (told := repr(error)) != self._failed:
                self._failed = told
                print(f"flowledger: the page could not be brought up to date: {told}", file=sys.stderr, flush=True)
            await asyncio.sleep(self.every)
            return False

    async def tell(self) -> None:
        """Wake all who wait for news."""
        async with self._news:
            self._news.notify_all()

    async def wait(self, timeout: float) -> None:
        """Until there is news, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait()

    # ------------------------------------------------------------------------------------------------- the addresses

    async def page(self, request: Request) -> Response:
        """The page, with what it shows first in it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self.looked.wait()
        made = await asyncio.to_thread(lambda: html.page(self.run.document(self.lang)))
        return HTMLResponse(made, headers={"Content-Security-Policy": policy()})

    async def view(self, request: Request) -> Response:
        """One part of a view."""
        name = request.path_params["name"]
        if name not in BY_NAME:
            return JSONResponse({"error": f"there is no view {name!r}"}, 404)
        try:
            at = choice_of(dict(request.query_params))
        except BadInput as error:
            return JSONResponse({"error": str(error)}, 400)
        key, data = await asyncio.to_thread(self.run.part, name, at)
        return Response(as_json({key: data}), media_type="application/json")

    async def events(self, request: Request) -> Response:
        """What is new, as long as the browser listens."""
        try:
            asked = Asked(dict(request.query_params), request.headers.get("last-event-id"))
        except BadInput as error:
            return JSONResponse({"error": str(error)}, 400)
        if self.streams >= MOST_STREAMS:
            return JSONResponse({"error": "too many pages listen"}, 503)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._stream(asked, request.is_disconnected), media_type="text/event-stream")

    async def _stream(self, asked: "Asked", is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
        self.streams += 1
        heard, beat, rests_until = asked.version, 0, 0.0
        try:
            yield "retry: 1000\n\n"
            while not (self.closing or await is_gone()):
                if self.run.identity != asked.run:
                    yield event("begun", {"run": self.run.identity})
                    return
                if self.run.beat != beat:
                    beat = self.run.beat
                    yield event("pulse", self.run.pulse)
                if self.run.version != heard and time.monotonic() >= rests_until:
                    began, heard = time.monotonic(), self.run.version
                    yield event("about", await asyncio.to_thread(self.run.about))
                    yield event("views", await asyncio.to_thread(self._parts, asked), heard)
                    rests_until = time.monotonic() + REST * (time.monotonic() - began)
                    continue
                rest = max(0.0, rests_until - time.monotonic()) if self.run.version != heard else HEARTBEAT_S
                await self.wait(rest)
                if self.run.version == heard and self.run.beat == beat:
                    yield ": still here\n\n"
        finally:
            self.streams -= 1

    def _parts(self, asked: "Asked") -> dict[str, Any]:
        key, data = self.run.part(asked.view, asked.at)
        return {asked.view: {"choices": self.run.choices(asked.view), "at": {key: data}}}


class Asked:
    """What a browser listens for: which run it shows, the part it looks at, and the version that it has."""

    def __init__(self, query: Mapping[str, str], last: str | None) -> None:
        view = query.get("view", "")
        self.run = query.get("run", "")
        self.view = view if view in BY_NAME else "overview"
        self.at: Choice = choice_of(dict(query))
        told = last or query.get("version", "0")
        self.version = number("version", told) if told.isdecimal() else 0


def event(name: str, data: Any, number: int | None = None) -> str:
    """One server-sent event. JSON without a line's end in it, so that no string of a run can end the event."""
    numbered = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{numbered}data: {as_json(data)}\n\n"


def as_json(data: Any) -> str:
    """JSON in one line."""
    return json.dumps(clean(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def policy() -> str:
    """The page's own policy as a header, which can also say that nobody may frame it."""
    made = html.policy(source("page.css"), (inline(vega.bundle()), script()), live=True)
    return f"{made}; frame-ancestors 'none'"


def app(live: Live) -> Starlette:
    """The application; it follows the run as long as it is up."""

    @asynccontextmanager
    async def up(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(live.follow()), asyncio.create_task(live.turn())]
        try:
            yield
        finally:
            live.closing = True
            await live.tell()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            live.run.close()

    routes = [
        Route("/", live.page),
        Route("/view/{name}", live.view),
        Route("/events", live.events),
    ]
    return Starlette(routes=routes, lifespan=up)
