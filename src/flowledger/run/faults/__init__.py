"""Faults for the reference loop: functions of it replaced by sick ones, as real frameworks have been sick.

Each file holds the faults of one stage or goal: functions without arguments that return `Changes`. What they are and
who must notice them stands in diagnose/faults.toml.
"""
