"""Log-probs of sampled tokens from one packed forward pass, without a [tokens, vocabulary] tensor.

A micro-batch is one row: its segments laid end to end, positions restarting at each, attention
kept inside of each. The model's output layer is taught to answer with [log-prob, entropy] of the
tokens asked for instead of logits: it works through them in chunks and computes each chunk's
logits again in the backward pass. It runs where the logits would have been computed, so parameter
sharding (FSDP, tensor parallel) sees nothing unusual.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from molt_hpc.train.attention import SegmentLayout, build_layout
from molt_hpc.train.vision import Image

CHUNK_ELEMENTS = 1 << 25
"""Logits in one chunk (128 MiB of float32)."""
EXCLUDED = -1e9
"""In place of the logit of a token that could not be sampled: no probability, and no infinity that a gradient of 0 would make NaN."""


@dataclass
class Kept:
    """Among which tokens each of N tokens was sampled: the engine's sampling masks, as it sent them.

    ids: int64 [M], token by token. rows: int64 [M], whose each is. counts: int64 [N], of each token; 0: it was sampled among all.
    offsets: N + 1 ints on the CPU, token n's are ids[offsets[n]:offsets[n + 1]].
    """

    ids: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor
    offsets: list[int]

    @classmethod
    def of(cls, counts: np.ndarray, ids: np.ndarray, device: torch.device) -> "Kept":
        arrays = (ids, np.repeat(np.arange(len(counts)), counts), counts)
        return cls(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays), [0, *np.cumsum(counts).tolist()])

    def exclude(self, logits: torch.Tensor, part: slice, vocab_start: int) -> torch.Tensor:
        """The logits [n, V] of the tokens `part`, ids vocab_start .. vocab_start + V, with EXCLUDED for all that were not kept."""
        size, own = logits.shape[1], slice(self.offsets[part.start], self.offsets[part.stop])
        ids, rows = self.ids[own] - vocab_start, self.rows[own] - part.start
        kept = torch.zeros((len(logits), size + 1), dtype=torch.bool, device=logits.device)  # the last column is for ids of other ranks
        kept[rows, torch.where((ids >= 0) & (ids < size), ids, size)] = True
        return logits.masked_fill_(~(kept[:, :size] | (self.counts[part, None] == 0)), EXCLUDED)


@dataclass
class Packed:
    """One micro-batch of N predicted tokens in a row of T.

    token_ids, position_ids: int64 [1, T]. lengths: of the segments. rows: int64 [N], the position
    whose hidden state predicts each token (one before it). targets: int64 [N].
    inverse_temperature: float32 [N]. images: of each segment, None if the whole batch has none; stand_in: see vision.py.
    kept: the sampling masks, None if the whole batch has none. routed: int16 [T, layers, k], see routing.py.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    targets: torch.Tensor
    inverse_temperature: torch.Tensor
    images: list[list[Image]] | None = None
    stand_in: tuple[torch.Tensor, torch.Tensor] | None = None
    kept: Kept | None = None
    routed: torch.Tensor | None = None

    @cached_property
    def layout(self) -> SegmentLayout:
        return build_layout(self.lengths, self.token_ids.device)

    def block_mask(self) -> torch.Tensor:
        """bool [1, 1, T, T]: True where a position may attend to another, causally and within its segment."""
        segment = torch.repeat_interleave(torch.arange(len(self.lengths), device=self.token_ids.device),
                                          torch.tensor(self.lengths, device=self.token_ids.device))
        return ((segment[:, None] == segment[None, :]).tril())[None, None]


def pack_segments(token_ids: list[np.ndarray], predicted: list[np.ndarray], temperatures: list[float], device: torch.device,
                  images: list[list[Image]] | None = None) -> Packed:
    """Lay segments end to end. predicted: bool [T_s] each, the tokens whose log-probs are wanted; never the first."""
    assert len(token_ids) == len(predicted) == len(temperatures) >= 1
    assert not any(mask[0] for mask in predicted), "the first token of a segment has no context to be predicted from"
    lengths = [len(ids) for ids in token_ids]
    flat = np.concatenate(token_ids).astype(np.int64)
    wanted = np.flatnonzero(np.concatenate(predicted))
    temperature = np.repeat(np.asarray(temperatures, np.float32), lengths)[wanted]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Packed(tensor(flat)[None], tensor(np.concatenate([np.arange(n) for n in lengths]))[None], lengths,
                  tensor(wanted - 1), tensor(flat[wanted]), tensor(1.0 / temperature), images)


