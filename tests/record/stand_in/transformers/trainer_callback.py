"""The two events of a trainer's callbacks between which a step lies."""

from typing import Any


class CallbackHandler:
    def on_step_begin(self, args: Any, state: Any, control: Any) -> None: ...
    def on_step_end(self, args: Any, state: Any, control: Any) -> None: ...
