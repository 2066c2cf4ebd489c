"""Who says a line of a console log, and what: colours and the prefixes of launchers and loggers are taken off."""

import re
from functools import lru_cache
from typing import NamedTuple

COLOUR = re.compile(
    r"\x1b?\[[0-9;]{1,24}m|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]"
)
RAY = re.compile(
    r"\s*\((?:(?P<role>[A-Za-z_][\w.:\[\]-]*) )?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?[^)\n]{0,80}\)[ :]?"
)
RANK = re.compile(r"\s*\[(?:rank|default|Rank )(?P<rank>\d{1,18})\]:? ?")
MOST_RANKS = 100_000  # no job has as many: a larger number is none of a rank
# What a logger, a container's log or srun puts before a line, of any process.
LOGGER = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?"  # containers
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[,.]\d{1,9})? "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) \d\d-\d\d [\d:.]+ \[[^\]\n]{1,80}\] ?"  # vLLM
    r"|\[?\d{4}-\d\d-\d\d[ T][\d:,.]+(?: [^\]\n]{1,60})?\](?:\[[^\]\n]{1,80}\])*(?: - |: | )"  # SGLang, hydra
    r"|\[[EWIF](?:\d{3,4} [\d:.]+)? ?\S+\.cpp:\d+\] "  # torch
    r")"
)
RAY_COLOURED = re.compile(
    r"\x1b\[\d+m\((?:(?P<role>[A-Za-z_][\w.:\[\]-]*) )?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?\)\x1b\[0m ?"
)
# Ray's names of the processes of which each is a rank: verl's, OpenRLHF's, slime's, NeMo-RL's.
TRAINERS = re.compile(
    r"WorkerDict|ActorRolloutRef\w*Worker|PolicyModelActor|\w*TrainRayActor|(?:Megatron|DTensor)\w*PolicyWorker"
)
PREFIXED = frozenset(" \t([DIWECF0123456789")  # how a prefix may begin
REPEATED = re.compile(r"\s{0,8}\[repeated (?P<times>\d+)x across (?:cluster|actors|all actors)[^\]]*\].*$")


class Speaker(NamedTuple):
    """A process as a log names it; what the log does not say is empty, or None for the rank."""

    role: str = ""
    pid: int = 0
    ip: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        told = [f"rank {self.rank}" if self.rank is not None else "", self.role, f"pid {self.pid}" if self.pid else ""]
        return " ".join(word for word in [*told, f"on {self.ip}" if self.ip else ""] if word)


NOBODY = Speaker()


def rank_of(digits: str) -> int | None:
    """The rank that a number is; None for one that no rank has."""
    return int(digits) if len(digits) <= 18 and int(digits) < MOST_RANKS else None


@lru_cache(maxsize=1024)
def trains(role: str) -> bool:
    """Whether a process that Ray calls so is one of the ranks."""
    return TRAINERS.match(role) is not None


def split(line: str) -> tuple[Speaker, str]:
    """(who, what) of one line. Of the text's own indentation nothing is taken."""
    if "\x1b" in line or line[:1] == "[":
        if (found := RAY_COLOURED.match(line)) is not None:  # nearly every line of a job under Ray
            line = line[found.end() :]
            who = _speaker(found["role"] or "", found["pid"], found["ip"] or "", None)
            if line[:1] not in PREFIXED and "\x1b" not in line:
                return who, line
            return _split(who, COLOUR.sub("", line))
        line = COLOUR.sub("", line)
    return _split(NOBODY, line)


def _split(who: Speaker, line: str) -> tuple[Speaker, str]:
    for _ in range(6):
        if line[:1] not in PREFIXED:
            break
        if (found := RAY.match(line)) is not None:
            who = _speaker(found["role"] or who.role, found["pid"], found["ip"] or who.ip, who.rank)
        elif (found := RANK.match(line)) is not None:
            if who.rank is None:  # the launcher's comes first; what follows may be the rank within a group
                who = who._replace(rank=rank_of(found["rank"]))
        elif (found := LOGGER.match(line)) is None:
            break
        line = line[found.end() :]
    return who, line


@lru_cache(maxsize=4096)
def _speaker(role: str, pid: str, ip: str, rank: int | None) -> Speaker:
    return Speaker(role, int(pid[:12]), ip, rank)
