"""Which rank computes which segment, in which micro-batch: planned once, the same for everybody.

Ranks issue the same collectives only if all of them run the same number of micro-batches, so the
plan gives every rank equally many; one without segments is filled with a dummy by whoever runs
it. The order of segments, ranks and micro-batches changes no gradient (one global denominator),
only the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class StepPlan:
    """One optimizer step. `micro_batches[rank][m]` lists segment numbers; it may be empty.

    denominator: the number of action tokens of the step over all ranks; the loss divides by it.
    """

    micro_batches: list[list[list[int]]]
    denominator: int

    @property
    def micro_batch_count(self) -> int:
        return len(self.micro_batches[0])


@dataclass
class Plan:
    """The optimizer steps of one batch, in order."""

    world_size: int
    steps: list[StepPlan] = field(default_factory=list)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """cells int32 [n, 4]: rows (step, rank, micro-batch, segment); counts int32 [steps]; denominators int64 [steps]."""
        cells = [(s, r, m, segment) for s, step in enumerate(self.steps) for r, rank in enumerate(step.micro_batches)
                 for m, micro in enumerate(rank) for segment in micro]
        return {"cells": np.array(cells, np.int32).reshape(-1, 4),
                "counts": np.array([step.micro_batch_count for step in self.steps], np.int32),
                "denominators": np.array([step.denominator for step in self.steps], np.int64)}

    @classmethod
    def from_arrays(cls, world_size: int, arrays: dict[str, np.ndarray]) -> Plan:
        steps = [StepPlan([[[] for _ in range(count)] for _ in range(world_size)], int(denominator))
                 for count, denominator in zip(arrays["counts"], arrays["denominators"], strict=True)]
        for step, rank, micro, segment in arrays["cells"].tolist():
            steps[step].micro_batches[rank][micro].append(segment)
        return cls(world_size, steps)


def pack(lengths: Sequence[int], budget: int, bins: int = 1) -> list[list[int]]:
    """Pack items into at least `bins` bins of at most `budget` tokens; returns item numbers, fullest bin first.

    First-fit-decreasing finds how many bins are needed; the items are then spread over that many
    bins by load, where the budget allows it. An item longer than the budget has a bin of its own.
    The number of bins returned is a multiple of `bins`; some may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tight = _first_fit(order, lengths, budget)
    count = max(1, -(-len(tight) // bins)) * bins
    spread = _spread(order, lengths, budget, count) or tight + [[] for _ in range(count - len(tight))]
    return sorted(spread, key=lambda items: (-sum(lengths[i] for i in items), items))


def _first_fit(order: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for item in order:
        slot = next((b for b, free in enumerate(room) if free >= lengths[item]), None)
        if slot is None:
            bins.append([item])
            room.append(budget - lengths[item])
        else:
            bins[slot].append(item)
            room[slot] -= lengths[item]
    return bins


def _spread(order: list[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Longest item to the least loaded bin; None if that would exceed the budget somewhere."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for item in order:
        slot = min(range(count), key=lambda b: (load[b], b))
        if bins[slot] and load[slot] + lengths[item] > budget:
            return None
        bins[slot].append(item)
        load[slot] += lengths[item]
    return bins


def plan_step(segments: Sequence[int], lengths: Sequence[int], action_tokens: Sequence[int], world_size: int, budget: int) -> StepPlan:
    """Plan one optimizer step over the given segment numbers; `lengths` and `action_tokens` are indexed by segment.

    The bins are dealt in rounds of similar load, so that ranks wait little for each other, and
    every second round runs backwards, so that their totals stay close. Raises ValueError if no
    segment has an action token: there would be nothing to divide by.
    """
    denominator = int(sum(action_tokens[s] for s in segments))
    if denominator < 1:
        raise ValueError(f"an optimizer step of {len(segments)} segments without an action token")
    bins = pack([lengths[s] for s in segments], budget, world_size)
    micro_batches: list[list[list[int]]] = [[] for _ in range(world_size)]
    for at in range(0, len(bins), world_size):
        ranks = range(world_size) if (at // world_size) % 2 == 0 else reversed(range(world_size))
        for rank, items in zip(ranks, bins[at:at + world_size], strict=True):
            micro_batches[rank].append(sorted(segments[i] for i in items))
    return StepPlan(micro_batches, denominator)


def plan_batch(segment_group: Sequence[int], lengths: Sequence[int], action_tokens: Sequence[int], world_size: int, budget: int,
               groups_per_step: int = 0) -> Plan:
    """Plan a batch: optimizer steps of `groups_per_step` groups each (0: all in one), in the order of the groups.

    segment_group: the group number of each segment. The last step may have fewer groups.
    """
    if budget < 1:
        raise ValueError(f"train.max_tokens_per_gpu: expected at least 1, got {budget}")
    groups = sorted(set(int(g) for g in segment_group))
    size = groups_per_step or len(groups)
    plan = Plan(world_size)
    for at in range(0, len(groups), size):
        chosen = set(groups[at:at + size])
        segments = [s for s, g in enumerate(segment_group) if int(g) in chosen]
        plan.steps.append(plan_step(segments, lengths, action_tokens, world_size, budget))
    return plan
