"""The other models beside the policy: the critic of gae, and the reference or teacher. Both share the training ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import AutoTokenizer

from molt_hpc.config import RunConfig
from molt_hpc.train.collectives import reduce_packed
from molt_hpc.train.loss import value_loss
from molt_hpc.train.micro import TokenTable, memory_explained, micro_batches
from molt_hpc.train.model import TrainModel, build_model
from molt_hpc.train.optim import build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import Plan


class Critic:
    """A backbone with a value head, its optimizer and its schedule. The value loss is a mean over the step's tokens."""

    def __init__(self, config: RunConfig, total_steps: int | None):
        self.config, self.total_steps, self.budget = config.critic, total_steps, config.train.max_tokens_per_gpu
        folder = config.critic.model_name_or_path or config.actor.model_name_or_path
        self.model = build_model(folder, config.actor.backend, config.fsdp, config.actor.gradient_checkpoint, value_seed=config.train.seed)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.critic)
        self.epochs = config.critic.max_epochs or config.train.max_epochs
        learning_rate(config.critic, 0.0, total_steps)

    def train(self, table: TokenTable, plan: Plan, position: int) -> dict[str, float]:
        """Move the values towards the table's `returns`; `position` counts batches. Raises as guarded_step does."""
        updates, rows = self.epochs * len(plan.steps), []
        counts = torch.zeros(2, dtype=torch.float64, device=self.model.device)  # on the device: reading it back would stop the queue
        for update in range(updates):
            step, total = plan.steps[update % len(plan.steps)], torch.zeros((), dtype=torch.float64, device=self.model.device)
            for micro in micro_batches(self.model, table, step):
                with memory_explained(micro, self.budget):
                    values, _ = self.model.score(micro.packed)
                    losses, clipped = value_loss(values, micro["values"], micro["returns"], micro.mask, self.config.value_clip)
                    loss = losses.sum() / step.denominator
                    loss.backward()
                total += loss.detach().double()
                counts += torch.stack([clipped.sum(), micro.mask.sum()])
            self.model.finish_gradients()
            rate = learning_rate(self.config, position + update / updates, self.total_steps)
            rows.append(guarded_step(self.optimizer, rate, self.config.max_norm, total, self.model.device))
        sums, _ = reduce_packed(dict(zip(("clipped", "tokens"), counts.tolist())), {}, self.model.device)
        loss, norm = np.mean(rows, 0).tolist()
        return {"critic_loss": loss, "critic_grad_norm": norm, "critic_clip_fraction": sums["clipped"] / sums["tokens"],
                "critic_learning_rate": rate, "value_mean": float(table["values"].mean()), "return_mean": float(table["returns"].mean())}


def build_reference(config: RunConfig) -> TrainModel:
    """The frozen model of ref.model_name_or_path, in the dtype of the forward pass; ValueError if its tokenizer is another one."""
    folder, own = config.ref.model_name_or_path or config.actor.model_name_or_path, config.actor.model_name_or_path
    if folder != own and AutoTokenizer.from_pretrained(folder).get_vocab() != AutoTokenizer.from_pretrained(own).get_vocab():
        raise ValueError(f"ref.model_name_or_path: {folder} has another tokenizer than {own}; log-probs are compared token by token")
    dtype = getattr(torch, config.fsdp.param_dtype)
    return build_model(folder, config.actor.backend, replace(config.fsdp, defer_grad_sync=False), "none", dtype, frozen=".*")
