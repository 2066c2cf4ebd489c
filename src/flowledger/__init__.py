"""flowledger: follow one RL sample through every stage, and keep one ledger of every tensor."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowledger.record.own import recorder

__all__ = ["__version__", "recorder"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "recorder":  # imported when it is asked for: `import flowledger` costs nothing
        from flowledger.record.own import recorder  # noqa: PLC0415

        return recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
