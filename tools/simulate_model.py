"""What a simulated run does, as functions of its arguments and seed: lengths, faults, deaths, and the loop it is compared with."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

CUT = 1e-3
"""Share of the rollouts that are cut, all of them `tail` x the median long."""


def opt(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Load:
    """What is simulated; all seconds are real ones."""

    workers: int = opt(64, "rollout workers, each with one engine")
    slots: int = opt(4, "rollouts that an engine generates at a time")
    prefetch: int = opt(0, "leases that a worker asks for beyond its slots")
    steps: int = opt(20, "optimizer steps")
    batch_size: int = opt(512, "prompt groups of a step")
    samples: int = opt(8, "rollouts of a group")
    max_lag: int = opt(2, "batches that may be admitted ahead of the trainer")
    mean_seconds: float = opt(0.3, "mean seconds of a rollout")
    tail: float = opt(20.0, "longest rollout over the median; 1 is no spread")
    step_seconds: float = opt(2.0, "seconds of a training step")
    update_seconds: float = opt(0.05, "seconds of a weight transfer")
    fault_rate: float = opt(0.001, "share of the leases that end in an infrastructure fault")
    deaths: int = opt(0, "workers that lose their connection and start anew")
    payload_bytes: int = opt(512, "bytes of a rollout of mean length")
    heartbeat_seconds: float = opt(2.0, "seconds between two heartbeats of a worker")
    processes: int = opt(2, "processes that the workers live in")
    seed: int = opt(0, "of everything that is drawn")


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
