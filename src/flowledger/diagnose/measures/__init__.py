"""Metrics as numbers a step and a rank: recomputed from samples, tokens, spans and readings, else as they were recorded."""

from flowledger.diagnose.measures.absent import missing
from flowledger.diagnose.measures.series import Series, series_of

__all__ = ["Series", "missing", "series_of"]
