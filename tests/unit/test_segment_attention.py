"""Attention within segments equals masked attention over the row, for any lengths, heads and windows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from molt_hpc.config import FsdpConfig
from molt_hpc.train.attention import attend, build_layout, causal_attention, segment_attention
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.model import build_model, check_packing

CPU = torch.device("cpu")


def row_mask(lengths: list[int], window: int | None) -> torch.Tensor:
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(segment))[:, None] - torch.arange(len(segment))[None]
    return (segment[:, None] == segment[None]) & (distance >= 0) & (distance < (window or len(segment)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.sampled_from([None, 1, 5, 100]))
@settings(max_examples=60, deadline=None)
def test_it_equals_masked_attention_with_its_gradients(lengths, heads, window):
    generator = torch.Generator().manual_seed(sum(lengths))
    query, key, value = (torch.randn(1, count, sum(lengths), 8, generator=generator, dtype=torch.float64, requires_grad=True)
                         for count in (heads[0], heads[1], heads[1]))
    expected = F.scaled_dot_product_attention(query, key.repeat_interleave(heads[0] // heads[1], 1),
                                              value.repeat_interleave(heads[0] // heads[1], 1), row_mask(lengths, window), scale=0.3)
    found = attend(query, key, value, build_layout(lengths, CPU), partial(causal_attention, scale=0.3, window=window))
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(torch.autograd.grad((found * weight).sum(), (query, key, value)),
                           torch.autograd.grad((expected * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(got, wanted)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50))
@settings(deadline=None)
def test_the_layout_wastes_less_than_it_holds(lengths):
    layout = build_layout(lengths, CPU)
    assert sum(index.numel() for index in layout.batches) <= sum(lengths) / 0.6 + 1e-9
    flat = torch.cat([index.flatten() for index in layout.batches])
    assert flat[layout.back].tolist() == list(range(sum(lengths)))


def test_attention_that_is_not_plain_is_refused():
    one = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match="got softcap; set fsdp.attn_implementation to eager"):
        segment_attention(torch.nn.Identity(), one, one, one, None, segment_layout=build_layout([4], CPU), softcap=30.0)
    with pytest.raises(ValueError, match="got no segment layout"):
        segment_attention(torch.nn.Identity(), one, one, one, None)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, sliding_window=6, initializer_range=0.2)
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_is_kept(process_group, windowed, attention: str):
    fsdp = FsdpConfig(param_dtype="float32", attn_implementation=attention)
    model = build_model(windowed, "transformers", fsdp, gradient_checkpoint=False)
    rng = np.random.default_rng(0)
    segments = [rng.integers(3, 250, n) for n in (5, 30, 17)]
    scores, _ = model.score(pack_segments(segments, [np.arange(len(s)) > 0 for s in segments], [1.0] * 3, CPU))
    reference = AutoModelForCausalLM.from_pretrained(windowed, dtype=torch.float32)
    expected = [torch.log_softmax(reference(input_ids=torch.tensor(s)[None]).logits[0, :-1], -1).gather(-1, torch.tensor(s)[1:, None])[:, 0]
                for s in segments]
    assert (scores - torch.cat(expected)).abs().max() < 1e-5


def test_a_model_that_mixes_packed_segments_is_found_out(process_group, tiny_qwen3):
    """The same model with its segments declared as one."""
    model = build_model(tiny_qwen3, "transformers", FsdpConfig(param_dtype="float32"), gradient_checkpoint=False)
    check_packing(model)
    model.module.register_forward_pre_hook(lambda module, args, kwargs: (
        args, kwargs | {"segment_layout": build_layout([kwargs["input_ids"].shape[1]], CPU)}), with_kwargs=True)
    with pytest.raises(ValueError, match="does not keep packed segments apart"):
        check_packing(model)
