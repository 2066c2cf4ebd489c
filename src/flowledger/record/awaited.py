"""Modules that are waited for: something is done with each as soon as it has been imported, and not before.

A finder at the head of `sys.meta_path` lets the others find the module, and follows its loader's work with its own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Awaited(MetaPathFinder):
    """Does for each of these modules what is to be done once it is there; at once for one that is there already."""

    def __init__(self, then: Mapping[str, Callable[[], None]]) -> None:
        self._then = dict(then)

    def install(self) -> None:
        """Begin to wait."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._then.keys() & sys.modules.keys()):
            self._arrived(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that others find for a module that is waited for; None, and so no change, for every other."""
        if fullname not in self._then:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader, fullname)
                return spec
        return None

    def _follow(self, loader: Loader, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._arrived(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone, which serves one module

    def _arrived(self, name: str) -> None:
        work = self._then.pop(name, None)
        if work is None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  the import itself has gone well, and must be seen to
            print(f"flowledger: {name} is not watched: {type(error).__name__}: {error}", file=sys.stderr)
