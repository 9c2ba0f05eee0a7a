"""What one trained batch tells: metrics from the reduced token sums and from the batch itself.

Names and meanings (means over sampled tokens unless said otherwise):

    clip_fraction                      tokens whose loss the ratio's clip range changed
    correction_fraction                tokens whose importance weight was masked, clipped or truncated
    masked_fraction                    tokens that the importance correction left without weight
    effective_sample_size              (sum w)^2 / (n sum w^2) of the importance weights: 1 if all are equal
    trained_fraction                   tokens with an advantage and a weight, not clipped: 0 is a step that trains nothing
    ratio_mean, ratio_std, ratio_max   current policy over the one at the start of the step
    policy_kl, rollout_kl              mean of old - current and of engine - old log-probs
    rollout_ratio_age_0 .. _3          mean of old over engine's probability, by the age of the version that sampled; 3 is 3 and more
    kl_mean, kl_coef                   divergence from the reference by algo.kl.estimator, and its coefficient in this step
    entropy_mean                       of the policy's next-token distribution at its temperature
    logprob_gap_mean, logprob_gap_max  |trainer - engine| over tokens sampled from the version trained from;
                                       absent if the batch has no such token
    logprob_gap_all_mean               the same over all tokens, whatever their version
    staleness_mean, staleness_max      version trained from minus version that sampled the token
    reward_mean, score_mean            over rollouts, unclipped
    pass_rate                          share of rollouts with a score above 0.5
    advantage_mean, advantage_std      over tokens
    frac_groups_zero_std               groups whose clipped rewards are all equal: to the group estimators they teach nothing
    response_length_mean, turns_mean, truncated_fraction   over rollouts; lengths in sampled tokens
    sampled_tokens, tokens             sums over the batch
    info_<name>                        what the agent reported, over the rollouts that did
    reward_mean/<source>, pass_rate/<source>   over the rollouts of prompts of that source, if the batch has more than one
    critic_loss, critic_grad_norm, critic_clip_fraction, critic_learning_rate, value_mean, return_mean   gae only
    batch_skipped                      1 for a batch whose loss or gradient was not finite: it has no token metrics
"""

import math

import numpy as np
import torch

from molt_hpc.data.shards import Batch
from molt_hpc.train.loss import TokenLoss, masked_log_ratio
from molt_hpc.train.micro import MicroBatch

AGES = 4
SUMS = ("tokens", "clipped", "corrected", "masked", "trained", "weight", "weight_squared", "ratio", "ratio_squared", "entropy", "policy_kl",
        "rollout_kl", "kl", "gap", "gap_tokens", "gap_all", "gap_all_tokens",
        *(f"age_{a}{part}" for a in range(AGES) for part in ("", "_ratio")))


