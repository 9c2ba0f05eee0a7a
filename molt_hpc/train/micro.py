"""From a batch and a plan to the tensors of one micro-batch, and the sums that its forward pass adds to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from molt_hpc.data.shards import Batch
from molt_hpc.train.logprob import Packed, pack_segments

DUMMY = np.zeros(2, np.int32)
"""What a rank computes where the plan gives it nothing: it must take part in the collectives."""


@dataclass
class MicroBatch:
    """Packed segments and what the loss needs of each of the N sampled tokens.

    mask: bool [N], False for the token of a dummy. rollout, advantages: float32 [N]. versions: int32 [N].
    """

    packed: Packed
    mask: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor


def build_micro_batch(batch: Batch, segments: list[int], advantages: np.ndarray, device: torch.device) -> MicroBatch:
    """Tensors of the given segments; advantages: float64 [R], one for each rollout. No segments: a dummy of no weight."""
    if not segments:
        packed = pack_segments([DUMMY], [np.array([False, True])], [1.0], device)
        zero = torch.zeros(1, device=device)
        return MicroBatch(packed, zero.bool(), zero, zero, zero.int())
    parts = [slice(batch.segment_offsets[s], batch.segment_offsets[s + 1]) for s in segments]
    masks = [batch.action_mask[part].astype(bool) for part in parts]
    packed = pack_segments([batch.token_ids[part] for part in parts], masks,
                           [float(batch.segment_temperature[s]) for s in segments], device)

    def sampled(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values[part][mask] for part, mask in zip(parts, masks, strict=True)])).to(device)

    per_segment = advantages[batch.segment_rollout[segments]].astype(np.float32)
    tokens = np.repeat(per_segment, [int(mask.sum()) for mask in masks])
    return MicroBatch(packed, torch.ones(len(tokens), dtype=torch.bool, device=device), sampled(batch.logprobs),
                      torch.from_numpy(tokens).to(device), sampled(batch.versions))


@dataclass
class TokenSums:
    """Running sums and maxima over the sampled tokens that this rank has computed; every rank has the same keys."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(
        ("tokens", "clipped", "corrected", "ratio", "ratio_squared", "entropy", "gap", "gap_tokens", "gap_all", "gap_all_tokens"), 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: {"ratio": 0.0, "gap": 0.0})

    def add_loss(self, mask: torch.Tensor, clipped: torch.Tensor, corrected: torch.Tensor, ratio: torch.Tensor,
                 entropy: torch.Tensor) -> None:
        if not mask.any():
            return
        ratio = ratio.double()
        values = {"tokens": mask.sum(), "clipped": clipped.sum(), "corrected": corrected.sum(), "ratio": ratio.sum(),
                  "ratio_squared": ratio.square().sum(), "entropy": entropy.double().sum()}
        for name, value in values.items():
            self.sums[name] += value.item()
        self.maxima["ratio"] = max(self.maxima["ratio"], ratio.max().item())

    def add_gap(self, micro: MicroBatch, reference: torch.Tensor, version: int) -> None:
        """|trainer's log-prob - engine's| of all tokens, and of those sampled from the version that the step starts from."""
        gap = (reference - micro.rollout).abs().double()[micro.mask]
        current = gap[micro.versions[micro.mask] == version]
        for name, values in (("gap", current), ("gap_all", gap)):
            self.sums[name] += values.sum().item()
            self.sums[f"{name}_tokens"] += len(values)
        if len(current):
            self.maxima["gap"] = max(self.maxima["gap"], current.max().item())
