"""The actor: one object on every training rank that learns from batches and hands out weights.

Rank 0 receives a batch, estimates the advantages and plans; both travel to the other ranks as
bytes, and from there on all ranks issue the same collectives in the same order. Gradients are
reduced after every micro-batch: deferring them would keep a whole unsharded gradient on each rank.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from molt_hpc.config import RunConfig
from molt_hpc.data.shards import Batch
from molt_hpc.train import advantage
from molt_hpc.train.collectives import broadcast_bytes, reduce_packed, share
from molt_hpc.train.gather import FullWeights
from molt_hpc.train.loss import LossSettings, policy_loss
from molt_hpc.train.metrics import batch_metrics, token_metrics
from molt_hpc.train.micro import MicroBatch, TokenSums, build_micro_batch
from molt_hpc.train.model import build_model
from molt_hpc.train.optim import TrainingError, build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import Plan, StepPlan, plan_batch

__all__ = ["Actor", "TrainingError"]

log = logging.getLogger(__name__)


class Actor:
    """Trains one policy; torch.distributed must be initialised (gloo on CPU, NCCL on GPUs).

    total_steps: batches of the whole run, for the schedules that need it. `step` counts the batches
    trained so far, over all attempts.
    """

    def __init__(self, config: RunConfig, total_steps: int | None = None):
        self.config = config
        torch.manual_seed(config.train.seed)
        self.model = build_model(config.actor.model_name_or_path, config.actor.backend, config.fsdp, config.actor.gradient_checkpoint)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.actor)
        self.step = 0
        self.total_steps = total_steps
        learning_rate(config.actor, 0.0, total_steps)
        low, high = config.actor.eps_clip_low_high
        correction = config.algo.advantage
        self.loss_settings = LossSettings(low, high, config.actor.dual_clip, correction.is_correction_level,
                                          correction.is_correction_mode, *correction.is_correction_threshold)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def train_batch(self, raw: bytes | None) -> dict[str, float]:
        """Train on one shard (bytes on rank 0, None elsewhere) and return its metrics, the same on all ranks.

        Runs train.max_epochs passes of one optimizer step for each train.batch_size groups. Raises
        TrainingError on all ranks if a loss or gradient is not finite (that optimizer step is not
        made), ValueError on all ranks if the bytes are not a shard or cannot be planned.
        """
        batch = Batch.from_bytes(broadcast_bytes(raw, self.device))
        plan, advantages = self._share_plan(batch)
        updates = self.config.train.max_epochs * len(plan.steps)
        # Only with several updates does the policy move away from the one whose log-probs are the ratio's base.
        old = [self._log_probs(batch, step, advantages) for step in plan.steps] if updates > 1 else None
        tokens, rows = TokenSums(), []
        for update in range(updates):
            number = update % len(plan.steps)
            rate = learning_rate(self.config.actor, self.step + update / updates, self.total_steps)
            first_pass = update < len(plan.steps)
            share = self._backward(batch, plan.steps[number], advantages, old[number] if old else None, tokens, first_pass)
            rows.append((*guarded_step(self.optimizer, rate, self.config.actor.max_norm, share, self.device), rate))
        self.step += 1
        sums, maxima = reduce_packed(tokens.sums, tokens.maxima, self.device)
        loss, norm, _ = np.mean(rows, 0).tolist()
        return {"loss": loss, "grad_norm": norm, "learning_rate": rows[-1][2], "optimizer_steps": updates,
                "micro_batches": sum(step.micro_batch_count for step in plan.steps) * self.config.train.max_epochs,
                **token_metrics(sums, maxima), **batch_metrics(batch, advantages, self.config.reward.clip_range)}

    def weights(self, dtype: torch.dtype | None = None) -> FullWeights:
        """The current weights; see FullWeights. All ranks must iterate together."""
        return FullWeights(self.model, dtype)

    def _share_plan(self, batch: Batch) -> tuple[Plan, np.ndarray]:
        """Plan and advantages (float64 [R]) as rank 0 made them."""
        def make() -> bytes:
            values = advantage.compute(self.config.algo.advantage.estimator, batch.rollout_reward, batch.rollout_group,
                                       self.config.reward.clip_range)
            actions = np.add.reduceat(batch.action_mask.astype(np.int64), batch.segment_offsets[:-1])
            plan = plan_batch(batch.rollout_group[batch.segment_rollout], batch.segment_lengths.tolist(), actions.tolist(),
                              self.model.data_size, self.config.train.max_tokens_per_gpu, self.config.train.batch_size)
            return save_arrays({"advantages": values, **plan.to_arrays()})

        arrays = load_arrays(share(make, self.device))
        return Plan.from_arrays(self.model.data_size, arrays), arrays["advantages"]

    def _micro_batches(self, batch: Batch, step: StepPlan, advantages: np.ndarray) -> list[MicroBatch]:
        return [build_micro_batch(batch, segments, advantages, self.device) for segments in step.micro_batches[self.model.data_rank]]

    @torch.no_grad()
    def _log_probs(self, batch: Batch, step: StepPlan, advantages: np.ndarray) -> list[torch.Tensor]:
        """Log-probs under the current weights, for each micro-batch of a step."""
        found = [self.model.score(micro.packed)[0] for micro in self._micro_batches(batch, step, advantages)]
        self.model.reshard()
        return found

    def _backward(self, batch: Batch, step: StepPlan, advantages: np.ndarray, old: list[torch.Tensor] | None, tokens: TokenSums,
                  first_pass: bool) -> torch.Tensor:
        """Gradients of one optimizer step; returns this rank's share of the loss (float64) and adds to `tokens`."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, micro in enumerate(self._micro_batches(batch, step, advantages)):
            current, entropy = self.model.score(micro.packed)
            base = old[number] if old else current.detach()
            result = policy_loss(self.config.actor.loss_mode, current, base, micro.rollout, micro.advantages, micro.mask,
                                 self.loss_settings)
            loss = result.loss.sum() / step.denominator
            loss.backward()
            total += loss.detach().double()
            tokens.add_loss(micro.mask, result.clipped, result.corrected, result.ratio, entropy)
            if first_pass:
                tokens.add_gap(micro, base, batch.version)
        self.model.finish_gradients()
        # The ranks of a tensor-parallel group computed the same tokens: each gives its part.
        return total * self.model.data_size / dist.get_world_size()
