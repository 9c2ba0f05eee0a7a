"""What one trained batch tells: metrics from the reduced token sums and from the batch itself.

Names and meanings (means over sampled tokens unless said otherwise):

    clip_fraction                      tokens whose loss the ratio's clip range changed
    correction_fraction                tokens whose importance weight was masked, clipped or truncated
    ratio_mean, ratio_std, ratio_max   current policy over the one at the start of the step
    entropy_mean                       of the policy's next-token distribution at its temperature
    logprob_gap_mean, logprob_gap_max  |trainer - engine| over tokens sampled from the version trained from;
                                       absent if the batch has no such token
    logprob_gap_all_mean               the same over all tokens, whatever their version
    staleness_mean, staleness_max      version trained from minus version that sampled the token
    reward_mean, score_mean            over rollouts, unclipped
    pass_rate                          share of rollouts with a score above 0.5
    advantage_std                      over rollouts
    frac_groups_zero_std               groups whose clipped rewards are all equal: they teach nothing
    response_length_mean, turns_mean, truncated_fraction   over rollouts; lengths in sampled tokens
    sampled_tokens, tokens             sums over the batch
    info_<name>                        what the agent reported, over the rollouts that did
    reward_mean/<source>, pass_rate/<source>   over the rollouts of prompts of that source, if the batch has more than one
"""

from __future__ import annotations

import math

import numpy as np

from molt_hpc.data.shards import Batch


def token_metrics(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """From the sums and maxima of all ranks (TokenSums). A tensor-parallel group counts its tokens once a rank: ratios only."""
    tokens = sums["tokens"]
    mean = sums["ratio"] / tokens
    found = {"clip_fraction": sums["clipped"] / tokens, "correction_fraction": sums["corrected"] / tokens,
             "ratio_mean": mean, "ratio_std": math.sqrt(max(0.0, sums["ratio_squared"] / tokens - mean * mean)),
             "ratio_max": maxima["ratio"], "entropy_mean": sums["entropy"] / tokens,
             "logprob_gap_all_mean": sums["gap_all"] / sums["gap_all_tokens"]}
    if sums["gap_tokens"]:
        found |= {"logprob_gap_mean": sums["gap"] / sums["gap_tokens"], "logprob_gap_max": maxima["gap"]}
    return found


def batch_metrics(batch: Batch, advantages: np.ndarray, clip_range: tuple[float, float]) -> dict[str, float]:
    """advantages: float64 [R]."""
    sampled = batch.action_mask.astype(bool)
    staleness = batch.version - batch.versions[sampled].astype(np.float64)
    rollout_of_token = np.repeat(batch.segment_rollout, batch.segment_lengths)
    response = np.bincount(rollout_of_token[sampled], minlength=len(batch.rollout_reward))
    rewards = np.clip(batch.rollout_reward.astype(np.float64), *clip_range)
    flat = [np.ptp(rewards[batch.rollout_group == group]) == 0 for group in np.unique(batch.rollout_group)]
    found = {"staleness_mean": staleness.mean(), "staleness_max": staleness.max(),
             "reward_mean": batch.rollout_reward.mean(dtype=np.float64),
             "score_mean": batch.rollout_score.mean(dtype=np.float64), "pass_rate": (batch.rollout_score > 0.5).mean(),
             "advantage_std": advantages.std(), "frac_groups_zero_std": np.mean(flat), "response_length_mean": response.mean(),
             "turns_mean": np.mean([r["turns"] for r in batch.rollouts]),
             "truncated_fraction": np.mean([r["truncated"] for r in batch.rollouts]),
             "sampled_tokens": int(sampled.sum()), "tokens": len(batch.token_ids)}
    reported = {name for r in batch.rollouts for name in r["info"]}
    found |= {f"info_{name}": np.mean([r["info"][name] for r in batch.rollouts if name in r["info"]]) for name in sorted(reported)}
    found |= _source_metrics(batch)
    return {name: value if isinstance(value, int) else float(value) for name, value in found.items()}


def _source_metrics(batch: Batch) -> dict[str, float]:
    """Means by the prompts' sources; empty if there is one source only."""
    source_of_rollout = np.array([r["prompt"]["source"] for r in batch.rollouts])
    sources = np.unique(source_of_rollout)
    found: dict[str, float] = {}
    for source in sources if len(sources) > 1 else ():
        own = source_of_rollout == source
        found[f"reward_mean/{source}"] = batch.rollout_reward[own].mean(dtype=np.float64)
        found[f"pass_rate/{source}"] = (batch.rollout_score[own] > 0.5).mean()
    return found
