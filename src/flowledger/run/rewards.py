"""What each response is worth: components from rules and models, their weighted sum, and where on the tokens it lies.

Rules run in a process of their own (`reward_process`), models here. A sample for which a rule raised or took too long,
or whose reward is beyond ±1e15, gets 0 from every component, so that reward = sum of weight * component holds for every sample, and is marked `failed`
where `reward.on_error` is `drop`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowledger.config.reward import Reward
from flowledger.config.schema import Data
from flowledger.flow.errors import BadInput
from flowledger.run.batches import Rewards
from flowledger.run.models import Policy, load_reward_model, score_samples, score_tokens
from flowledger.run.problems import Problem
from flowledger.run.prompts import Tokenizer
from flowledger.run.reward_process import RewardProcess, Verdict
from flowledger.run.reward_worker import LARGEST

RULES = ("task", "math_verify", "function")


class Scorer:
    """The rewards that `reward` asks for. Made early: its process imports while models load."""

    def __init__(self, settings: Reward, data: Data, *, seed: int) -> None:
        self.settings = settings
        self._models: dict[str, nn.Module] = {}
        self._kinds = {component.name: component.kind for component in settings.components}
        self._data_source = data.task or data.path or ""
        rules = [component for component in settings.components if component.kind in RULES]
        setup = {
            "components": [component.model_dump(include={"name", "kind", "path"}) for component in rules],
            "task": data.task,
            "task_options": data.task_options,
            "seed": seed,
        }
        self._process = RewardProcess(setup, timeout_s=settings.timeout_s) if rules else None

    def load_models(self, policy: Policy, *, seed: int) -> None:
        """Load reward models and wait for the process. Raises BadInput for a model or a function that cannot be had."""
        for component in self.settings.components:
            if component.kind not in RULES:
                level: Literal["sample", "token"] = "sample" if component.kind == "model" else "token"
                key = f"reward component {component.name!r}: path"
                self._models[component.name] = load_reward_model(
                    component.path or "", policy, level, seed=seed, key=key
                )
        if self._process:
            self._process.wait_ready()

    def close(self) -> None:
        """End the reward process."""
        if self._process:
            self._process.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score_responses(
        self,
        *,
        tokenizer: Tokenizer,
        problems: Sequence[Problem],
        step: int,
        full_sequence: Tensor,
        attention_mask: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        sample_id: Tensor,
    ) -> Rewards:
        """The rewards of B responses [B, S_resp], equally many to each of the problems, in their order."""
        group_size = len(response_ids) // max(len(problems), 1)  # a rank may have none
        lengths = attention_mask[:, -response_ids.shape[1] :].sum(-1).tolist()  # responses are padded on the right
        # Arrays: a tokenizer looks at every number of a list before it takes it for one of token ids.
        written = [ids[:length] for ids, length in zip(response_ids.cpu().numpy(), lengths, strict=True)]
        return self.score(
            problems=tuple(problem for problem in problems for _ in range(group_size)),
            responses=tokenizer.batch_decode(written, skip_special_tokens=True),
            response_ids=response_ids,
            response_mask=response_mask,
            full_sequence=full_sequence,
            attention_mask=attention_mask,
            sample_id=sample_id,
            step=step,
        )

    def score(
        self,
        *,
        problems: Sequence[Problem],
        responses: Sequence[str],
        response_ids: Tensor,
        response_mask: Tensor,
        full_sequence: Tensor,
        attention_mask: Tensor,
        sample_id: Tensor,
        step: int,
    ) -> Rewards:
        """The rewards of B samples; one problem and response each. Raises BadInput for NaN or infinity.

        A response includes what an environment wrote (in attention_mask, not in response_mask). A reward for a whole
        response lies on the last token that the policy sampled; a reward on a token that it did not sample is 0.
        """
        ids = sample_id.tolist()
        lengths = attention_mask[:, -response_ids.shape[1] :].sum(-1).tolist()
        masks = response_mask.tolist()
        jobs = [
            {
                "prompt": problem.text, "response": response, "answer": problem.answer, "index": problem.index,
                "extra": {"data_source": self._data_source, **problem.extra},
                "response_ids": tokens[:length], "response_mask": mask[:length], "sample_id": sample,
            }
            for problem, response, tokens, mask, length, sample
            in zip(problems, responses, response_ids.tolist(), masks, lengths, ids, strict=True)
        ]  # fmt: skip
        verdicts, on_host = self._ask(jobs), response_mask.cpu()
        parts: dict[str, Tensor] = {
            name: _placed([verdict.value for verdict in said], on_host) for name, said in verdicts.items()
        }
        for name, model in self._models.items():
            parts[name] = _by_model(model, self._kinds[name], full_sequence, attention_mask, response_mask).cpu()
        per_token = torch.stack([parts[component.name] for component in self.settings.components], 1)
        self._refuse_not_finite(per_token, ids, step)
        said, beyond = _first_failures(verdicts, len(jobs)), self._beyond_bounds(per_token)
        failures = [one or other for one, other in zip(said, beyond, strict=True)]
        return self._fuse(per_token, failures, response_mask.device)

    def _ask(self, jobs: Sequence[dict[str, Any]]) -> dict[str, list[Verdict]]:
        rules = [component.name for component in self.settings.components if component.kind in RULES]
        if self._process is None:
            return {}
        asked = self._process.ask([{**job, "component": name} for name in rules for job in jobs])
        return {name: asked[k * len(jobs) : (k + 1) * len(jobs)] for k, name in enumerate(rules)}

    def _refuse_not_finite(self, per_token: Tensor, ids: Sequence[int], step: int) -> None:
        for sample, component in (~per_token.isfinite().all(-1)).nonzero().tolist():
            values = per_token[sample, component]
            value = float(values[~values.isfinite()][0])
            name = self.settings.components[component].name
            raise BadInput(
                f"step {step}: reward component {name!r} gave {value} for sample {ids[sample]}; a reward must be finite"
            )

    def _beyond_bounds(self, per_token: Tensor) -> list[tuple[str, str] | None]:
        """Per sample the first component that is too large for advantages, alone or times its weight; per_token [B, N_reward, S_resp]."""
        weights = [component.weight for component in self.settings.components]
        sizes = per_token.double().abs().sum(-1)  # [B, N_reward]
        too_large = sizes * torch.tensor(weights).abs().clamp(min=1.0) > LARGEST
        found: list[tuple[str, str] | None] = [None] * len(per_token)
        for sample, k in reversed(too_large.nonzero().tolist()):  # so that the first component stays
            text = f"a reward of {sizes[sample, k]:.3g} and its weight {weights[k]:g}: alone and times its weight"
            name = self.settings.components[k].name
            found[sample] = ("reward_error", f"{name}: {text} it must lie within ±{LARGEST:g}")
        return found

    def _fuse(self, per_token: Tensor, failures: Sequence[tuple[str, str] | None], device: torch.device) -> Rewards:
        good = torch.tensor([failure is None for failure in failures], dtype=torch.bool)
        per_token = torch.where(good[:, None, None], per_token, torch.zeros_like(per_token))
        weights = torch.tensor([component.weight for component in self.settings.components])
        token_level = torch.einsum("bns,n->bs", per_token, weights)
        drop = self.settings.on_error == "drop"
        return Rewards(
            reward_components=per_token.sum(-1).to(device),
            reward=token_level.sum(-1).to(device),
            token_level_reward=token_level.to(device),
            component_names=tuple(component.name for component in self.settings.components),
            failed=tuple(failure[0] if failure and drop else None for failure in failures),
            errors=tuple(failure[1] if failure else None for failure in failures),
        )


def _placed(values: Sequence[float | list[float] | None], response_mask: Tensor) -> Tensor:
    """One component on the tokens of its samples [B, S_resp].

    A number lies on the last token that the policy sampled, or the first of a response without any; a list begins at
    the first token.
    """
    placed = torch.zeros(response_mask.shape)
    ends = (response_mask * torch.arange(response_mask.shape[1])).argmax(1).tolist()
    for row, mask, end, value in zip(placed, response_mask, ends, values, strict=True):
        if isinstance(value, list):
            row[: len(value)] = torch.tensor(value)
            row *= mask
        elif value is not None:
            row[end] = value
    return placed


def _by_model(
    model: nn.Module, kind: str, full_sequence: Tensor, attention_mask: Tensor, response_mask: Tensor
) -> Tensor:
    if kind == "token_model":
        return score_tokens(model, full_sequence, attention_mask, response_mask)
    return _placed(score_samples(model, full_sequence, attention_mask).tolist(), response_mask.cpu())


def _first_failures(verdicts: dict[str, list[Verdict]], count: int) -> list[tuple[str, str] | None]:
    """Per sample the first component that failed: (reward_error or reward_timeout, `component: what happened`)."""
    failures: list[tuple[str, str] | None] = [None] * count
    for name, said in verdicts.items():
        for k, verdict in enumerate(said):
            if verdict.failed and failures[k] is None:
                failures[k] = (verdict.failed, f"{name}: {verdict.error}")
    return failures
