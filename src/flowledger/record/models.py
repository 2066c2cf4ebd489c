"""Hooks on the models of the job, from the first on that is met."""

from collections.abc import Callable
from typing import Any

from flowledger.record.layers import Layers, module_in


class Models:
    """`guard`: what runs a hook. `layers`: who is told of each model; nobody at level steps."""

    def __init__(self, guard: Callable[..., Any], layers: Layers | None) -> None:
        self._guard, self._layers = guard, layers
        self.hooks: Any = None  # ModelHooks, once they are wanted

    def meet(self, value: Any) -> None:
        """Hook the model in a value, where there is one, and none of it is hooked yet."""
        module = module_in(value)
        if module is not None and (self.hooks is None or not self.hooks.knows(module)):
            if self._layers is not None:
                self._layers.meet(module)
            self.wanted().meet(module)

    def wanted(self) -> Any:
        """The hooks, made where there are none."""
        if self.hooks is None:
            from flowledger.record.hooks import ModelHooks  # noqa: PLC0415  torch is wanted from here on only

            self.hooks = ModelHooks(self._guard)
        return self.hooks

    def close(self) -> None:
        """Take them off."""
        if self.hooks is not None:
            self.hooks.close()
