"""Groups: the responses to one prompt, as a matrix with one row a prompt, and statistics over its rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Sample indices by group. Where a group has fewer than G samples, or one was dropped, `present` is false."""

    members: Tensor  # int64 [B_prompt, G]
    present: Tensor  # bool [B_prompt, G]
    sizes: Tensor  # int64 [B_prompt]: how many samples each group has, dropped ones too


def groups_of(*, group_id: Tensor, kept: Tensor) -> Groups:
    """Groups of the samples with equal `group_id` [B]; `kept` bool [B]: the others are in no statistics."""
    order = torch.argsort(group_id, stable=True)
    _, counts = torch.unique_consecutive(group_id[order], return_counts=True)
    columns = torch.arange(int(counts.max()), device=group_id.device)
    inside = columns < counts[:, None]  # [B_prompt, G]
    members = torch.zeros_like(inside, dtype=torch.int64).masked_scatter(inside, order)
    return Groups(members=members, present=inside & kept[members], sizes=counts)


def by_group(*, reward: Tensor, groups: Groups) -> Tensor:
    """[B_prompt*G] -> [B_prompt, G]: the responses to one prompt stand in one row."""
    return reward[groups.members]


def by_size(groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """For each number n of samples that groups have: n >= 1, and the places of those groups' samples, bool [B_prompt, G].

    Row after row they are the groups of n samples: a tensor of G columns at these places is a view [N, n].
    """
    counts = groups.present.sum(1)
    for n in sorted(set(counts.tolist()) - {0}):
        yield n, groups.present & (counts == n)[:, None]


def each_group(groups: Groups, statistic: Callable[..., Tensor], *grouped: Tensor) -> Tensor:
    """A number for each sample [B_prompt*G] from the others of its group; 0 for a sample that is in none.

    `statistic` takes the rows [N, n] of all groups of n samples from each of `grouped` [B_prompt, G] and returns [N, n]
    or [N, 1]. Groups of one size go together, so no sum ever runs over a place that is empty.
    """
    made = torch.zeros_like(grouped[0])
    for n, inside in by_size(groups):
        made[inside] = statistic(*(values[inside].view(-1, n) for values in grouped)).expand(-1, n).reshape(-1)
    result = made.new_zeros(int(groups.sizes.sum()))
    where = groups.present
    result[groups.members[where]] = made[where]
    return result
