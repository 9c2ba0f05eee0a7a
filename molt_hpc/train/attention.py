"""Causal attention within the segments of a packed row, at the cost of the segments and not of the row.

A mask over the whole row would cost its length squared: with short segments, nearly all of it wasted. Here
segments of similar length are put side by side as a batch, filled up on the right: a causal query never
looks to its right, so the filling needs no mask, and the fast kernels stay available.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "molt_hpc_segments"
"""How transformers knows this attention."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SIMILAR = 0.6
"""A segment shorter than this share of the longest one in its batch starts a new batch."""


@dataclass
class SegmentLayout:
    """Where the tokens of a packed row of T go.

    batches: int64 [B, L] each, the row's position of every token of B segments, the last one repeated
    as filling. back: int64 [T], where each token is found in the batches laid end to end.
    """

    batches: list[torch.Tensor]
    back: torch.Tensor


def build_layout(lengths: list[int], device: torch.device) -> SegmentLayout:
    """Group the segments of a packed row by length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        if not batches or lengths[segment] < SIMILAR * lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(segment)
    index, back, offset = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for batch in batches:
        longest = lengths[batch[0]]
        steps = torch.arange(longest)
        index.append(torch.stack([starts[s] + steps.clamp(max=lengths[s] - 1) for s in batch]).to(device))
        for s in batch:
            back[starts[s]:starts[s + 1]] = offset + torch.arange(lengths[s])
            offset += longest
    return SegmentLayout(index, back.to(device))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout, causal: Attention) -> torch.Tensor:
    """query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, Hq, T, D], by `causal` on batches [B, H, L, D] of segments."""
    parts = []
    for index in layout.batches:
        q, k, v = (tensor[0][:, index].transpose(0, 1) for tensor in (query, key, value))
        parts.append(causal(q, k, v).transpose(0, 1).flatten(1, 2))
    flat = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return flat[:, layout.back][None]


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
    """Causal attention over a batch [B, H, L, D] of sequences that all start at 0.

    window: how many tokens, itself included, a token sees; None: all before it.
    """
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    if grouped:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def segment_attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                      scaling: float | None = None, segment_layout: SegmentLayout | None = None, sliding_window: int | None = None,
                      **options: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; the layout comes down from the model's keyword arguments. Returns [1, T, Hq, D]."""
    changed = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if segment_layout is None or changed:
        raise ValueError(f"{type(module).__name__}: expected plain causal attention over packed segments, got "
                         f"{', '.join(changed) or 'no segment layout'}; set fsdp.attn_implementation to eager")
    causal = partial(causal_attention, scale=scaling, window=sliding_window)
    return attend(query, key, value, segment_layout, causal).transpose(1, 2).contiguous(), None


class CustomAttention:
    """The same around an attention of AutoModel's own, which takes no keyword of ours: the layout is handed over beforehand."""

    def __init__(self, inner: Callable[..., torch.Tensor]):
        self.inner = inner
        self.layout: SegmentLayout | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.layout is None or options != {"is_causal": True}:
            raise ValueError(f"expected plain causal attention over packed segments, got the options {sorted(options)}")
        return attend(query, key, value, self.layout, partial(self.inner, **options))


def use_segment_attention(module: nn.Module) -> list[CustomAttention] | None:
    """Switch a model that was built with sdpa to this attention.

    Returns the attentions to hand each layout to (none for transformers' own models), or None if
    the model keeps another attention.
    """
    if isinstance(module, PreTrainedModel):
        if module.config._attn_implementation != "sdpa":
            return None
        AttentionInterface.register(NAME, segment_attention)
        text = module.config.get_text_config()
        module.set_attn_implementation(NAME if text is module.config else {"text_config": NAME})  # a vision tower keeps its own
        return [] if text._attn_implementation == NAME else None
    parts = [part for part in module.modules() if hasattr(part, "attn_func")]
    if not parts or any(part.backend.attn != "sdpa" for part in parts):
        return None
    for part in parts:
        part.attn_func = CustomAttention(part.attn_func)
    return [part.attn_func for part in parts]
