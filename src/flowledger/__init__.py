"""flowledger: follow one RL sample through every stage, and keep one ledger of every tensor."""

__version__ = "0.1.0"
