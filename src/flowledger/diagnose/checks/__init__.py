"""Checks for silent errors: what was recorded is held against what the run was asked to do, one file a subject.

Each file with a function `check(ledger)` is asked by `diagnose.findings`. It answers with findings, `skipped` where it
lacks an input. None of them guesses: a number is made again from what stands beside it, and compared.
"""