class TokenScores(torch.autograd.Function):
    """Log-prob and entropy of N tokens from hidden states [N, H] and the output weight [V, H], chunk by chunk.

    With a process group, each rank holds `weight` rows vocab_start .. vocab_start + len(weight) and
    the sums run over the group. The entropy has a gradient only if `entropy_gradient` says so. With `kept` both are those of the
    distribution over the kept tokens alone, which is what the engine sampled from.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, inverse_temperature, chunk, vocab_start, group, entropy_gradient=False, kept=None):
        log_probs, entropies, normalisers = [], [], []
        for part in _chunks(len(targets), chunk):
            logits = _logits(hidden, weight, inverse_temperature, part, kept, vocab_start)
            largest = logits.amax(-1)
            _all_reduce(largest, group, dist.ReduceOp.MAX)
            weights = (logits - largest[:, None]).exp()
            local, inside = _local_targets(targets[part], vocab_start, len(weight))
            target = torch.where(inside, logits.gather(-1, local[:, None])[:, 0], 0.0)
            sums = torch.stack([weights.sum(-1), (weights * logits).sum(-1), target])
            _all_reduce(sums, group, dist.ReduceOp.SUM)
            normaliser = largest + sums[0].log()
            log_probs.append(sums[2] - normaliser)
            entropies.append(normaliser - sums[1] / sums[0])
            normalisers.append(normaliser)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, inverse_temperature, torch.cat(normalisers), entropy)
        ctx.chunk, ctx.vocab_start, ctx.entropy_gradient, ctx.kept = chunk, vocab_start, entropy_gradient, kept
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(log_probs), entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, targets, inverse_temperature, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype)
        for part in _chunks(len(targets), ctx.chunk):
            scores = _logits(hidden, weight, inverse_temperature, part, ctx.kept, ctx.vocab_start).sub_(normaliser[part, None])
            local, inside = _local_targets(targets[part], ctx.vocab_start, len(weight))
            if ctx.entropy_gradient:  # of the log-prob: 1 on the target - p; of the entropy: -p (log p + entropy)
                grad = scores.exp().mul_(-(grad_log_prob[part, None] + grad_entropy[part, None] * (scores + entropy[part, None])))
                grad.scatter_add_(-1, local[:, None], (grad_log_prob[part] * inside)[:, None])
                grad.mul_(inverse_temperature[part, None])
            else:
                grad = scores.exp_().neg_().scatter_add_(-1, local[:, None], inside[:, None].to(scores.dtype))
                grad.mul_((grad_log_prob[part] * inverse_temperature[part])[:, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 7


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, count)) for at in range(0, count, chunk)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, inverse_temperature: torch.Tensor, part: slice, kept: Kept | None,
            vocab_start: int) -> torch.Tensor:
    """Of the tokens `part`, at least float32, divided by the temperature after the cast, as the engine does."""
    logits = hidden[part] @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * inverse_temperature[part, None]
    return kept.exclude(logits, part, vocab_start) if kept else logits


def _local_targets(targets: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inside = (targets >= start) & (targets < start + size)
    return torch.where(inside, targets - start, 0), inside


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp) -> None:
    if group is not None:
        dist.all_reduce(tensor, operation, group)


class ScoringHead:
    """Replaces the forward of a model's output layer; `ask` says what the next forward pass must answer."""

    def __init__(self, layer: torch.nn.Linear, chunk_elements: int = CHUNK_ELEMENTS):
        if getattr(layer, "bias", None) is not None:
            raise ValueError("the model's output layer has a bias, which the chunked head does not support")
        self.layer, self.chunk_elements, self.entropy_gradient = layer, chunk_elements, False
        self.asked: Packed | None = None
        layer.forward = self.forward

    def ask(self, packed: Packed) -> None:
        self.asked = packed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] -> [1, N, 2]: log-prob and entropy (under tensor parallelism wrapped for the layer's hooks)."""
        assert self.asked is not None, "a forward pass without a request"
        packed, self.asked = self.asked, None
        weight, start, mesh = self.layer.weight, 0, None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            assert mesh.ndim == 1 and weight.placements == (Shard(0),), f"output weight placed as {weight.placements}"
            start = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            # Each rank differentiates its part of the vocabulary only: the gradients are to be summed.
            hidden = hidden.to_local(grad_placements=[Partial()])
        chunk = max(1, self.chunk_elements // len(weight))
        log_probs, entropies = TokenScores.apply(hidden[0, packed.rows], weight, packed.targets, packed.inverse_temperature, chunk,
                                                 start, mesh.get_group() if mesh else None, self.entropy_gradient, packed.kept)
        scores = torch.stack((log_probs[None], entropies[None]), -1)
        return scores if mesh is None else DTensor.from_local(scores, mesh, [Shard(-1)], run_check=False)


class ValueHead(torch.nn.Module):
    """A critic's head in place of the output layer: the value of each position that a sampled token is predicted from.

    Its parameters are float32 (or the masters' wider dtype), small, and the same on every rank; the gradient is summed by
    TrainModel.finish_gradients. The output layer's own weight stays in the model, unused.
    """

    def __init__(self, layer: torch.nn.Linear, size: int, deviation: float, seed: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        weight = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * deviation
        self.weight = torch.nn.Parameter(weight.to(device, dtype))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device, dtype=dtype))
        self.layer, self.asked = [layer], None  # in a list: the layer is no part of this module
        layer.forward = self.forward

    def ask(self, packed: Packed) -> None:
        self.asked = packed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] -> [1, N, 2]: the value, and 0 where a policy has its entropy. Tensor-parallel ranks compute it all alike."""
        mesh = hidden.device_mesh if isinstance(hidden, DTensor) else None
        hidden = hidden if mesh is None else hidden.to_local()
        values = hidden[0, self.asked.rows].to(self.weight.dtype) @ self.weight + self.bias
        scores = torch.stack((values[None], torch.zeros_like(values[None])), -1)
        return scores if mesh is None else DTensor.from_local(scores, mesh, [Shard(-1)], run_check=False)


def read_scores(output: torch.Tensor, tensor_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [N], entropies [N]) from what the model returned in place of logits."""
    if isinstance(output, DTensor):
        output = output.to_local()
    elif output.shape[-1] > 2:
        output = output[..., 2 * tensor_rank:2 * tensor_rank + 2]
    return output[0, :, 0], output[0, :, 1]
