"""What every launch is given: a model, prompts and a reward, made once a module."""

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("given")
    tiny.write(made)
    return made
