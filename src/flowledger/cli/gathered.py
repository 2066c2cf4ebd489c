"""Whatever `diagnose` is given, in any mixture: runs, plans, configurations, logs, crashes, reports. What cannot be read is said,
and hides nothing of the rest."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowledger.cli import source_kinds as kinds
from flowledger.cli import without_config
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.diagnose.alarms.rules import Rule
    from flowledger.diagnose.orders.evidence import Evidence
    from flowledger.diagnose.planned import Planned
    from flowledger.ledger.reader import Ledger
    from flowledger.ledger.rows import FindingRow

CONFIGS = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml")
UNKNOWN = "unknown"  # the framework of files that do not name theirs
NOTHING = "nothing in it is known: no metrics, no samples, no crash, no configuration"
SETTING = re.compile(r"[+~]{0,2}[\w./@-]+=\S*|~[A-Za-z_]\w*(?:\.\w+)+")  # Hydra's words: `a.b=1`, `+a.b=1`, `~a.b`


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for beside the sources: how a configuration is planned, and which alarms a run is held against."""

    settings: Sequence[str] = ()
    gpu: str | None = None
    model: str | None = None
    framework: str | None = None
    assume: Sequence[str] = ()
    rules: "Sequence[Rule]" = ()  # alarms of the user's own
    lang: str = "en"  # of the words of alarms


@dataclass(kw_only=True)
class Gathered:
    """What was read. `read` and `unread`: a source, with what it is or why it is left out."""

    evidence: "Evidence"
    reported: "list[FindingRow]"
    read: list[tuple[str, str]]
    unread: list[tuple[str, str]]
    words: Mapping[str, str] = field(default_factory=dict)  # English sentence -> the same in the language asked for


