"""The actor: one object on every training rank that learns from batches and hands out weights.

Rank 0 receives a batch and plans it; what it decides travels to the other ranks as bytes, and from there on all ranks
issue the same collectives in the same order. A batch passes through: log-probs under the weights that it starts from
(where something needs them beforehand), reference and critic, advantages on rank 0, then the optimizer steps.
"""

import logging
import os
import runpy

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from molt_hpc.config import RunConfig, comma_list
from molt_hpc.data.shards import Batch
from molt_hpc.train import advantage
from molt_hpc.train.apart import Apart
from molt_hpc.train.collectives import broadcast_bytes, reduce_packed, share
from molt_hpc.train.critic import Critic, Reference
from molt_hpc.train.gather import FullWeights
from molt_hpc.train.loss import LOSSES, SEQUENCE_LOSSES, LossSettings, adapted_coefficient, correction_weight, kl_estimate
from molt_hpc.train.loss import masked_log_ratio, policy_loss, sequence_mean
from molt_hpc.train.metrics import TokenSums, batch_metrics, token_metrics
from molt_hpc.train.micro import MicroBatch, TokenTable, accumulate, score_all, share_plan, whole_sequences
from molt_hpc.train.model import TrainModel, build_model
from molt_hpc.train.optim import BadStep, Optimizers, TrainingError, build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import Plan, StepPlan, token_shares
from molt_hpc.train.routing import replayed_routers

log = logging.getLogger(__name__)

ROUTERS = r"(\.gate|router)\.(weight|bias|e_score_correction_bias)$"
"""Names of the parameters by which a mixture-of-experts layer chooses."""


