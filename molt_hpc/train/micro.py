"""From a batch and a plan to the tensors of one micro-batch, and forward passes over a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from molt_hpc.config import TrainConfig
from molt_hpc.data.shards import Batch
from molt_hpc.train.collectives import share
from molt_hpc.train.logprob import Kept, Packed, pack_segments
from molt_hpc.train.optim import TrainingError
from molt_hpc.train.planner import Plan, StepPlan, attention_costs, plan_batch
from molt_hpc.train.routing import lay_out
from molt_hpc.train.vision import Image

if TYPE_CHECKING:
    from molt_hpc.train.model import TrainModel

DUMMY = np.zeros(2, np.int32)
"""What a rank computes where the plan gives it nothing: it must take part in the collectives."""


class TokenTable:
    """A batch and its columns: arrays on the axis of its M sampled tokens, in the order of the batch.

    Columns at the start: rollout (the engine's log-probs, float32), versions int32, sequence int64 (the token's
    rollout), positions int64 (its place in its segment). Passes over the batch add what they compute: old,
    reference, values, advantages, returns, shares ... choices: which of the engine's choices the batch must have, by their names
    as extras. Raises ValueError if a segment lacks those, or has none while others do.
    """

    def __init__(self, batch: Batch, choices: dict[str, bool] | None = None):
        for name in ("kept_counts", "routed_experts"):
            if (choices or {}).get(name) or f"extra.{name}" in batch.extras:
                lacking = [s for s in range(len(batch.segment_rollout)) if batch.extra(name, s) is None]
                if lacking:
                    raise ValueError(f"batch {batch.step}: segments {lacking[:8]} lack the engine's choices ({name}) that training is to replay")
        self.batch, mask = batch, batch.action_mask.astype(bool)
        self.counts = np.add.reduceat(mask.astype(np.int64), batch.segment_offsets[:-1])
        self.offsets = np.concatenate([[0], np.cumsum(self.counts)])
        self.columns = {"rollout": batch.logprobs[mask], "versions": batch.versions[mask],
                        "sequence": np.repeat(batch.segment_rollout.astype(np.int64), self.counts),
                        "positions": np.flatnonzero(mask) - np.repeat(batch.segment_offsets[:-1], self.counts)}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def turn_rewards(self) -> np.ndarray | None:
        """float64 [M]: the agent's reward of a turn on its last token, 0 elsewhere; None if no rollout has any."""
        if "extra.turn_rewards" not in self.batch.extras:
            return None
        found, position = np.zeros(len(self["sequence"])), self["positions"]
        for segment in range(len(self.counts)):
            if (turns := self.batch.extra("turn_rewards", segment)) is not None:
                start, end = self.offsets[segment:segment + 2]
                found[start + np.searchsorted(position[start:end], turns[:, 0])] += turns[:, 1]
        return found

    def rows(self, segments: list[int]) -> np.ndarray:
        """The rows of the given segments' sampled tokens, in the order of the segments."""
        parts = [np.arange(self.offsets[s], self.offsets[s + 1]) for s in segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass
class MicroBatch:
    """Packed segments and the table's columns for their N sampled tokens. mask: bool [N], False for the token of a dummy."""

    packed: Packed
    mask: torch.Tensor
    columns: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]


