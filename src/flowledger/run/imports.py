"""Functions that the user names: `module:name` or `path/to/file.py:name`. No torch: the reward process needs it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.run.exceptions import told


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """The function at an import path; `key` is the setting that holds it, for the message.

    Raises BadInput for a path without `:name`, a file that is not there, an import that raises, and an unknown name.
    """
    location, colon, name = path.rpartition(":")
    if not colon or not location or not name:
        raise BadInput(f"{key} = {path!r} is no import path; write module:name or path/to/file.py:name")
    is_file = location.endswith(".py")
    if is_file and not Path(location).is_file():
        raise BadInput(f"{key} = {path!r}: there is no file {location} (seen from {Path.cwd()})")
    try:
        module = _module_of_file(Path(location)) if is_file else _module(location)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's module may raise anything at all)
        raise BadInput(f"{key} = {path!r}: importing {location} raised {told(error)}") from None
    found = getattr(module, name, None)
    if not callable(found):
        known = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        what = "has no function" if found is None else "is not callable:"
        raise BadInput(f"{key} = {path!r}: {location} {what} {name}{nearest(name, known)}")
    function: Callable[..., Any] = found
    return function


def _module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:  # a console script does not look where it was started; people expect it to
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _module_of_file(file: Path) -> ModuleType:
    name = f"_flowledger_user_{file.stem}_{abs(hash(str(file.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up by name
    spec.loader.exec_module(module)
    return module
