"""The reader: a run's rows, from parts and Parquet alike, as DuckDB tables and the views of `views.sql`.

Column types are given, never inferred. A torn line (a process killed in the middle of it) is left out and counted. Rows
are loaded once, so that a query can then be denied every other file.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from threading import local
from typing import Any

import duckdb
import msgspec

from flowledger.flow.errors import BadInput
from flowledger.ledger import flow_facts
from flowledger.ledger.assemble import assemble
from flowledger.ledger.directory import Process, RunDirectory, open_run
from flowledger.ledger.manifest import value_at
from flowledger.ledger.rows import PART_COLUMNS, ROWS, Row, columns

MOST_AT_ONCE = 2_000  # rows of one insertion
MOST_ROWS = 1_000_000  # of one answer to a user's query
READ_ONLY = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
Params = Sequence[Any] | Mapping[str, Any]


class Ledger:
    """One run, readable in whatever state it is. Raises BadInput where `path` is no run or a newer one.

    `torn` counts the lines left out. Unless `external_access` is asked for, no query can reach a file. `only`: the tables
    that are filled, where the others would cost time for nothing. `parts`, `steps`: of what was recorded the rows of these
    parts, and of steps in this range, where the whole would not fit; findings and processes are there in any case.
    """

    def __init__(
        self, path: Path | str, *, external_access: bool = False, only: Collection[str] | None = None,
        parts: Collection[str] | None = None, steps: range | None = None,
    ):  # fmt: skip
        self._parts, self._steps = parts, steps
        self.directory: RunDirectory = open_run(path)
        self.torn = 0
        self._torn_of: dict[str, int] = {}  # by table
        self.worked_out: dict[str, Any] = {}  # by who asks the rows for much more than once
        self.changes = (
            False  # rows made elsewhere stand in for some of its views: what was worked out of them may not last
        )
        self.mesh = dict(self.directory.manifest.mesh)  # axis -> degree; more, where the parts' ranks stand further out
        self._connection = duckdb.connect()
        self._of_thread = local()
        self._connection.execute("SET enable_progress_bar = false")  # it would print into what is piped on
        self._load_processes()
        for row in ROWS:
            self._create(row)
        flow_facts.load(self._connection, self.directory.manifest.bindings)
        views = files("flowledger.ledger").joinpath("views.sql").read_text(encoding="utf-8")
        with ThreadPoolExecutor(
            1
        ) as aside:  # a view is looked through when it is made, which takes as long as the rows
            made = aside.submit(self._connection.cursor().execute, views)
            for row in ROWS:
                if only is None or row.table in only:
                    self._fill(row)
            made.result()
        assemble(self._connection, self.mesh)
        if not external_access:
            self._connection.execute("SET enable_external_access = false; SET lock_configuration = true")

    @property
    def run(self) -> str:
        return self.directory.manifest.run

    def setting(self, key: str) -> Any:
        """What the run was asked for under a dotted key; None where its configuration has nothing there."""
        return value_at(self.directory.manifest.config, key)

    def rows(self, sql: str, params: Params = ()) -> list[dict[str, Any]]:
        """The result as one dict a row. Threads may ask at the same time."""
        names, values = self._fetch(sql, params)
        return [dict(zip(names, row, strict=True)) for row in values]

    def query(self, sql: str, params: Params = ()) -> tuple[list[str], list[tuple[Any, ...]]]:
        """(columns, rows) of one statement that only reads. Raises BadInput for anything else, and for bad SQL."""
        try:
            statements = self._connection.extract_statements(sql)
        except duckdb.Error as error:
            raise BadInput(_first_line(error)) from None
        if len(statements) != 1 or statements[0].type not in READ_ONLY:
            got = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise BadInput(f"a ledger is only read: give one SELECT statement, not {got}")
        with ThreadPoolExecutor(1) as pool:  # so that Ctrl-C is heard while the query runs
            asked = pool.submit(self._fetch, sql, params, MOST_ROWS, by=self._connection)
            try:
                names, rows = asked.result()
            except KeyboardInterrupt:
                self._connection.interrupt()
                raise
        if len(rows) > MOST_ROWS:
            raise BadInput(f"more than {MOST_ROWS:,} rows; add a LIMIT, or aggregate")
        return _distinct(names), rows

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def heard(self, row: type[Row]) -> None:
        """Load one table again, for what has been written since, and who wrote it. Needs `external_access`."""
        self._connection.execute(f"DROP TABLE {row.table}; DROP TABLE processes")
        self.torn -= self._torn_of[row.table]
        self._load_processes()
        self._create(row)
        self._fill(row)

    def copy_table(self, table: str, target: Path) -> None:
        """Write one whole table as Parquet, with the number of torn lines beside it. Needs `external_access`."""
        torn = self._torn_of[table]
        self._connection.execute(
            f"COPY (SELECT * FROM {table} WHERE source <> 'plan' ORDER BY process, seq) TO {_text(target)} "
            f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{torn: '{torn}'}})"
        )

    def _fetch(
        self, sql: str, params: Params, most: int | None = None, by: duckdb.DuckDBPyConnection | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        try:
            cursor = (by or self._cursor()).execute(sql, params)
            names = [column[0] for column in cursor.description or ()]
            return names, cursor.fetchall() if most is None else cursor.fetchmany(most + 1)
        except duckdb.Error as error:
            raise BadInput(_first_line(error)) from None

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """This thread's own way to the rows: what one has asked, another must not fetch."""
        if not hasattr(self._of_thread, "cursor"):
            self._of_thread.cursor = self._connection.cursor()
        found: duckdb.DuckDBPyConnection = self._of_thread.cursor
        return found

    def _load_processes(self) -> None:
        self._connection.execute(
            "CREATE TABLE processes (process VARCHAR, source VARCHAR, role VARCHAR, rank BIGINT, host VARCHAR, "
            "pid BIGINT, device VARCHAR, coordinates MAP(VARCHAR, BIGINT), monotonic_ns BIGINT, wall_ns BIGINT)"
        )
        found = sorted(_processes(self.directory.path).items())
        told = [{"process": name, **msgspec.to_builtins(process)} for name, process in found]
        self._insert("processes", told)
        for _, process in found:
            for axis, at in process.coordinates.items():
                self.mesh[axis] = max(self.mesh.get(axis, 1), at + 1)

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows into a table, many at once: one by one they take a hundred times as long."""
        types = {name: kind for name, kind, *_ in self._connection.execute(f"DESCRIBE {table}").fetchall()}
        for at in range(0, len(rows), MOST_AT_ONCE):
            picked = [{name: row.get(name) for name in types} for row in rows[at : at + MOST_AT_ONCE]]
            self._connection.execute(
                f"INSERT INTO {table} SELECT unnest(row) FROM (SELECT unnest(from_json(?, ?)) AS row)",
                [msgspec.json.encode(picked).decode(), msgspec.json.encode([types]).decode()],
            )

    def settle(self, *views: str) -> None:
        """Work views (or `balance_at`) out once, in this order, where they are asked for again and again: their rows cannot change any more.

        Threads may settle different ones at the same time.
        """
        database = self._cursor()
        for view in views:
            if f"settled {view}" in self.worked_out:
                continue
            self.worked_out[f"settled {view}"] = True
            macro, settled = view.endswith("_at"), f"{view}_settled"
            try:
                database.execute(f"CREATE TABLE {settled} AS FROM {view}{'(NULL)' if macro else ''}")
            except duckdb.Error:  # numbers that no view can add up: who asks it is told
                continue
            if macro:
                database.execute(_of_steps(view, settled))
            else:
                database.execute(f"ALTER VIEW {view} RENAME TO {view}_unsettled; CREATE VIEW {view} AS FROM {settled}")

    def stand_in(self, view: str, rows: Sequence[Mapping[str, Any]], steps: Collection[int | None] = ()) -> None:
        """Let a view (or `balance_at`) have these rows of what was recorded, made elsewhere of more than is here.

        Rows that it was given before stay, but those of `steps`. Of a plan it has what it makes itself.
        """
        self.changes = True
        told, made, macro = f"{view}_told", f"{view}_made", view.endswith("_at")
        if not self._connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [told]).fetchone():
            self._connection.execute(f"CREATE TABLE {told} AS FROM {view}{'(NULL)' if macro else ''} LIMIT 0")
            if macro:
                self._connection.execute(_of_steps(view, told))
            else:
                self._connection.execute(
                    f"ALTER VIEW {view} RENAME TO {made}; CREATE VIEW {view} AS (SELECT * FROM {told} ORDER BY step, rowid) "
                    f"UNION ALL BY NAME SELECT * FROM {made} WHERE source = 'plan'"
                )
        if steps:
            self._connection.execute(
                f"DELETE FROM {told} WHERE list_contains(?::BIGINT[], coalesce(step, -1))",
                [[-1 if step is None else step for step in steps]],
            )
        self._insert(told, rows)
        self._connection.execute(f"UPDATE {told} SET run = ?, source = 'record' WHERE run IS NULL", [self.run])

    def _create(self, row: type[Row]) -> None:
        listed = ", ".join(f'"{name}" {kind}' for name, kind in {**PART_COLUMNS, **columns(row)}.items())
        self._connection.execute(f"CREATE TABLE {row.table} ({listed})")
        self._torn_of[row.table] = 0

    def _fill(self, row: type[Row]) -> None:
        """One table from all its files. Where it is compacted its parts say the same, and are left alone."""
        table, path = row.table, self.directory.path
        types = {**PART_COLUMNS, **columns(row)}
        if (compacted := path / f"{table}.parquet").exists():
            self._load_parquet(table, compacted, types)
        else:
            found = sorted(path.glob(f"parts/*/{table}-*.jsonl"))
            self._load_parts(row, [file for file in found if table == "findings" or self._takes(file.parent.name)])
        if (planned := path / "plan" / f"{table}.parquet").exists():
            self._load_parquet(table, planned, types)
        self.torn += self._torn_of[table]

    def _load_parquet(self, table: str, file: Path, types: Mapping[str, str]) -> None:
        """An older file may lack columns, which are then null."""
        try:
            there = {name for (name, *_) in self._connection.execute(f"DESCRIBE FROM {_text(file)}").fetchall()}
            listed = ", ".join(f'"{name}"' for name in types if name in there)
            self._connection.execute(
                f"INSERT INTO {table} BY NAME SELECT {listed} FROM read_parquet({_text(file)}) WHERE {self._wanted(table)}"
            )
            noted = self._connection.execute(
                f"SELECT value::VARCHAR FROM parquet_kv_metadata({_text(file)}) WHERE key::VARCHAR = 'torn'"
            ).fetchone()
        except duckdb.Error as error:
            raise BadInput(f"cannot read {file}: {_first_line(error)}") from None
        self._torn_of[table] += int(noted[0]) if noted else 0

    def _takes(self, part: str) -> bool:
        return self._parts is None or part in self._parts

    def _wanted(self, table: str) -> str:
        """The condition on rows of the parts and steps that are wanted; those of a plan are."""
        conditions = []
        if self._parts is not None and table != "findings":
            conditions.append(f"(source = 'plan' OR process IN ({', '.join(map(_text, self._parts)) or 'NULL'}))")
        return " AND ".join([*conditions, self._in_steps()])

    def _in_steps(self) -> str:
        steps = self._steps
        return "true" if steps is None else f"(step IS NULL OR step BETWEEN {steps.start} AND {steps.stop - 1})"

    def _load_parts(self, row: type[Row], parts: Sequence[Path]) -> None:
        parts = [part for part in parts if part.stat().st_size]
        if not parts:
            return
        listed = ", ".join(_text(part) for part in parts)
        types = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in columns(row).items())
        defaults = {"rank": "coalesce(rows.rank, processes.rank)", **_defaults(row)}
        picked = ", ".join(f"{defaults.get(name, f'rows.{_quoted(name)}')} AS {_quoted(name)}" for name in columns(row))
        self._connection.execute(
            f"INSERT INTO {row.table} BY NAME SELECT ? AS run, coalesce(processes.source, 'record') AS source, "
            f"split_part(filename, '/', -2) AS process, {picked} FROM read_json([{listed}], "
            f"format = 'newline_delimited', columns = {{{types}}}, ignore_errors = true, filename = true) AS rows "
            "LEFT JOIN processes ON processes.process = split_part(filename, '/', -2)",
            [self.run],
        )
        # a malformed line arrives as a row of nulls, and the writer numbers every row
        torn = self._connection.execute(f"DELETE FROM {row.table} WHERE seq IS NULL").fetchone()
        self._torn_of[row.table] += torn[0] if torn else 0
        if self._steps is not None:
            self._connection.execute(f"DELETE FROM {row.table} WHERE source <> 'plan' AND NOT {self._in_steps()}")


def _processes(path: Path) -> dict[str, Process]:
    """Part name -> who wrote it; a part whose `process.json` never came to be is known by its name only."""
    found = {}
    for file in [*path.glob("parts/*/process.json"), *path.glob("compacted/*/process.json")]:
        try:
            found[file.parent.name] = msgspec.json.decode(file.read_bytes(), type=Process)
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def _of_steps(macro: str, table: str) -> str:
    """A macro of one step, or of all, that has its rows from a table."""
    return f"CREATE OR REPLACE MACRO {macro}(which_step) AS TABLE FROM {table} WHERE which_step IS NULL OR step = which_step"


def _defaults(row: type[Row]) -> dict[str, str]:
    """Values that the encoder leaves out because they are the column's default, such as `attempt = 0`."""
    pairs = zip(row.__struct_encode_fields__, row.__struct_fields__, strict=True)
    values = {encoded: msgspec.structs.fields(row)[n].default for n, (encoded, _) in enumerate(pairs)}
    return {
        name: f"coalesce(rows.{_quoted(name)}, {_literal(value)})"
        for name, value in values.items()
        if isinstance(value, bool | int | str) and name != "seq"
    }


def _literal(value: bool | int | str) -> str:
    return _text(value) if isinstance(value, str) else str(value).upper()


def _quoted(name: str) -> str:
    return f'"{name}"'


def _text(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _distinct(names: list[str]) -> list[str]:
    """Column names of which none hides another: `a, a` become `a, a_2`."""
    return [name if name not in names[:at] else f"{name}_{names[:at].count(name) + 1}" for at, name in enumerate(names)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
