"""How rewards become advantages: pure functions in a registry, one value for each sampled token.

A rollout is one chain of sampled tokens and has one reward, however many segments it was split into and whatever
stands between them: tool output and context are transparent, and splitting changes nothing. All is float64 numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb

import numpy as np

from molt_hpc.train.registry import Registry

EPSILON = 1e-9
"""Added to the standard deviation of a group, as labs-molt does."""
VARIANCE_FLOOR = 1e-8
"""Smallest variance that whitening divides by the root of."""


@dataclass
class Episodes:
    """What an estimator may use: R rollouts with M sampled tokens.

    rewards: float64 [R], clipped. groups: int [R]. rollout: int [M], the rollout of each sampled token; a rollout's
    tokens stand in the order in which they were sampled. positions: int [M], each token's place in its segment.
    kl: float64 [M], estimate of the divergence from the reference at each token. values: float64 [M], the critic's.
    parts: name -> float64 [R], rewards by their parts. turns: float64 [M], the rewards of turns on their last tokens.
    """

    rewards: np.ndarray
    groups: np.ndarray
    rollout: np.ndarray
    positions: np.ndarray | None = None
    kl: np.ndarray | None = None
    values: np.ndarray | None = None
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    part_weights: tuple[float, ...] = ()
    kl_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    pass_k: int = 2
    turns: np.ndarray | None = None

    def by_group(self, values: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """`rule` maps the values [n] of each group to n values; returns [R]."""
        found = np.zeros(len(values))
        for group in np.unique(self.groups):
            rows = np.flatnonzero(self.groups == group)
            found[rows] = rule(values[rows])
        return found

    def token_rewards(self) -> np.ndarray:
        """[M]: rewards of turns where they were earned, what remains of the reward on the last token of each rollout, less the
        divergence's price on every token."""
        found = np.zeros(len(self.rollout)) if self.kl is None else -self.kl_coef * self.kl
        last = len(self.rollout) - 1 - np.unique(self.rollout[::-1], return_index=True)[1]
        found[last] += self.rewards[self.rollout[last]]
        if self.turns is not None:
            found += self.turns
            found[last] -= np.bincount(self.rollout, self.turns, len(self.rewards))[self.rollout[last]]
        return found

    def discounted(self, values: np.ndarray, factor: float, positions: np.ndarray | None = None) -> np.ndarray:
        """sum_k factor^(distance from t to k) values[k] over k >= t of the same rollout, [M].

        positions: where each token stands, so that what lies between counts; None: only sampled tokens do. By doubling:
        after pass j every place holds the sum over its next 2^j tokens, so L tokens need log2(L) passes.
        """
        order = np.argsort(self.rollout, kind="stable")
        owner, sums = self.rollout[order], values[order].astype(np.float64)
        steps = np.ones(len(order), np.int64) if positions is None else np.maximum(1, np.diff(positions[order], prepend=0))
        time, reach, longest = np.cumsum(steps), 1, np.bincount(owner).max(initial=0)
        while reach < longest:
            same = owner[:-reach] == owner[reach:]
            sums[:-reach] += np.where(same, factor**(time[reach:] - time[:-reach]) * sums[reach:], 0.0)
            reach *= 2
        found = np.empty_like(sums)
        found[order] = sums
        return found

    def next_values(self) -> np.ndarray:
        """The critic's value of the following token of the same rollout, 0 after its last one."""
        order = np.argsort(self.rollout, kind="stable")
        owner, found = self.rollout[order], np.zeros(len(order))
        found[order[:-1]] = np.where(owner[:-1] == owner[1:], self.values[order[1:]], 0.0)
        return found


ESTIMATORS = Registry("algo.advantage.estimator")
"""name -> function of Episodes: advantages [M], or the pair (advantages [M], returns [M])."""
register = ESTIMATORS.register


def whitened(values: np.ndarray) -> np.ndarray:
    """Centred, over the square root of the population variance."""
    return (values - values.mean()) / np.sqrt(max(values.var(), VARIANCE_FLOOR)) if len(values) else values


def normalised(rewards: np.ndarray) -> np.ndarray:
    """(reward - mean) / (unbiased standard deviation + 1e-9) of one group; 0 where all are equal or there is one only."""
    # equal rewards are told by themselves: the rounding of their mean would be blown up by 1 / epsilon
    if np.ptp(rewards) == 0:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def centred(rewards: np.ndarray) -> np.ndarray:
    """reward - mean of the group, without its standard deviation."""
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """reward - mean of the others; a group of one keeps its reward."""
    count = len(rewards)
    return rewards if count == 1 else rewards - (rewards.sum() - rewards) / (count - 1)