def build_micro_batch(table: TokenTable, segments: list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> MicroBatch:
    """Tensors of the given segments, floating-point columns in `dtype`. No segments: a dummy of no weight."""
    batch, rows = table.batch, table.rows(segments)
    if segments:
        parts = [slice(batch.segment_offsets[s], batch.segment_offsets[s + 1]) for s in segments]
        packed = pack_segments([batch.token_ids[part] for part in parts], [batch.action_mask[part].astype(bool) for part in parts],
                               [float(batch.segment_temperature[s]) for s in segments], device, images_of(batch, segments))
        if "extra.kept_counts" in batch.extras:
            counts, ids = (np.concatenate([batch.extra(name, s) for s in segments]) for name in ("kept_counts", "kept_ids"))
            packed.kept = Kept.of(counts, ids, device)
        if "extra.routed_experts" in batch.extras:
            packed.routed = lay_out([batch.extra("routed_experts", s) for s in segments], device)
    else:
        packed = pack_segments([DUMMY], [np.array([False, True])], [1.0], device, images_of(batch, [None]))

    def column(values: np.ndarray) -> torch.Tensor:
        chosen = torch.from_numpy(values[rows] if segments else np.zeros(1, values.dtype))
        return chosen.to(device, dtype if chosen.is_floating_point() else chosen.dtype)

    mask = torch.full((max(1, len(rows)),), bool(segments), device=device)
    return MicroBatch(packed, mask, {name: column(values) for name, values in table.columns.items()})


def images_of(batch: Batch, segments: list[int | None]) -> list[list[Image]] | None:
    """The images of each segment; None if no segment of the whole batch has one."""
    if "extra.images" not in batch.extras:
        return None
    found: list[list[Image]] = []
    for segment in segments:
        digests = None if segment is None else batch.extra("images", segment)
        found.append([] if digests is None else [(bytes(digest).hex(), int(start), int(end)) for digest, (start, end)
                                                 in zip(digests, batch.extra("image_spans", segment), strict=True)])
    return found


@contextmanager
def memory_explained(micro: MicroBatch, budget: int) -> Iterator[None]:
    """TrainingError with the numbers and the options to change where a micro-batch does not fit into memory."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        count = micro.packed.token_ids.shape[1]
        raise TrainingError(f"out of memory on a micro-batch of {count} tokens in {len(micro.packed.lengths)} segments (budget {budget}): "
                            f"lower train.max_tokens_per_gpu below {count}, or set actor.gradient_checkpoint; {error}") from error


def accumulate(model: TrainModel, table: TokenTable, step: StepPlan, loss_of: Callable[[MicroBatch], torch.Tensor],
               frozen: bool = False) -> torch.Tensor:
    """Gradients of one optimizer step (none if frozen) from this rank's micro-batches; returns its share of the loss, float64."""
    total, mine = torch.zeros((), dtype=torch.float64, device=model.device), step.micro_batches[model.data_rank]
    for number, segments in enumerate(mine):
        model.reduce_gradients(number == len(mine) - 1)
        micro = build_micro_batch(table, segments, model.device, model.score_dtype)
        with memory_explained(micro, step.budget), torch.set_grad_enabled(not frozen):
            loss = loss_of(micro)
            if not frozen:
                loss.backward()
        total += loss.detach().double()
    if frozen:
        model.reshard()
    else:
        model.finish_gradients()
    # The ranks of a tensor-parallel group computed the same tokens: each gives its part.
    return total * model.data_size / dist.get_world_size()


@torch.no_grad()
def score_all(model: TrainModel, table: TokenTable, steps: list[StepPlan]) -> np.ndarray:
    """What the model says of every sampled token under its current weights, [M], the same on all ranks; 0 for tokens outside of `steps`."""
    found = torch.zeros(len(table["sequence"]), dtype=model.score_dtype, device=model.device)
    for step in steps:
        for segments in step.micro_batches[model.data_rank]:
            micro = build_micro_batch(table, segments, model.device, model.score_dtype)
            with memory_explained(micro, step.budget):
                scores = model.score(micro.packed)[0]
            if segments:
                found[torch.from_numpy(table.rows(segments)).to(model.device)] = scores
    model.reshard()
    dist.all_reduce(found)
    # a tensor-parallel group has added its scores once a rank
    return (found * (model.data_size / dist.get_world_size())).cpu().numpy()


def share_plan(model: TrainModel, table: TokenTable, train: TrainConfig) -> Plan:
    """The plan of a batch as rank 0 made it."""
    batch, lengths = table.batch, table.batch.segment_lengths.tolist()
    costs = attention_costs(lengths, model.config.get_text_config().hidden_size)
    return Plan.from_bytes(share(lambda: plan_batch(
        batch.rollout_group[batch.segment_rollout], lengths, table.counts.tolist(), model.data_size, train.max_tokens_per_gpu,
        train.batch_size, costs).to_bytes(), model.device))


def whole_sequences(plan: Plan, table: TokenTable) -> bool:
    """Whether every rollout lies within one micro-batch, so that what belongs to a rollout can be computed there."""
    home: dict[int, tuple[int, int, int]] = {}
    for s, step in enumerate(plan.steps):
        for rank, batches in enumerate(step.micro_batches):
            for number, segments in enumerate(batches):
                for segment in segments:
                    if home.setdefault(int(table.batch.segment_rollout[segment]), (s, rank, number)) != (s, rank, number):
                        return False
    return True
