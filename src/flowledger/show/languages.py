"""The two languages that explanations come in."""

from typing import Literal

Language = Literal["en", "zh"]


def said(english: str, chinese: str, lang: Language) -> str:
    """The text in the language that is asked for."""
    return chinese if lang == "zh" else english