@contextmanager
def gathered(sources: Sequence[str], asked: Asked) -> Iterator[Gathered]:
    """Everything in the sources, for as long as it is looked at. Raises BadInput where nothing of it can be read."""
    words = [word for word in sources if not (SETTING.fullmatch(word) and not Path(word).exists())]
    settings = [*asked.settings, *(word for word in sources if word not in words)]
    if not words:
        raise BadInput(
            "nothing to look at: give a run, a log, a configuration, a traceback or a report (`-` reads stdin)"
        )
    kinds.check_framework(asked.framework)
    sizes, limit = without_config.sizes_of(asked.model), without_config.bytes_of(asked.gpu)
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="flowledger-") as place:
        desk = _Desk(Path(place), asked, settings, held, sizes, limit)
        for word in dict.fromkeys(words):
            desk.take(word)
        desk.import_logs()
        if not desk.read:
            raise BadInput("\n".join(f"{source}: {why}" for source, why in desk.unread))
        if not desk.planned_any:
            desk.unread += without_config.not_taken(settings, asked.framework, asked.assume)
        yield desk.found()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One plan: its document, the resolved configuration, and the bytes of the device."""

    planned: "Planned | None" = None
    config: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    assumed: frozenset[str] = frozenset()  # symbols whose sizes no source has


class _Desk:
    """Sources as they are taken up, one after the other."""

    def __init__(
        self,
        place: Path,
        asked: Asked,
        settings: Sequence[str],
        held: ExitStack,
        sizes: Mapping[str, int],
        limit: int | None,
    ) -> None:
        self._place, self._asked, self._settings, self._held = place, asked, settings, held
        self._sizes, self._limit = sizes, limit
        self.planned_any = False  # whether a configuration was, so that settings and assumptions had where to go
        self._logs: list[tuple[str, Path]] = []
        self._books: list[Ledger] = []
        self._plans: list[_Plan] = []
        self._findings: list[FindingRow] = []
        self._known: list[FindingRow] = []
        self._words: dict[str, str] = {}
        self._reported: list[FindingRow] = []
        self.read: list[tuple[str, str]] = []
        self.unread: list[tuple[str, str]] = []

    def found(self) -> Gathered:
        """All of it together: of several plans the first stands beside the runs."""
        return Gathered(
            evidence=self._evidence(), reported=self._reported, read=self.read, unread=self.unread, words=self._words
        )

    def _evidence(self) -> "Evidence":
        from flowledger.diagnose.orders.evidence import Evidence

        plan = self._plans[0] if self._plans else _Plan()
        return Evidence(
            books=tuple(self._books), findings=tuple(self._findings), known=tuple(self._known), planned=plan.planned,
            planned_config=plan.config, limit=plan.limit or self._limit, told_sizes=self._sizes,
            assumed=plan.assumed,
        )  # fmt: skip

    def take(self, word: str) -> None:
        """Read one source, or note why it cannot be; logs of one run wait until all are known."""
        try:
            path = self._stdin() if word == "-" else kinds.path_of(word, otherwise=self._place / "none")
            if path.is_fifo():  # `diagnose <(…)`
                path = kinds.drained(path, self._place / f"pipe-{len(self._logs)}")
            takes = self._taker(word, path)
            takes(word, path)
        except Exception as error:  # noqa: BLE001  whatever a file holds, the other sources are looked at
            self.unread.append((word, kinds.said(error)))

    def import_logs(self) -> None:
        """All logs, dumps and traces together as one run; where that cannot be, each for itself."""
        if not self._logs:
            return
        short = [(word, path) for word, path in self._logs if kinds.is_short_text(path)]
        several = len(self._logs) > 1
        for word, path in short if several else []:  # what somebody has written beside the logs is no part of the run
            if not self._holds_something(path):
                self._as_text(word, path, NOTHING)
                self._logs.remove((word, path))
        words = ", ".join(word for word, _ in self._logs)
        if len(self._logs) > 1 and self._imported(words, [path for _, path in self._logs], told=False):
            return
        for word, path in self._logs:
            self._imported(word, [path], told=True)

    # ------------------------------------------------------------------------------------------------ what a source is

    def _taker(self, word: str, path: Path) -> Callable[[str, Path], None]:
        if path.is_dir():
            return self._run if (path / "manifest.json").exists() else self._log
        if not path.exists():
            return self._named
        if not path.is_file():
            raise BadInput("neither a file nor a directory")
        if path.stat().st_size == 0:
            raise BadInput("empty")
        if (why := kinds.NOT_READ.get(path.suffix.lower())) is not None:
            raise BadInput(why)
        if path.suffix in CONFIGS:
            return self._config if not kinds.is_report(path) else self._report
        if path.suffix in (".json", ".jsonl"):
            if kinds.is_report(path):
                return self._report
            if path.suffix == ".json" and (document := kinds.json_object(path)) is not None:
                return self._json_taker(document)
        return self._log

    def _json_taker(self, document: Mapping[str, Any]) -> Callable[[str, Path], None]:
        if {"schema", "verb"} <= document.keys():
            return self._plan
        return self._log if {"log_history", "traceEvents"} & document.keys() else self._config_or_log

    def _stdin(self) -> Path:
        path = self._place / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return path

    # -------------------------------------------------------------------------------------------------- what is made of it

    def _run(self, word: str, path: Path) -> None:
        from flowledger.diagnose.alarms.rules import built_in, joined
        from flowledger.diagnose.alarms.verdicts import evaluated
        from flowledger.diagnose.findings import findings
        from flowledger.diagnose.orders.kept import kept, planned_of
        from flowledger.ledger.reader import Ledger

        ledger = self._held.enter_context(Ledger(path))
        manifest = ledger.directory.manifest
        told = planned_of(ledger)
        if manifest.level == "plan":
            self._findings += kept(ledger, ())
            self._plans.append(_Plan(planned=told, config=manifest.config))
            self.read.append((word, "a plan that was written down"))
            return
        own = self._asked.rules
        fresh = findings(ledger, rules=joined(built_in(), own) if own else None, lang=self._asked.lang)
        self._books.append(ledger)
        gone = {rule.id for rule in own}  # what an alarm said that stands no more
        self._findings += [*fresh, *(one for one in kept(ledger, fresh) if one.id not in gone)]
        self.unread += [("--rules", line) for line in evaluated(ledger, own).strangers()] if own else []
        self._plans += [_Plan(planned=told, config=manifest.config)] if told is not None else []
        named = [one for one in (manifest.framework, manifest.framework_version) if one and one != UNKNOWN]
        whose = f" of {' '.join(named)}" if named else ""
        self.read.append((word, f"a run{whose}, level {manifest.level}, {ledger.directory.state}"))

    def _config(self, word: str, path: Path, framework: str | None = None) -> None:
        from flowledger.diagnose import planned
        from flowledger.plan.ask import Question, make
        from flowledger.plan.document import document

        asked = self._asked
        reading, assumed = without_config.reading_of(path, self._settings, framework or asked.framework, asked.assume)
        made = make(reading, Question(gpu=asked.gpu, model=asked.model))
        self.planned_any = True
        self._words |= without_config.in_language(made, asked.lang)
        told = planned.read(document(made), word)
        for one in told.checks:  # which file a value is from: one that is read from a log has none of its own
            one.evidence = (
                [line.replace(f"{path}:1", word) for line in one.evidence or []] if framework else one.evidence
            )
        config = made.config.model_dump(mode="json", by_alias=True)
        self._findings += told.checks
        self._plans.append(
            _Plan(planned=told, config=config, limit=made.limit, assumed=planned.assumed(made.config.source_of))
        )
        about = f"a configuration of {told.summary.framework} ({told.summary.model})"
        self.read.append((word, "; ".join([about, *(f"it leaves one open, taken as {one}" for one in assumed)])))

    def _plan(self, word: str, path: Path) -> None:
        from flowledger.diagnose import planned

        told = planned.read(json.loads(path.read_text(encoding="utf-8")), word)
        self._findings += told.checks
        self._plans.append(_Plan(planned=told))
        self.read.append((word, f"a plan of {told.summary.framework} ({told.summary.model})"))

    def _config_or_log(self, word: str, path: Path) -> None:
        try:
            self._config(word, path)
        except BadInput:
            self._log(word, path)

    def _named(self, word: str, path: Path) -> None:
        """What is no file: the name of a framework, or the words of a report."""
        from flowledger.config.detect import FRAMEWORKS

        if word in FRAMEWORKS:
            self._config(word, path)
        elif " " in word.strip() or "\n" in word:
            self._report(word, path)
        else:
            raise BadInput("no such file or directory")

    def _report(self, word: str, path: Path) -> None:
        from flowledger.cli.reports import reported

        self._reported += reported(word if " " in word and not path.exists() else str(path))
        self.read.append((word if len(word) < 60 else f"{word[:57]}…", "a report"))

    def _log(self, word: str, path: Path) -> None:
        self._logs.append((word, path))

    def _imported(self, word: str, paths: Sequence[Path], *, told: bool) -> bool:
        """Whether these files are a run together. `told`: where they are none it is said; text is then taken for a report."""
        from flowledger.cli.imports import imported, names_said
        from flowledger.diagnose.unfinished import stopped_early

        into = self._place / f"run-{len(self.read)}-{len(paths)}-{len(self.unread)}"
        try:
            summary = imported(paths, into, framework=self._asked.framework)
            if not kinds.holds_something(summary):
                raise BadInput(NOTHING)
            self._run(word, into)
        except Exception as error:  # noqa: BLE001  the same
            if told:
                self._as_text(word, paths[0], kinds.said(error))
            return False
        what, book = self.read.pop()[1], self._books[-1]
        more = (*names_said(summary), *kinds.after_the_end(book), *stopped_early(book, paths))
        self.read.append((word, "; ".join([f"read as {what}", *more])))
        self._ask_of_crash(paths)
        self._plan_of_log(word)
        return True

    def _holds_something(self, path: Path) -> bool:
        from flowledger.cli.imports import imported

        try:
            return kinds.holds_something(
                imported([path], self._place / f"alone-{path.name}-{len(self.read)}-{len(self.unread)}")
            )
        except Exception:  # noqa: BLE001  why is said where it is taken for a report
            return False

    def _plan_of_log(self, word: str) -> None:
        """Many a log begins with the configuration: it is planned where no other was given."""
        manifest = self._books[-1].directory.manifest
        raw = manifest.config.get("raw")
        if self._plans or not isinstance(raw, Mapping) or not raw:
            return
        file = self._place / f"{manifest.framework}-{len(self.read)}.yaml"
        file.write_text(json.dumps(raw), encoding="utf-8")  # JSON is YAML
        try:
            self._config(f"{word} (its configuration)", file, manifest.framework)
        except Exception as error:  # noqa: BLE001  the log itself is looked at without it
            self.unread.append(
                (f"{word} (its configuration)", kinds.said(error).replace(f"@{file}:1", "").replace(str(file), word))
            )

    def _as_text(self, word: str, path: Path, why: str) -> None:
        broken = None if path.is_dir() else kinds.broken_json(path)
        if path.is_dir() or broken is not None:
            self.unread.append((word, broken or why))
            return
        try:
            self._report(word, path)
        except Exception:  # noqa: BLE001  the same
            self.unread.append((word, why))

    def _ask_of_crash(self, paths: Sequence[Path]) -> None:
        """What is known of such exceptions, where the run ended with one."""
        from flowledger.cli.reports import reported

        if self._evidence().end is None:
            return
        for path in paths:
            try:
                told = reported(str(path)) if path.is_file() else []
            except Exception:  # noqa: BLE001  what the log itself says stands without it
                continue
            self._known += [one for one in told if one.verdict in ("fail", "warn")]
