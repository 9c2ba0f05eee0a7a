"""The other models beside the policy: the critic of gae, and the reference or teacher; on the policy's ranks, or (apart.py) on their own."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoTokenizer

from molt_hpc.config import RunConfig
from molt_hpc.train.collectives import reduce_packed
from molt_hpc.train.loss import value_loss
from molt_hpc.train.micro import MicroBatch, TokenTable, accumulate, score_all
from molt_hpc.train.model import TrainModel, build_model
from molt_hpc.train.optim import Optimizers, build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import Plan


class Critic:
    """A backbone with a value head, its optimizer and its schedule. The value loss is a mean over the step's tokens."""

    def __init__(self, config: RunConfig, total_steps: int | None):
        self.config, self.total_steps = config.critic, total_steps
        folder = config.critic.model_name_or_path or config.actor.model_name_or_path
        self.model = build_model(folder, config.actor.backend, config.fsdp, config.actor.gradient_checkpoint, value_seed=config.train.seed,
                                 run=config.output_dir)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.critic, config.fsdp.offload)
        self.epochs = config.critic.max_epochs or config.train.max_epochs
        learning_rate(config.critic, 0.0, total_steps)

    def learners(self) -> list[tuple[str, TrainModel, Optimizers]]:
        return [("critic.", self.model, self.optimizer)]

    def begin_scores(self, table: TokenTable, plan: Plan) -> Callable[[], np.ndarray]:
        """A function that gives the values of all sampled tokens, [M]."""
        return lambda: score_all(self.model, table, plan.steps)

    def begin_training(self, table: TokenTable, plan: Plan, position: int) -> Callable[[], dict[str, float]]:
        """A function that moves the values towards the table's `returns`; `position` counts batches. It raises as guarded_step does."""
        return lambda: self._train(table, plan, position)

    def _train(self, table: TokenTable, plan: Plan, position: int) -> dict[str, float]:
        updates, rows = self.epochs * len(plan.steps), []
        counts = torch.zeros(2, dtype=torch.float64, device=self.model.device)  # on the device: reading it back would stop the queue

        def loss_of(micro: MicroBatch) -> torch.Tensor:
            nonlocal counts
            losses, clipped = value_loss(self.model.score(micro.packed)[0], micro["values"], micro["returns"], micro.mask, self.config.value_clip)
            counts = counts + torch.stack([clipped.sum(), micro.mask.sum()])
            return losses.sum() / step.denominator

        for update in range(updates):
            step = plan.steps[update % len(plan.steps)]
            total = accumulate(self.model, table, step, loss_of)
            rate = learning_rate(self.config, position + update / updates, self.total_steps)
            rows.append(guarded_step(self.optimizer, rate, self.config.max_norm, total, self.model.device))
        sums, _ = reduce_packed(dict(zip(("clipped", "tokens"), counts.tolist())), {}, self.model.device)
        loss, norm = np.mean(rows, 0).tolist()
        return {"critic_loss": loss, "critic_grad_norm": norm, "critic_clip_fraction": sums["clipped"] / sums["tokens"],
                "critic_learning_rate": rate, "value_mean": float(table["values"].mean()), "return_mean": float(table["returns"].mean())}


class Reference:
    """The frozen model of ref.model_name_or_path, in the dtype of the forward pass; ValueError if its tokenizer is another one."""

    def __init__(self, config: RunConfig):
        folder, own = config.ref.model_name_or_path or config.actor.model_name_or_path, config.actor.model_name_or_path
        if folder != own and AutoTokenizer.from_pretrained(folder).get_vocab() != AutoTokenizer.from_pretrained(own).get_vocab():
            raise ValueError(f"ref.model_name_or_path: {folder} has another tokenizer than {own}; log-probs are compared token by token")
        self.model = build_model(folder, config.actor.backend, replace(config.fsdp, defer_grad_sync=False), "none",
                                 getattr(torch, config.fsdp.param_dtype), frozen=".*", run=config.output_dir)

    def begin_scores(self, table: TokenTable, plan: Plan) -> Callable[[], np.ndarray]:
        """A function that gives the log-probs of all sampled tokens, [M]."""
        return lambda: score_all(self.model, table, plan.steps)
