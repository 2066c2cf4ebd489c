"""What a rank has written into a checkpoint, and what it restores: the same three numbers, so that a resume can be held against it.

Of every file of this rank the name, the size and its two ends go into the checksum. To read it whole would cost what it
cost to write it.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

END = 4096  # bytes at each end of a file
WHOLE = 1 << 32


def tell(folder: str | Path, rank: int, way: str, metric: Callable[[str, float], None]) -> None:
    """Files, bytes and checksum of a rank's part of a checkpoint, as metrics; way: written or restored."""
    files = of_rank(Path(folder), rank)
    metric(f"checkpoint/{way}_files", float(len(files)))
    metric(f"checkpoint/{way}_bytes", float(sum(file.stat().st_size for file in files)))
    metric(f"checkpoint/{way}_checksum", float(sum(map(checksum, files)) % WHOLE))


def of_rank(folder: Path, rank: int) -> list[Path]:
    """The files named after a rank, in a folder that ranks write into at the same time."""
    return sorted(file for file in folder.glob("*") if file.is_file() and file.stem.endswith(f"rank_{rank}"))


def checksum(file: Path) -> int:
    """crc32 of a file's name, its size and its first and last 4 KiB."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(END)
        opened.seek(max(0, size - END))
        return zlib.crc32(f"{file.name}|{size}|".encode() + first + opened.read(END))
