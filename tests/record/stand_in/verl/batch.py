"""Batches: a DataProto of two prompts (left-padded to 3) with two responses each (right-padded to 4)."""

from types import SimpleNamespace

import numpy
import torch

LENGTHS = [4, 2, 3, 4]  # of the responses


def prompts(step):
    names = numpy.array([f"{step}-a", f"{step}-a", f"{step}-b", f"{step}-b"], dtype=object)
    return SimpleNamespace(batch=None, non_tensor_batch={"uid": names}, meta_info={"global_steps": step})


def union(one, other):
    """verl puts what was made beside what was asked."""
    return SimpleNamespace(batch=other.batch, non_tensor_batch=one.non_tensor_batch | other.non_tensor_batch)


def rollout(step):
    torch.manual_seed(step)
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).long()
    prompts = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9], [7, 8, 9]])
    responses = torch.randint(1, 50, (4, 4)) * mask
    scores = torch.zeros(4, 4)
    scores[range(4), [length - 1 for length in LENGTHS]] = torch.tensor([1.0, 0.0, 0.5, 0.25])
    attention = torch.cat([(prompts > 0).long(), mask], 1)
    tensors = {
        "prompts": prompts, "responses": responses, "response_mask": mask, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": torch.rand(4, 4), "rm_scores": scores,
    }  # fmt: skip
    versions = numpy.array([step - 1] * 4, dtype=object)
    return SimpleNamespace(batch=tensors, non_tensor_batch={"min_global_steps": versions})


def sampled(step):
    return union(prompts(step), rollout(step))


def jagged(tensor, lengths):
    return torch.nested.nested_tensor(
        [row[:length] for row, length in zip(tensor, lengths, strict=True)], layout=torch.jagged
    )


def for_workers(proto):
    """As V0 sends it: ids without padding, all else padded; names beside the tensors."""
    proto.batch |= dict.fromkeys(("old_log_probs", "advantages", "returns"), torch.rand(4, 4))
    whole = [int(row.sum()) for row in proto.batch["attention_mask"]]
    packed = [
        row[mask.bool()] for row, mask in zip(proto.batch["input_ids"], proto.batch["attention_mask"], strict=True)
    ]
    data = dict(proto.batch, uid=list(proto.non_tensor_batch["uid"]), loss_mask=proto.batch["response_mask"])
    data["input_ids"] = torch.nested.nested_tensor(packed, layout=torch.jagged)
    data["position_ids"] = torch.nested.nested_tensor([torch.arange(n) for n in whole], layout=torch.jagged)
    return data


def without_padding(proto):
    """As V1 keeps it: nothing is padded, and each sample has a session."""
    data, prompts = for_workers(proto), [2, 2, 3, 3]
    of_responses = (
        "responses",
        "response_mask",
        "loss_mask",
        "rollout_log_probs",
        "old_log_probs",
        "advantages",
        "returns",
    )
    data |= {name: jagged(data[name], LENGTHS) for name in of_responses}
    data["prompts"] = jagged(data["prompts"].flip(1), prompts)  # from the right, where they end
    data["session_id"] = [0, 1, 0, 1]
    del data["attention_mask"], data["rm_scores"]
    return data


def part(data, start, stop):
    """Some rows of what a worker has."""

    def rows(value):
        if isinstance(value, list):
            return value[start:stop]
        return (
            torch.nested.nested_tensor(list(value.unbind())[start:stop], layout=torch.jagged)
            if value.is_nested
            else value[start:stop]
        )

    return {name: rows(value) for name, value in data.items()}
