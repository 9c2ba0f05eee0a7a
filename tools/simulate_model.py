"""What a simulated run does, as functions of its arguments and seed: lengths, faults, deaths, and the loop it is compared with."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CUT = 1e-3
"""Share of the rollouts that are cut, all of them `tail` x the median long."""


@dataclass(frozen=True)
class Load:
    """What is simulated. Seconds are real seconds; bytes are of a rollout of mean length."""

    workers: int
    slots: int
    prefetch: int
    steps: int
    batch_size: int
    samples: int
    max_lag: int
    mean_seconds: float
    tail: float
    step_seconds: float
    update_seconds: float
    fault_rate: float
    deaths: int
    payload_bytes: int
    heartbeat_seconds: float
    processes: int
    seed: int


def lengths(load: Load) -> np.ndarray:
    """Seconds of generation of each rollout, float64 [prompts, samples]: log-normal, cut at tail x the median."""
    normal = NormalDist()
    sigma = math.log(load.tail) / normal.inv_cdf(1 - CUT)
    below = normal.cdf(math.log(load.tail) / sigma - sigma) if sigma else 1.0
    mean_over_median = math.exp(sigma * sigma / 2) * below + load.tail * CUT * (sigma > 0)
    drawn = np.random.default_rng([load.seed, 0]).lognormal(0.0, sigma, (load.steps * load.batch_size, load.samples))
    return np.minimum(drawn, load.tail) * load.mean_seconds / mean_over_median


def luck(load: Load) -> np.ndarray:
    """Uniform [prompts, samples]; attempt k of a rollout ends in a fault if it is below fault_rate ** k."""
    return np.random.default_rng([load.seed, 1]).random((load.steps * load.batch_size, load.samples))


def deaths(load: Load) -> dict[int, list[int]]:
    """Step after which they die -> numbers of the workers that lose their connection and all that they run."""
    random, found = np.random.default_rng([load.seed, 2]), {}
    for _ in range(load.deaths if load.steps > 1 else 0):
        found.setdefault(int(random.integers(1, load.steps)), []).append(int(random.integers(load.workers)))
    return found


def batch_synchronous(load: Load) -> dict[str, float]:
    """Step time and utilisation of the same fleet if each batch is dealt, awaited to its last rollout, then trained on."""
    slots, total, makespans = load.workers * load.slots, 0.0, 0.0
    for batch in lengths(load).reshape(load.steps, -1):
        free = [0.0] * slots
        for seconds in batch.tolist():
            heapq.heapreplace(free, free[0] + seconds)
        makespans += max(free)
        total += float(batch.sum())
    wall = makespans + load.steps * (load.step_seconds + load.update_seconds)
    return {"batch_synchronous_step_seconds": wall / load.steps, "batch_synchronous_utilisation": total / (slots * wall)}
