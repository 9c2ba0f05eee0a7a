"""Which rank computes which segment, in which micro-batch: planned once, the same for everybody.

Ranks issue the same collectives only if all of them run the same number of micro-batches, so the
plan gives every rank equally many; one without segments is filled with a dummy by whoever runs
it. The order of segments, ranks and micro-batches changes no gradient (one global denominator),
only the time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class StepPlan:
    """One optimizer step. `micro_batches[rank][m]` lists segment numbers; it may be empty.

    denominator: the number of action tokens of the step over all ranks. budget: the tokens that a micro-batch was to have at most.
    """

    micro_batches: list[list[list[int]]]
    denominator: int
    budget: int

    @property
    def micro_batch_count(self) -> int:
        return len(self.micro_batches[0])

    def segments(self) -> list[int]:
        return [segment for rank in self.micro_batches for micro in rank for segment in micro]


@dataclass
class Plan:
    """The optimizer steps of one batch, in order."""

    steps: list[StepPlan] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        return json.dumps([vars(step) for step in self.steps]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Plan":
        return cls([StepPlan(**step) for step in json.loads(raw)])


def attention_costs(lengths: Sequence[int], hidden_size: int) -> list[float]:
    """What a segment costs, in tokens of a short one: L + L^2 / (12 hidden), matrix products plus causal attention of a decoder layer."""
    return [length * (1 + length / (12 * hidden_size)) for length in lengths]


def token_shares(aggregation: str, sequence: np.ndarray, longest: int) -> np.ndarray:
    """The weight of each token's loss in the loss of an optimizer step, float64 [M]: one denominator for all ranks.

    sequence: int [M], the rollout of each sampled token of the step. A sequence is a rollout, however it is cut into
    segments, so neither ranks nor packing nor segments change a share. longest: what seq-mean-token-sum-norm divides by.
    """
    _, index, counts = np.unique(sequence, return_inverse=True, return_counts=True)
    each = {"token-mean": 1 / len(sequence), "seq-mean-token-mean": 1 / counts[index] / len(counts),
            "seq-mean-token-sum": 1 / len(counts), "seq-mean-token-sum-norm": 1 / len(counts) / longest}[aggregation]
    return np.broadcast_to(each, len(sequence)).astype(np.float64)


def pack(lengths: Sequence[int], budget: int, bins: int = 1, costs: Sequence[float] | None = None) -> list[list[int]]:
    """Pack items into at least `bins` bins of at most `budget` tokens; returns item numbers, costliest bin first.

    First-fit-decreasing finds how many bins are needed; the items are then spread over that many
    bins by cost (None: tokens), where the budget allows it. An item longer than the budget has a bin of
    its own. The number of bins returned is a multiple of `bins`; some may be empty.
    """
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tight = _first_fit(order, lengths, budget)
    count = max(1, -(-len(tight) // bins)) * bins
    spread = _spread(order, lengths, costs, budget, count) or tight + [[] for _ in range(count - len(tight))]
    return sorted(spread, key=lambda items: (-sum(costs[i] for i in items), items))


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


def _spread(order: list[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    """Longest item to the bin of least cost that has room for it; None if none has."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load, cost = [0] * count, [0.0] * count
    for item in order:
        free = [b for b in range(count) if not bins[b] or load[b] + lengths[item] <= budget]
        if not free:
            return None
        slot = min(free, key=lambda b: (cost[b], b))
        bins[slot].append(item)
        load[slot] += lengths[item]
        cost[slot] += costs[item]
    return bins


def plan_step(segments: Sequence[int], lengths: Sequence[int], action_tokens: Sequence[int], world_size: int, budget: int,
              costs: Sequence[float] | None = None) -> StepPlan:
    """Plan one optimizer step over the given segment numbers; `lengths`, `action_tokens` and `costs` are indexed by segment.

    The bins are dealt in rounds of similar load, so that ranks wait little for each other, and
    every second round runs backwards, so that their totals stay close. Raises ValueError if no
    segment has an action token: there would be nothing to divide by.
    """
    denominator = int(sum(action_tokens[s] for s in segments))
    if denominator < 1:
        raise ValueError(f"an optimizer step of {len(segments)} segments without an action token")
    bins = pack([lengths[s] for s in segments], budget, world_size, costs and [costs[s] for s in segments])
    micro_batches: list[list[list[int]]] = [[] for _ in range(world_size)]
    for at in range(0, len(bins), world_size):
        ranks = range(world_size) if (at // world_size) % 2 == 0 else reversed(range(world_size))
        for rank, items in zip(ranks, bins[at:at + world_size], strict=True):
            micro_batches[rank].append(sorted(segments[i] for i in items))
    return StepPlan(micro_batches, denominator, budget)


def plan_batch(segment_group: Sequence[int], lengths: Sequence[int], action_tokens: Sequence[int], world_size: int, budget: int,
               groups_per_step: int = 0, costs: Sequence[float] | None = None) -> Plan:
    """Plan a batch: optimizer steps of `groups_per_step` groups each (0: all in one), in the order of the groups.

    segment_group: the group number of each segment. The last step may have fewer groups.
    """
    if budget < 1:
        raise ValueError(f"train.max_tokens_per_gpu: expected at least 1, got {budget}")
    groups = sorted(set(int(g) for g in segment_group))
    size = groups_per_step or len(groups)
    plan = Plan()
    for at in range(0, len(groups), size):
        chosen = set(groups[at:at + size])
        segments = [s for s, g in enumerate(segment_group) if int(g) in chosen]
        plan.steps.append(plan_step(segments, lengths, action_tokens, world_size, budget, costs))
    return plan
