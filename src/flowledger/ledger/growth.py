"""What a run's files have grown by: whole lines, piece by piece, each byte once.

A part's files are followed by their place in it, so that rotation, new parts and the compaction at the end (parts are set
aside) lose nothing and repeat nothing. A line that is not finished waits. Folders are listed again only when they have
changed: a run of a thousand ranks has thousands of files, and most looks find nothing new in most of them.
"""

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LEAST, MOST = 4 << 10, 8 << 20  # bytes of a file at once
FOLDERS = ("parts", "compacted")
SETTLED_S = 2.0  # a folder that changed so shortly before it was listed may have changed again in the same tick


class Piece(NamedTuple):
    """Lines that one process has added to one table."""

    part: str
    table: str
    lines: bytes


@dataclass(slots=True)
class _Folder:
    """A part: what files it has, and how far each was read."""

    path: Path
    listed: float = -1.0  # its time of change when it was listed last, which it then had had for a while
    files: list[tuple[str, str]] = field(default_factory=list)  # name, table; in the order in which they were written
    offsets: dict[str, int] = field(default_factory=dict)


class Growth:
    """The files of some tables of a run, followed as they grow. `left`: bytes that the last reading found and did not take."""

    def __init__(self, path: Path, tables: Collection[str]) -> None:
        self._path, self._tables = path, frozenset(tables)
        self._folders: dict[str, _Folder] = {}
        self._listed: dict[str, float] = {}
        self.read = 0  # bytes so far
        self.left = 0

    @property
    def parts(self) -> Collection[str]:
        """The names of all parts that are there."""
        return self._folders.keys()

    def where(self, part: str) -> Path:
        """The folder of a part."""
        return self._folders[part].path

    def pieces(self, most: int, first: str = "") -> Iterator[Piece]:
        """What is new, about `most` bytes of it: of each file in proportion, so that all come on alike. `first`: the table that comes first."""
        self.list_parts()
        grown = [(folder, *one) for folder in self._folders.values() for one in self._grown(folder)]
        grown.sort(key=lambda one: one[2] != first)
        new = sum(size for *_, size in grown)
        self.left, cut = 0, set[tuple[str, str]]()
        for folder, file, table, size in grown:
            part = folder.path.name
            wanted = min(size, MOST, size if new <= most else max(LEAST, size * most // new))
            lines = (
                b"" if (part, table) in cut else self._read(folder, file, wanted)
            )  # a later file waits for an earlier one
            if wanted < size or (part, table) in cut:
                cut.add((part, table))
                self.left += size - len(lines)
            if lines:
                yield Piece(part, table, lines)

    def list_parts(self) -> None:
        """See which parts there are by now, in the order of their names."""
        for place in FOLDERS:
            changed = _changed(self._path / place)
            if changed is None or changed == self._listed.get(place):
                continue
            self._listed[place] = changed if time.time() - changed > SETTLED_S else -1.0
            for found in _entries(self._path / place):
                if found.is_dir():
                    known = self._folders.setdefault(found.name, _Folder(Path(found.path)))
                    known.path = Path(found.path)
            self._folders = dict(sorted(self._folders.items()))

    def _list_files(self, folder: _Folder) -> None:
        changed = _changed(folder.path)
        if changed is None or changed == folder.listed:
            return
        folder.listed = changed if time.time() - changed > SETTLED_S else -1.0
        names = [found.name for found in _entries(folder.path) if found.name.endswith(".jsonl")]
        tables = [(*turn(name), name) for name in names]
        folder.files = [(name, table) for table, _, name in sorted(tables) if table in self._tables]

    def _grown(self, folder: _Folder) -> Iterator[tuple[str, str, int]]:
        """(file, table, bytes) that a part has and that were not read."""
        self._list_files(folder)
        for file, table in folder.files:
            try:
                size = os.stat(f"{folder.path}/{file}").st_size  # noqa: PTH116 thousands of them, again and again
            except OSError:  # it is being set aside
                continue
            if (new := size - folder.offsets.get(file, 0)) > 0:
                yield file, table, new

    def _read(self, folder: _Folder, file: str, most: int) -> bytes:
        at = folder.offsets.get(file, 0)
        try:
            number = os.open(f"{folder.path}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            found = os.pread(number, most, at)
            while (end := found.rfind(b"\n") + 1) == 0 and (more := os.pread(number, MOST, at + len(found))):
                found += more  # a line longer than that
        finally:
            os.close(number)
        folder.offsets[file] = at + end
        self.read += end
        return found[:end]


def turn(name: str) -> tuple[str, int]:
    """`metrics-10.jsonl` comes after `metrics-9.jsonl`: its table and number."""
    table, _, number = name.removesuffix(".jsonl").rpartition("-")
    return table, int(number) if number.isdigit() else 0


def _changed(folder: Path) -> float | None:
    try:
        return os.stat(folder).st_mtime  # noqa: PTH116  as above
    except OSError:
        return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
