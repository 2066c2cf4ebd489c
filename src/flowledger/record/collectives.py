"""Every collective of a process as a span: its type, bytes, group and peers, where in the step, and how long it took.

`latency_ms` is the time from the call until the work is done, and what that means is the backend's. With gloo a call that
blocks ends when it returns, and an asynchronous one when its work is done, however late its caller asks. Sends, receives
and functional collectives tell nobody when they are done: they end when the wait for them returns, later than the work
where the caller came late. With NCCL the host goes on once the work stands in a stream: the time is the host's, and that
of the device belongs to a profiler. An asynchronous call leaves a second span of kind `wait`: how long its caller stood
still for it.

What C++ starts by itself, as the reducer of DistributedDataParallel does, passes by unseen.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flowledger.flow.comm import comm_type
from flowledger.flow.seams import Function, Probe
from flowledger.ledger.rows import Row, SpanRow
from flowledger.record.buffers import leaves, size_of
from flowledger.record.observe import is_tensor
from flowledger.record.position import Frame, inner
from flowledger.record.process_groups import ProcessGroups
from flowledger.record.waiting import Alarm, Waiting
from flowledger.record.watch import split

Args = tuple[Any, ...]
clock = time.monotonic_ns


class Host(Protocol):
    """What this needs of a recorder."""

    buffer: Callable[[Any, object, Frame, int], None]
    latest: Frame

    def put(self, row: Row, frame: Frame, now: int, write: bool = True) -> None: ...
    def here(self) -> Frame: ...
    def new_span(self) -> int: ...
    def guard(self, work: Callable[..., Any], *args: Any) -> Any: ...
    def guard_hook(self, work: Callable[..., Any], *args: Any) -> Any: ...
    def inside_collective(self, change: int) -> None: ...


class Call:
    """One watched function: at which of its arguments the group, the sizes and the buffers stand."""

    def __init__(self, probe: Probe) -> None:
        self.name = probe.target.rpartition(":")[2].rpartition(".")[2]
        self._places = {fact: int(path[0]) for path, fact in split(probe.args)[1]}
        self._made = [int(path[1]) if path else None for path, _ in split(probe.results)[0]]  # None: its result
        self.nests = not self._places  # it is made of other collectives
        self.waits, self.plans = "wait" in self._places, "micro_batch" in self._places
        self.phase = probe.phase
        self.comm_type = "" if self.waits or self.plans else comm_type(self.name).name
        self.by_wait = self.comm_type in ("send", "recv")  # gloo's tell nobody but who waits for them

    def find(self, fact: str, args: Args) -> Any:
        """The argument that is this fact, None where there is none."""
        place = self._places.get(fact)
        return args[place] if place is not None and place < len(args) else None

    def filled(self, args: Args, result: Any) -> list[Any]:
        """What it fills, among its arguments or in its result."""
        found = [result if place is None else args[place] for place in self._made if place is None or place < len(args)]
        if self.comm_type == "reduce_scatter" and None not in self._made:
            found.append(self.find("size", args))  # its input too is laid out for it alone
        return found


class Open:
    """A collective that has not ended: its span, the call, and whether its caller goes on meanwhile."""

    ref: object = None  # to what is waited for

    def __init__(self, call: Call, row: SpanRow, frame: Frame, asynchronous: bool) -> None:
        self.call, self.row, self.frame, self.asynchronous = call, row, frame, asynchronous


class _Within(threading.local):
    outer: Open | None = None  # a function on objects that is open in this thread


class Collectives:
    """The collectives of one recorder. What is open may be changed and read from any thread."""

    def __init__(self, host: Host, axes: Mapping[tuple[int, ...], str], alarm: Alarm | None = None) -> None:
        self._host, self._groups, self._within = host, ProcessGroups(axes), _Within()
        self._open: dict[int, Open] = {}  # by span
        self._awaited: dict[int, Open] = {}  # by the address of what is waited for: a work or a storage
        self._planned: dict[int, tuple[str | None, int]] = {}  # phase and micro-batch, by the tensor that is to travel
        self._waiting = Waiting(host, self._open, alarm)

    def wrapped(self, probe: Probe, original: Function) -> Function:
        """A function of the table, with a span around each call."""
        call, own = Call(probe), self._host.guard_hook
        begin, end = (
            (self._wait, self._waited) if call.waits
            else (_itself, self._plan) if call.plans
            else (self._begin, self._issued)
        )  # fmt: skip
        getattr(original, "default", None)  # an operator keeps an overload that was asked for, and `wraps` copies it

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            opened = own(begin, call, args, kwargs)
            if opened is None:
                return original(*args, **kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                own(end, opened, args, result)
            return result

        return wrapper

    def open_spans(self) -> list[SpanRow]:
        """The begin of every collective that is open now, the oldest first."""
        return self._waiting.begins()

    def close(self) -> None:
        """Stop. What is open now stays without an end."""
        self._waiting.close()
        for opened in [*self._open.values(), *self._awaited.values()]:
            opened.ref = None
        for kept in (self._open, self._awaited, self._planned):
            kept.clear()

    # ---------------------------------------------------------------- collectives

    def _begin(self, call: Call, args: Args, kwargs: Mapping[str, Any]) -> Open | None:
        group, peer, outer = call.find("group", args), call.find("peer", args), self._within.outer
        name, ranks = self._groups.of(group) if group is not None else (None, None)
        size = size_of(call.find("size", args)) + size_of(call.find("share", args)) * len(ranks or ())
        if outer is not None:  # this is a part of it
            outer.row.group, outer.row.peer_ranks, outer.row.bytes = name, ranks, (outer.row.bytes or 0) + size
            return None
        frame = self._frame(call, args)
        row = SpanRow(
            id=self._host.new_span(), parent=frame.id or None, event="whole", name=call.name, span_kind="comm",
            start_ns=clock(), comm_type=call.comm_type, group=name, bytes=size,
            peer_ranks=[ranks[peer]] if ranks is not None and peer is not None else ranks,
        )  # fmt: skip
        options = kwargs.get("opts") or (args[-1] if args else None)
        opened = Open(call, row, frame, asynchronous=getattr(options, "asyncOp", False))
        self._waiting.start()
        self._open[row.id] = opened
        if call.nests:
            self._within.outer = opened
        self._host.inside_collective(1)
        return opened

    def _issued(self, opened: Open, args: Args, result: Any) -> None:
        """The call has returned. Where it left a work or tensors to wait for, it goes on until they were."""
        now, call = clock(), opened.call
        self._host.inside_collective(-1)
        if call.nests:
            self._within.outer = None
        for value in call.filled(args, result):
            self._host.buffer(value, call, opened.frame, now)
        if hasattr(result, "get_future"):
            self._await(opened, result, id(result))
            if opened.asynchronous:
                result.get_future().add_done_callback(lambda _: self._host.guard(self._end, opened))
            opened.asynchronous |= call.by_wait
            return
        tensors = list(leaves(result))
        if tensors:
            opened.asynchronous = True
            storage = tensors[-1].untyped_storage()
            self._await(opened, storage, storage._cdata)
        else:
            self._end(opened, now)

    def _end(self, opened: Open, now: int | None = None) -> None:
        if self._open.pop(opened.row.id, None) is not None:
            row, now = opened.row, now or clock()
            row.end_ns, row.latency_ms = now, (now - row.start_ns) / 1e6
            self._host.put(row, opened.frame, now)

    # ---------------------------------------------------------------- pipelines

    def _plan(self, call: Call, args: Args, operations: Any) -> None:
        """A pipeline has made sends and receives, which it starts later, from outside of their micro-batch."""
        for operation in operations or ():
            self._planned[id(operation.tensor)] = call.phase, int(call.find("micro_batch", args))

    def _frame(self, call: Call, args: Args) -> Frame:
        """Where a collective belongs: to the call that is open, in the micro-batch for which it was planned."""
        frame, travelling = self._host.here(), next(leaves(call.find("size", args)), None) if self._planned else None
        phase, micro_batch = self._planned.pop(id(travelling), (None, None))
        if micro_batch is None:
            return frame
        place = inner(frame, name=call.name, scope="call", stage=None, phase=phase, role=None)
        place.id, place.micro_batch = frame.id, micro_batch
        return place

    # ---------------------------------------------------------------- waiting

    def _await(self, opened: Open, what: Any, key: int) -> None:
        opened.ref = weakref.ref(what, lambda _: self._host.guard(self._gone, opened, key))
        self._awaited[key] = opened

    def _gone(self, opened: Open, key: int) -> None:
        """Nobody can wait for it any more."""
        if self._awaited.get(key) is opened:
            del self._awaited[key]
        self._end(opened)

    def _wait(self, call: Call, args: Args, _kwargs: Mapping[str, Any]) -> tuple[Open, int] | None:
        what = call.find("wait", args)
        key = what.untyped_storage()._cdata if is_tensor(what) else id(what)
        opened = self._awaited.pop(key, None)
        return None if opened is None else (opened, clock())

    def _waited(self, waiting: tuple[Open, int], _args: Args, _result: Any) -> None:
        (opened, since), now = waiting, clock()
        opened.ref = None
        self._end(opened, now)
        if opened.asynchronous:
            of, frame = opened.row, self._host.here()
            row = SpanRow(
                id=self._host.new_span(), parent=frame.id or None, event="whole", name=f"wait {of.name}",
                span_kind="wait", start_ns=since, end_ns=now, latency_ms=(now - since) / 1e6, group=of.group,
                peer_ranks=of.peer_ranks,
            )  # fmt: skip
            self._host.put(row, frame, now)


def _itself(call: Call, _args: Args, _kwargs: Mapping[str, Any]) -> Call:
    return call