class Actor:
    """Trains one policy; torch.distributed must be initialised (gloo on CPU, NCCL on GPUs).

    total_steps: batches of the whole run, for the schedules that need it. store: torchrun's, by which a reference and a critic on
    ranks of their own are reached. `step` counts the batches trained so far, over all attempts; `bad_steps` those in a row that
    had to be left out; `kl_coef` is the KL coefficient of the next batch.
    """

    def __init__(self, config: RunConfig, total_steps: int | None = None, store: dist.Store | None = None):
        self.config, self.total_steps, chosen = config, total_steps, config.actor
        torch.manual_seed(config.train.seed)
        if config.train.deterministic:
            os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
            torch.use_deterministic_algorithms(True)
        if config.algo.plugin_path:
            runpy.run_path(config.algo.plugin_path)
        for registry, name in ((advantage.ESTIMATORS, config.algo.advantage.estimator), (LOSSES, chosen.loss_mode)):
            registry[name]  # raises for a name that nobody registered
        self.model = build_model(chosen.model_name_or_path, chosen.backend, config.fsdp, chosen.gradient_checkpoint,
                                 frozen=ROUTERS if chosen.freeze_moe_router else None, lora=chosen.lora, run=config.output_dir)
        self.model.head.entropy_gradient = bool(chosen.entropy_coef)
        self.model.routers = replayed_routers(self.model.module) if config.train.routing_replay else []
        self.optimizer = build_optimizer(self.model.named_parameters(), chosen, config.fsdp.offload)
        self.kl_coef, self.step, self.bad_steps = config.algo.kl_coef(), 0, 0
        self.reference = self.critic = None
        if self.kl_coef:
            self.reference = Apart("reference", store, self.device, None) if config.ref.num_procs else Reference(config)
        if config.algo.advantage.estimator == "gae":
            self.critic = Apart("critic", store, self.device, total_steps) if config.critic.num_procs else Critic(config, total_steps)
        learning_rate(chosen, 0.0, total_steps)
        self.loss_settings = LossSettings(*chosen.eps_clip_low_high, chosen.dual_clip, *config.algo.advantage.correction(),
                                          *config.algo.advantage.is_correction_threshold, chosen.sapo_temperatures)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def learners(self) -> list[tuple[str, TrainModel, Optimizers]]:
        """(prefix of its names in a checkpoint, model, optimizer) of everything that learns on these ranks."""
        return [("", self.model, self.optimizer), *(self.critic.learners() if self.critic else [])]

    def apart(self) -> list[Apart]:
        """What learns on ranks of its own."""
        return [self.critic] if isinstance(self.critic, Apart) else []

    def weights(self, dtype: torch.dtype | None = None) -> FullWeights:
        """The current weights; see FullWeights. All ranks must iterate together."""
        return FullWeights(self.model, dtype)

    def train_batch(self, raw: bytes | None) -> dict[str, float]:
        """Train on one shard (bytes on rank 0, None elsewhere) and return its metrics, the same on all ranks.

        Runs train.max_epochs passes of one optimizer step for each train.batch_size groups. A loss or gradient that is not
        finite ends the batch before that step, with `batch_skipped` 1 in the metrics; train.max_bad_steps such batches in
        a row raise TrainingError. Raises ValueError if the bytes are not a shard or cannot be planned. All on all ranks alike.
        """
        batch = Batch.from_bytes(broadcast_bytes(raw, self.device))
        try:
            metrics = self._train(batch)
            self.bad_steps = 0
        except BadStep as error:
            self.bad_steps += 1
            if self.bad_steps >= self.config.train.max_bad_steps:
                raise TrainingError(f"{self.bad_steps} batches in a row could not be trained on (train.max_bad_steps): {error}") from error
            log.error("batch %d is left out from here on: %s", batch.step, error)
            metrics = batch_metrics(batch, np.zeros(1), self.config.reward.clip_range) | {"batch_skipped": 1}
        self.step += 1
        return metrics

    def _train(self, batch: Batch) -> dict[str, float]:
        table = TokenTable(batch, {"kept_counts": self.config.rollout.top_k > 0, "routed_experts": bool(self.model.routers)})
        plan = share_plan(self.model, table, self.config.train)
        updates, frozen = self.config.train.max_epochs * len(plan.steps), self.step < self.config.actor.freezing_steps
        whole = whole_sequences(plan, table)
        self._prepare(plan, table, updates, whole)
        spread = self.config.actor.loss_mode in SEQUENCE_LOSSES and not whole
        critic = self.critic.begin_training(table, plan, self.step) if self.critic else dict
        tokens, rows = TokenSums(), []
        for update in range(updates):
            step = plan.steps[update % len(plan.steps)]
            rate = self._rate(update / updates)
            if spread and (update or self.config.algo.advantage.proximal == "rollout"):  # at first all ratios are 1
                self._add_sequence_ratio(table, step)
            share_of_loss = self._backward(table, step, tokens, update < len(plan.steps), frozen)
            if not frozen:
                rows.append((*guarded_step(self.optimizer, rate, self.config.actor.max_norm, share_of_loss, self.device), rate))
        learned = critic()
        sums, maxima = reduce_packed(*tokens.totals(), self.device)
        loss, norm, _ = np.mean(rows, 0).tolist() if rows else (0.0, 0.0, 0.0)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rows[-1][2] if rows else 0.0, "optimizer_steps": len(rows),
                   "micro_batches": sum(step.micro_batch_count for step in plan.steps) * self.config.train.max_epochs,
                   **token_metrics(sums, maxima), **learned, **batch_metrics(batch, table["advantages"], self.config.reward.clip_range)}
        if self.reference:
            metrics |= {"kl_mean": sums["kl"] / sums["tokens"], "kl_coef": self.kl_coef}
            if (kl := self.config.algo.kl).target is not None:
                self.kl_coef = adapted_coefficient(self.kl_coef, metrics["kl_mean"], kl.target, kl.horizon, len(batch.rollout_reward))
        if metrics["trained_fraction"] == 0 and not frozen:
            log.warning("STEP %d TRAINS NOTHING: no token has both an advantage and a weight (groups with equal rewards: %.3f, "
                        "tokens masked by the importance correction: %.3f)", batch.step, metrics["frac_groups_zero_std"],
                        metrics["masked_fraction"])
        return metrics

    def _rate(self, fraction: float) -> float:
        """The rate of an optimizer step; the schedule starts when the policy does."""
        frozen = self.config.actor.freezing_steps
        total = max(1, self.total_steps - frozen) if self.total_steps else self.total_steps
        return learning_rate(self.config.actor, max(0.0, self.step - frozen) + fraction, total)

    def _prepare(self, plan: Plan, table: TokenTable, updates: int, whole: bool) -> None:
        """Add to the table what is known before the first update: old log-probs, reference, values, advantages, shares, weights.

        whole: every rollout lies within one micro-batch.
        """
        others = {"reference": self.reference, "values": self.critic}
        begun = {name: other.begin_scores(table, plan) for name, other in others.items() if other}
        algo, versions = self.config.algo, table["versions"].astype(np.int64)
        level, in_reward = algo.advantage.correction()[0], self.reference is not None and not algo.kl.use_loss
        # what the importance correction looks at as one: a rollout, or the part of it that one version sampled
        by_version = algo.advantage.is_correction_by_version
        table.columns["unit"] = table["sequence"] * (versions.max() + 1) + versions if by_version else table["sequence"]
        if algo.advantage.proximal == "rollout":
            table.columns["old"] = table["rollout"]
        # With one update and nothing to compute beforehand the policy's own pass gives them.
        elif updates > 1 or in_reward or (level in ("seq", "geo") and not whole):
            table.columns["old"] = score_all(self.model, table, plan.steps)
        table.columns |= {name: scores() for name, scores in begun.items()}
        table.columns |= load_arrays(share(lambda: save_arrays(self._estimate(plan, table)), self.device))
        if "old" in table.columns and level != "off":
            old, rollout = (torch.from_numpy(table[name]).to(self.model.score_dtype) for name in ("old", "rollout"))
            everywhere, unit = torch.ones_like(old).bool(), torch.from_numpy(table["unit"])
            weight, corrected = correction_weight(old, rollout, everywhere, self.loss_settings, unit)
            table.columns |= {"weight": weight.numpy(), "corrected": corrected.numpy()}

    def _estimate(self, plan: Plan, table: TokenTable) -> dict[str, np.ndarray]:
        """Advantages and returns of the batch, and each token's share of its optimizer step: float64 [M] each. Rank 0 only."""
        batch, algo, reward = table.batch, self.config.algo, self.config.reward
        if not np.isfinite(batch.rollout_reward).all():  # clipping would hide an infinite one
            raise ValueError(f"rollouts {np.flatnonzero(~np.isfinite(batch.rollout_reward)).tolist()}: the reward is not finite")
        names = comma_list(reward.parts)
        missing = [i for i, r in enumerate(batch.rollouts) if any(name not in r["info"] for name in names)]
        if missing:
            raise ValueError(f"reward.parts: the agent's info of rollouts {missing[:8]} lacks one of {', '.join(names)}")
        kl = None
        if "old" in table.columns and "reference" in table.columns and not algo.kl.use_loss:
            kl = kl_estimate(algo.kl.estimator, *(torch.from_numpy(table[name]).double() for name in ("old", "reference"))).numpy()
        episodes = advantage.Episodes(
            np.clip(batch.rollout_reward.astype(np.float64), *reward.clip_range), batch.rollout_group, table["sequence"],
            table["positions"], kl, table["values"].astype(np.float64) if self.critic else None,
            {name: np.array([float(r["info"][name]) for r in batch.rollouts]) for name in names}, tuple(comma_list(reward.part_weights)),
            self.kl_coef, algo.advantage.gamma, algo.advantage.lam, not algo.advantage.no_whiten, algo.advantage.pass_k,
            table.turn_rewards())
        advantages, returns = advantage.compute(algo.advantage.estimator, episodes)
        shares = np.zeros(len(advantages))
        for step in plan.steps:
            rows = table.rows(step.segments())
            shares[rows] = token_shares(self.config.actor.loss_aggregation, table["sequence"][rows], self.config.data.max_len)
        return {"advantages": advantages, "returns": returns, "shares": shares}

    def _add_sequence_ratio(self, table: TokenTable, step: StepPlan) -> None:
        """Mean log-ratio of each rollout under the current weights: its segments are spread over micro-batches and ranks."""
        mask = torch.zeros(len(table["sequence"]), dtype=torch.bool)
        mask[torch.from_numpy(table.rows(step.segments()))] = True
        current, old = (torch.from_numpy(values) for values in (score_all(self.model, table, [step]), table["old"]))
        ratio = masked_log_ratio(current, old.to(current.dtype), mask)
        table.columns["sequence_log_ratio"] = sequence_mean(ratio, mask, torch.from_numpy(table["sequence"])).numpy()

    def _backward(self, table: TokenTable, step: StepPlan, tokens: TokenSums, first_pass: bool, frozen: bool = False) -> torch.Tensor:
        """Gradients of one optimizer step (none if frozen); returns this rank's share of the loss (float64) and adds to `tokens`."""
        def loss_of(micro: MicroBatch) -> torch.Tensor:
            loss, old = self._micro_loss(micro, tokens)
            if first_pass:
                tokens.add_gap(micro, old, table.batch.version)
            return loss

        return accumulate(self.model, table, step, loss_of, frozen)

    def _micro_loss(self, micro: MicroBatch, tokens: TokenSums) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss of a micro-batch, the trainer's old log-probs): policy loss, KL and entropy, each with the tokens' shares of the step."""
        actor, kl_config, columns = self.config.actor, self.config.algo.kl, micro.columns
        current, entropy = self.model.score(micro.packed)
        old = columns.get("old", current.detach())
        correction = (columns["weight"], columns["corrected"]) if "weight" in columns else None
        result = policy_loss(actor.loss_mode, current, old, micro["rollout"], micro["advantages"], micro.mask, self.loss_settings,
                             micro["sequence"], correction, columns.get("sequence_log_ratio"), micro["unit"])
        losses, kl = result.loss, None
        if self.reference:
            kl = kl_estimate(kl_config.estimator, current, micro["reference"])
            losses = losses + self.kl_coef * torch.where(micro.mask, kl, 0.0) if kl_config.use_loss else losses
        if actor.entropy_coef:
            losses = losses - actor.entropy_coef * torch.where(micro.mask, entropy, 0.0)
        tokens.add_loss(micro, result, entropy, kl)
        return (losses * micro["shares"]).sum(), current.detach() if self.config.algo.advantage.proximal == "rollout" else old