class TokenSums:
    """Running sums and maxima over the sampled tokens that this rank has computed; every rank has the same keys."""

    def __init__(self):
        self.sums: dict[str, float | torch.Tensor] = dict.fromkeys(SUMS, 0.0)
        self.maxima: dict[str, float | torch.Tensor] = {"ratio": 0.0, "gap": 0.0}

    def add_loss(self, micro: MicroBatch, result: TokenLoss, entropy: torch.Tensor, kl: torch.Tensor | None) -> None:
        """What one micro-batch of one update adds. Nothing is read back from the device."""
        mask = micro.mask
        weight, ratio = (torch.where(mask, v, 0.0).double() for v in (result.weight, result.ratio))
        trained = mask & (micro["advantages"] != 0) & (result.weight != 0) & ~result.clipped
        self._add(tokens=mask, clipped=result.clipped, corrected=result.corrected, masked=mask & (result.weight == 0), trained=trained,
                  weight=weight, weight_squared=weight.square(), ratio=ratio, ratio_squared=ratio.square(),
                  entropy=torch.where(mask, entropy.detach(), 0.0), policy_kl=torch.where(mask, -ratio.clamp(min=1e-13).log(), 0.0))
        if kl is not None:
            self._add(kl=torch.where(mask, kl.detach(), 0.0))
        self._largest("ratio", ratio)

    def add_gap(self, micro: MicroBatch, old: torch.Tensor, version: int) -> None:
        """Trainer's log-prob against the engine's: of all tokens, by age, and of those sampled from the version trained from."""
        difference = masked_log_ratio(old, micro["rollout"], micro.mask).double()
        age = (version - micro["versions"]).clamp(max=AGES - 1)
        for a in range(AGES):
            mine = micro.mask & (age == a)
            self._add(**{f"age_{a}": mine, f"age_{a}_ratio": torch.where(mine, difference.exp(), 0.0)})
        gap = torch.where(micro.mask, (old - micro["rollout"]).abs().double(), 0.0)
        current = torch.where(micro.mask & (age == 0), gap, 0.0)
        self._add(rollout_kl=-difference, gap=current, gap_tokens=micro.mask & (age == 0), gap_all=gap, gap_all_tokens=micro.mask)
        self._largest("gap", current)

    def _add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value.double().sum()

    def _largest(self, name: str, values: torch.Tensor) -> None:
        self.maxima[name] = torch.as_tensor(self.maxima[name], device=values.device, dtype=torch.float64).maximum(values.max().double())

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, maxima) as numbers."""
        return {k: float(v) for k, v in self.sums.items()}, {k: float(v) for k, v in self.maxima.items()}


def token_metrics(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """From the sums and maxima of all ranks (TokenSums). A tensor-parallel group counts its tokens once a rank: ratios only."""
    tokens = sums["tokens"]
    mean = sums["ratio"] / tokens
    found = {"clip_fraction": sums["clipped"] / tokens, "correction_fraction": sums["corrected"] / tokens,
             "masked_fraction": sums["masked"] / tokens, "trained_fraction": sums["trained"] / tokens,
             "effective_sample_size": sums["weight"] ** 2 / max(tokens * sums["weight_squared"], 1e-300),
             "ratio_mean": mean, "ratio_std": math.sqrt(max(0.0, sums["ratio_squared"] / tokens - mean * mean)),
             "ratio_max": maxima["ratio"], "entropy_mean": sums["entropy"] / tokens, "policy_kl": sums["policy_kl"] / tokens,
             "rollout_kl": sums["rollout_kl"] / sums["gap_all_tokens"], "logprob_gap_all_mean": sums["gap_all"] / sums["gap_all_tokens"]}
    if sums["gap_tokens"]:
        found |= {"logprob_gap_mean": sums["gap"] / sums["gap_tokens"], "logprob_gap_max": maxima["gap"]}
    return found | {f"rollout_ratio_age_{a}": sums[f"age_{a}_ratio"] / sums[f"age_{a}"] for a in range(AGES) if sums[f"age_{a}"]}


def batch_metrics(batch: Batch, advantages: np.ndarray, clip_range: tuple[float, float]) -> dict[str, float]:
    """advantages: float64 [M], of the sampled tokens."""
    sampled = batch.action_mask.astype(bool)
    staleness = batch.version - batch.versions[sampled].astype(np.float64)
    rollout_of_token = np.repeat(batch.segment_rollout, batch.segment_lengths)
    response = np.bincount(rollout_of_token[sampled], minlength=len(batch.rollout_reward))
    rewards = np.clip(batch.rollout_reward.astype(np.float64), *clip_range)
    flat = [np.ptp(rewards[batch.rollout_group == group]) == 0 for group in np.unique(batch.rollout_group)]
    found = {"staleness_mean": staleness.mean(), "staleness_max": staleness.max(),
             "reward_mean": batch.rollout_reward.mean(dtype=np.float64),
             "score_mean": batch.rollout_score.mean(dtype=np.float64), "pass_rate": (batch.rollout_score > 0.5).mean(),
             "advantage_mean": advantages.mean(), "advantage_std": advantages.std(), "frac_groups_zero_std": np.mean(flat),
             "response_length_mean": response.mean(),
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
