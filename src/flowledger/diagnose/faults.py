"""The faults that `selftest` puts into a run one at a time, and who is right to notice each: data, and the judgement.

How a fault is done is named as text (`run/faults/<file>.py:<function>`), for this room never imports the loop.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.ledger.rows import FindingRow

TABLES = ("faults.toml", "faults_goals.toml")  # of correctness; of the other goals
GOALS = ("correctness", "stability", "performance", "memory", "balance", "data")
WITHIN = 2  # steps in which a fault must be noticed, that of its effect included
LAST = 30  # step in which a fault may begin or show: every run is as long
NAME = re.compile(r"\w[\w-]{0,79}")
ERRORS = ("error", "critical")  # severities that count where nobody has said who must notice
FIRED = ("warn", "fail")

Patch = str | Mapping[str, Callable[..., Any]] | Callable[[], Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong in a run, and the findings that are right answers to it.

    `patch`: `file:function` of run/faults, or from outside a mapping from `module:function` to what wraps it (or a
    function without arguments that returns one); None where `config` alone is the fault. It acts from step `starts` on,
    and is first seen in what is recorded of step `takes_effect` (None: the same).
    """

    id: str
    what: str
    zh: str = ""
    goal: str = "correctness"  # one of GOALS
    patch: Patch | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # settings of the small run, dotted or nested
    starts: int = 2
    takes_effect: int | None = None
    expects: Sequence[str] = ()  # ids of findings; empty: any finding that is an error
    needs: Sequence[str] = ()  # parts that the loop does not have yet: the fault waits for them
    blind: str = ""  # why nothing that is recorded can show it
    quick: bool = False
    file: str = ""  # that it stands in, where it is one from outside: another process reads it again

    @property
    def effect(self) -> int:
        """The step in which it shows first."""
        return self.starts if self.takes_effect is None else self.takes_effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """A run in which nothing is wrong, and nothing may be found."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one fault, or of one clean run."""

    id: str
    goal: str = ""
    what: str = ""
    zh: str = ""
    status: str  # caught, missed, waiting; of clean runs silent or false_alarm
    caught_by: Sequence[str] = ()  # those of `expects` that fired
    step: int | None = None  # of the first of them
    after: int | None = None  # steps from its effect until then: 0 in the same step
    fired: Sequence[str] = ()  # every finding that warned or failed
    expects: Sequence[str] = ()
    message: str = ""  # of the finding that caught it, or why it was missed
    ended: str = ""  # how the run ended where it did not end well
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As a row of the table."""
        return asdict(self)


@cache
def table() -> tuple[tuple[Fault, ...], tuple[Clean, ...]]:
    """The faults and the clean runs of the tables beside this file."""
    found: list[Fault] = []
    clean: list[Clean] = []
    for name in TABLES:
        told = tomllib.loads(files("flowledger.diagnose").joinpath(name).read_text(encoding="utf-8"))
        found += [checked(row, name) for row in told.get("fault", ())]
        clean += [Clean(**row) for row in told.get("clean", ())]
    return tuple(found), tuple(clean)


def checked(fault: Any, where: str = "faults.toml") -> Fault:
    """This fault, if it is one. Raises BadInput that names `where`, the field and what it must be."""
    if isinstance(fault, Mapping):
        fault = from_mapping(fault, where)
    if not isinstance(fault, Fault):
        raise BadInput(f"{where}: {fault!r:.80} is no Fault; write Fault(id=…, what=…, patch={{…}}, expects=[…])")
    at = f"{where}: fault {fault.id!r:.80}"
    text = isinstance(fault.id, str) and fault.id and isinstance(fault.what, str)
    if not text:
        raise BadInput(f"{at}: id and what must be text, and id must not be empty")
    if not NAME.fullmatch(fault.id):  # it is asked for by name, and names the directory of what is kept
        raise BadInput(f"{at}: an id has letters, digits, _ and -, such as {_plain(fault.id)!r}")
    if fault.goal not in GOALS:
        raise BadInput(f"{at}: goal = {fault.goal!r} is none of {', '.join(GOALS)}{nearest(str(fault.goal), GOALS)}")
    for name in ("starts", "takes_effect"):
        step = getattr(fault, name)
        if not (step is None and name == "takes_effect") and not (type(step) is int and 0 <= step <= LAST):
            raise BadInput(f"{at}: {name} = {step!r} should be a step from 0 to {LAST}")
    if fault.effect < fault.starts:
        raise BadInput(
            f"{at}: takes_effect = {fault.takes_effect} is before starts = {fault.starts}; use {fault.starts}"
        )
    for name in ("expects", "needs"):
        value = getattr(fault, name)
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
            raise BadInput(f"{at}: {name} = {value!r:.80} should be a list of text; use [{value!r:.40}]")
    if not isinstance(fault.config, Mapping):
        raise BadInput(
            f"{at}: config = {fault.config!r:.80} should be a mapping of settings, such as {{'optim.lr': 1e-2}}"
        )
    if fault.patch is None and not fault.config and not fault.needs:
        raise BadInput(f"{at}: it has neither a patch nor a config, so nothing would be wrong")
    if not isinstance(fault.patch, str | None):
        changes_of(fault, where)
    return fault


def _plain(name: str) -> str:
    """The nearest text that can be an id."""
    return re.sub(r"[^\w-]+", "_", name).strip("_-")[:80] or "my_fault"


def from_mapping(row: Mapping[str, Any], where: str) -> Fault:
    """A fault from its fields by name. Raises BadInput for one that is unknown or missing."""
    known = [one.name for one in fields(Fault)]
    for name in row:
        if name not in known:
            raise BadInput(
                f"{where}: a fault has no {name!r:.80}{nearest(str(name), known)}; known: {', '.join(known)}"
            )
    for name in ("id", "what"):
        if name not in row:
            raise BadInput(f"{where}: the fault {row.get('id', '')!r:.80} lacks {name!r}")
    return Fault(**row)


def changes_of(fault: Fault, where: str = "") -> Mapping[str, Callable[..., Any]]:
    """The functions that a fault from outside replaces. Raises BadInput where its patch is nothing of the kind."""
    at, made = f"{where}: fault {fault.id!r:.80}", fault.patch
    if callable(made):
        try:
            made = made()
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            raise BadInput(
                f"{at}: its patch raised {type(error).__name__}: {error}; it is called without arguments"
            ) from None
    if not isinstance(made, Mapping) or not made:
        raise BadInput(f"{at}: patch = {made!r:.80} should map 'module:function' to a function that wraps it")
    for target, maker in made.items():
        if not isinstance(target, str) or target.count(":") != 1:
            raise BadInput(f"{at}: patch has the target {target!r:.80}; write 'package.module:function'")
        if not callable(maker):
            raise BadInput(f"{at}: patch[{target!r}] = {maker!r:.80} cannot be called; give original -> replacement")
    return made


def chosen(faults: Sequence[Fault], only: Sequence[str], *, quick: bool) -> list[Fault]:
    """Those asked for, else the quick ones, else all. Raises BadInput for an id that is none of them."""
    ids = [fault.id for fault in faults]
    for name in only:
        if name not in ids:
            raise BadInput(f"{name!r:.80} is no fault{nearest(name, ids)}; flowledger selftest --list shows all")
    if only:
        return [fault for fault in faults if fault.id in only]
    return [fault for fault in faults if fault.quick and not fault.needs] if quick else list(faults)


def judged(fault: Fault, found: Iterable[FindingRow], *, steps: int, ended: str = "") -> Outcome:
    """Whether what was found in a run of `steps` steps names the fault. A finding without a step stands for the last one."""
    fired = [one for one in found if one.verdict in FIRED and (one.step is None or one.step >= fault.effect)]
    right = [one for one in fired if (one.id in fault.expects if fault.expects else one.severity in ERRORS)]
    outcome = Outcome(
        id=fault.id, goal=fault.goal, what=fault.what, zh=fault.zh, status="missed", expects=tuple(fault.expects),
        fired=_ids(fired), message=fault.blind, ended=ended,
    )  # fmt: skip
    if not right:
        return outcome
    first = min(right, key=lambda one: steps - 1 if one.step is None else one.step)
    step = steps - 1 if first.step is None else first.step
    after = step - fault.effect
    status = "caught" if after < WITHIN else "missed"
    return replace(
        outcome, status=status, caught_by=_ids(right), step=step, after=after, message=first.message,
    )  # fmt: skip


def silent(name: str, found: Iterable[FindingRow], *, ended: str = "") -> Outcome:
    """Whether nothing was found in a clean run."""
    fired = [one for one in found if one.verdict in FIRED]
    said = "; ".join(f"{one.id}: {one.message}" for one in fired) or ended
    return Outcome(id=name, status="false_alarm" if said else "silent", fired=_ids(fired), message=said, ended=ended)


def waiting(fault: Fault) -> Outcome:
    """A fault that needs what the loop does not have yet."""
    return Outcome(
        id=fault.id, goal=fault.goal, what=fault.what, zh=fault.zh, status="waiting", expects=tuple(fault.expects),
        message=f"waits for {', '.join(fault.needs)}",
    )  # fmt: skip


def summary(faults: Sequence[Outcome], clean: Sequence[Outcome]) -> dict[str, Any]:
    """How many faults were put in and caught, and how many clean runs had something said of them."""
    put_in = [one for one in faults if one.status != "waiting"]
    missed = [one.id for one in put_in if one.status == "missed"]
    return {
        "faults": len(put_in),
        "caught": len(put_in) - len(missed),
        "clean_runs": len(clean),
        "false_alarms": sum(one.status == "false_alarm" for one in clean),
        "missed": missed,
        "waiting": [one.id for one in faults if one.status == "waiting"],
    }


def _ids(found: Iterable[FindingRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.id for one in found))