def mean_normalised(rewards: np.ndarray) -> np.ndarray:
    """(reward - mean) / mean: with rewards 0 and 1 the gradient of the log of the success rate; 0 where the mean is 0."""
    mean = rewards.mean()
    return np.zeros(len(rewards)) if mean == 0 or np.ptp(rewards) == 0 else (rewards - mean) / abs(mean)


def best_of(rewards: np.ndarray, k: int) -> np.ndarray:
    """What a rollout adds to the best reward of k of its group, over the standard deviation of that best reward.

    E[best of k | the rollout is one of them] - E[best of k], over all subsets of size k (at most the group's size);
    with rewards 0 and 1 the analytic advantage of "Pass@k Training" (arXiv 2508.10751).
    """
    count, k = len(rewards), min(k, len(rewards))
    if np.ptp(rewards) == 0:
        return np.zeros(count)
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order]
    share = np.array([comb(j, k - 1) for j in range(count)]) / comb(count, k)
    mean = share @ ranked
    deviation = np.sqrt(max(share @ ranked**2 - mean * mean, 0.0))
    own = np.array([comb(j, k - 1) for j in range(count)]) / comb(count - 1, k - 1)
    others = np.array([comb(j - 1, k - 2) if k >= 2 and j else 0 for j in range(count)]) / comb(count - 1, k - 1)
    above = np.r_[np.cumsum((others * ranked)[::-1])[::-1][1:], 0.0]
    found = np.zeros(count)
    found[order] = own * ranked + above - mean
    return found / (deviation + EPSILON)


def by_group_rule(name: str, rule: Callable[[np.ndarray], np.ndarray]) -> None:
    """Register an estimator that gives every token of a rollout what `rule` makes of its group's rewards."""
    @register(name)
    def estimate(episodes: Episodes) -> np.ndarray:
        return episodes.by_group(episodes.rewards, rule)[episodes.rollout]


by_group_rule("grpo", normalised)
by_group_rule("dr_grpo", centred)
by_group_rule("rloo", leave_one_out)
by_group_rule("max_rl", mean_normalised)


@register("reinforce")
def reinforce(episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """REINFORCE++: discounted return of every token, whitened over the batch; tool output counts as time."""
    returns = episodes.discounted(episodes.token_rewards(), episodes.gamma, episodes.positions)
    return whitened(returns) if episodes.whiten else returns, returns


@register("reinforce_baseline")
def reinforce_baseline(episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """reward - mean of the group, whitened over the batch's tokens."""
    found = episodes.by_group(episodes.rewards, centred)[episodes.rollout]
    return whitened(found) if episodes.whiten else found, found


@register("gae")
def gae(episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation along each rollout; returns are advantage + value, before the whitening."""
    delta = episodes.token_rewards() + episodes.gamma * episodes.next_values() - episodes.values
    advantages = episodes.discounted(delta, episodes.gamma * episodes.lam)
    return whitened(advantages) if episodes.whiten else advantages, advantages + episodes.values


@register("on_policy_distill")
def on_policy_distill(episodes: Episodes) -> np.ndarray:
    """-coefficient x divergence from the teacher, token by token; the rewards play no part."""
    return -episodes.kl_coef * episodes.kl


@register("pass_at_k")
def pass_at_k(episodes: Episodes) -> np.ndarray:
    return episodes.by_group(episodes.rewards, lambda r: best_of(r, episodes.pass_k))[episodes.rollout]


@register("gdpo")
def gdpo(episodes: Episodes) -> np.ndarray:
    """Each part of the reward normalised in its group by itself, their weighted sum whitened over the rollouts (arXiv 2601.05242)."""
    weights = episodes.part_weights or (1.0,) * len(episodes.parts)
    total = sum(w * episodes.by_group(part, normalised) for w, part in zip(weights, episodes.parts.values(), strict=True))
    return whitened(total)[episodes.rollout]


def compute(estimator: str, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns), float64 [M] each. ValueError for an unknown estimator, a reward or a result that is not finite."""
    for name, values in {"reward": episodes.rewards, **episodes.parts}.items():
        if not np.isfinite(values).all():
            raise ValueError(f"rollouts {np.flatnonzero(~np.isfinite(values)).tolist()}: the {name} is not finite")
    found = ESTIMATORS[estimator](episodes)
    advantages, returns = found if isinstance(found, tuple) else (found, found)
    if not (np.isfinite(advantages).all() and np.isfinite(returns).all()):
        raise ValueError(f"algo.advantage.estimator {estimator}: an advantage is not finite")
    return advantages, returns
