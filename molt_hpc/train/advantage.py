"""How rewards become advantages: pure functions in a registry, one value for each rollout.

A rollout has one reward however many segments it was split into, so that splitting never changes
the baseline; its value goes to all of its action tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {}
"""name -> function (rewards float64 [R], group of each rollout int [R]) -> advantages float64 [R]."""

EPSILON = 1e-9
"""Added to the standard deviation; groups whose rewards are all equal get exactly 0."""


def register(name: str) -> Callable[[Estimator], Estimator]:
    def add(function: Estimator) -> Estimator:
        assert name not in ESTIMATORS, name
        ESTIMATORS[name] = function
        return function
    return add


@register("grpo")
def grpo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(reward - mean) / (unbiased standard deviation + 1e-9) over the rollouts of a group; a group of one gets 0."""
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        # equal rewards are told by themselves: the rounding of their mean would be blown up by 1 / epsilon
        if np.ptp(rewards[rows]) > 0:
            centred = rewards[rows] - rewards[rows].mean()
            advantages[rows] = centred / (rewards[rows].std(ddof=1) + EPSILON)
    return advantages


def compute(estimator: str, rewards: np.ndarray, groups: np.ndarray, clip_range: tuple[float, float]) -> np.ndarray:
    """Clip rewards [R] to `clip_range` and estimate in float64; returns float64 [R].

    Raises ValueError for an unknown estimator or a reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"algo.advantage.estimator: expected one of {sorted(ESTIMATORS)}, got {estimator!r}")
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rollouts {np.flatnonzero(~np.isfinite(rewards)).tolist()}: the reward is not finite")
    return ESTIMATORS[estimator](np.clip(rewards, *clip_range), np.asarray(groups))
