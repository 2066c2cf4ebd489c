"""Alarms: rows of YAML over the numbers of a run, afterwards (`check`) and while it goes on (`live`)."""

from flowledger.diagnose.alarms.verdicts import check, check_all

__all__ = ["check", "check_all"]
