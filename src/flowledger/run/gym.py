"""Problems of reasoning-gym: endless, the same for the same (task, options, seed, index), with the task's own scorer.

No torch: the reward process builds the same problems again to score them. reasoning-gym is imported when first needed,
since that takes seconds.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flowledger.flow.errors import BadInput, nearest

CHUNK = 500  # problems made with one seed; some tasks choose among their `size` variants when they are built


class Gym:
    """One task. Problem `index` is item `index % CHUNK` of the data set with seed `seed + index // CHUNK`."""

    def __init__(self, task: str, options: Mapping[str, Any], seed: int) -> None:
        """Raises BadInput for an unknown task (with the nearest name) and for options that the task refuses."""
        self.task, self._options, self._seed = task, dict(options), seed
        self._chunk = lru_cache(maxsize=8)(self._build)
        self._chunk(0)

    def entry(self, index: int) -> dict[str, Any]:
        """The problem: `question`, `answer`, `metadata`."""
        found: dict[str, Any] = self._chunk(index // CHUNK)[index % CHUNK]
        return found

    def score(self, response: str, index: int) -> float:
        """The task's own score of a response, as a rule between 0 and 1."""
        dataset = self._chunk(index // CHUNK)
        return float(dataset.score_answer(response, dataset[index % CHUNK]))

    def _build(self, chunk: int) -> Any:
        try:
            import reasoning_gym  # noqa: PLC0415
            from reasoning_gym.factory import DATASETS  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise BadInput(
                f"data.task = {self.task!r} needs reasoning-gym ({error}); pip install 'flowledger[run]'"
            ) from None
        if self.task not in DATASETS:
            near = nearest(self.task, DATASETS)
            raise BadInput(f"data.task = {self.task!r} is none of reasoning-gym's {len(DATASETS)} tasks{near}")
        seed = (self._seed + chunk) % 2**32
        try:
            return reasoning_gym.create_dataset(self.task, **{"size": CHUNK, **self._options, "seed": seed})
        except (TypeError, ValueError, AssertionError, LookupError, ArithmeticError, AttributeError) as error:
            known = [name for name in DATASETS[self.task][1].__dataclass_fields__ if name not in ("seed", "size")]
            wrong = next((name for name in self._options if name not in known), "")
            hint = nearest(wrong, known) if wrong else ""
            raise BadInput(
                f"data.task_options = {self._options}: {self.task} refuses them ({error}); "
                f"it has {', '.join(known)}{hint}"
            ) from None
