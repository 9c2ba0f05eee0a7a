"""The packed, chunked forward pass gives what plain transformers gives for one sequence after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from molt_hpc.config import FsdpConfig
from molt_hpc.train.logprob import ScoringHead, TokenScores, pack_segments
from molt_hpc.train.model import build_model

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")
LENGTHS, TEMPERATURES = (7, 19, 2, 30, 12), (1.0, 0.7, 1.0, 1.3, 0.5)


@pytest.fixture(scope="module")
def segments() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 330, n) for n in LENGTHS]
    return ids, [np.r_[False, rng.random(n - 1) < 0.6] | (np.arange(n) == n - 1) for n in LENGTHS]


def one_by_one(model, ids, masks) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropies = [], []
    for tokens, mask, temperature in zip(ids, masks, TEMPERATURES, strict=True):
        scores = torch.log_softmax(model(input_ids=torch.tensor(tokens)[None]).logits[0].float() / temperature, -1)[:-1]
        chosen = torch.tensor(mask[1:])
        log_probs.append(scores.gather(-1, torch.tensor(tokens)[1:, None])[chosen, 0])
        entropies.append(-(scores.exp() * scores).sum(-1)[chosen])
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("options", [{"kind": "qwen3"}, {"kind": "llama"}, {"kind": "qwen3", "tied": True}, {"kind": "qwen3_moe"}],
                         ids=["qwen3", "llama", "tied", "moe"])
def test_packed_scores_and_gradients_equal_plain_transformers(tiny_models, segments, options):
    folder = tiny_models(**options)
    model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32"), gradient_checkpoint="none")
    model.head.chunk_elements = 384 * 7
    log_probs, entropies = model.score(pack_segments(*segments, TEMPERATURES, CPU))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, expected_entropies = one_by_one(reference, *segments)
    assert (log_probs - expected).abs().max() < 1e-5
    assert (entropies - expected_entropies).abs().max() < 1e-5
    weights = torch.linspace(-1, 1, len(expected))
    (log_probs * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        scale = wanted[name].grad.abs().max()
        assert (parameter.grad.full_tensor() - wanted[name].grad).abs().max() < 1e-5 * scale, name


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_neither_scores_nor_gradients(chunk: int):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((10, 4), (6, 4)))
    targets, inverse = torch.arange(10) % 6, torch.linspace(0.5, 2, 10, dtype=torch.float64)
    log_probs, entropy = TokenScores.apply(hidden, weight, targets, inverse, chunk, 0, None)
    expected = torch.log_softmax(hidden @ weight.T * inverse[:, None], -1)
    torch.testing.assert_close(log_probs, expected.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    assert torch.autograd.gradcheck(lambda h, w: TokenScores.apply(h, w, targets, inverse, chunk, 0, None)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: TokenScores.apply(h, w, targets, inverse, chunk, 0, None, True), (hidden, weight))


def test_the_head_never_holds_all_logits(tiny_qwen3):
    """The largest tensor that autograd keeps is far smaller than tokens x vocabulary."""
    saved: list[int] = []
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        TokenScores.apply(hidden, weight, torch.arange(64), torch.ones(64), 4, 0, None)[0].sum().backward()
    assert max(saved) == weight.numel() < 64 * 1000


def test_gradient_checkpointing_changes_nothing(tiny_qwen3, segments):
    grads = []
    for recompute in ("none", "full", "selective"):
        model = build_model(tiny_qwen3, "transformers", FsdpConfig(param_dtype="float32"), gradient_checkpoint=recompute)
        model.score(pack_segments(*segments, TEMPERATURES, CPU))[0].sum().backward()
        grads.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    assert all(torch.allclose(grads[0][name], other[name], atol=1e-6) for other in grads[1:] for name in grads[0])


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(tiny_qwen3, segments):
    model = build_model(tiny_qwen3, "transformers", FsdpConfig(param_dtype="bfloat16"), gradient_checkpoint="none")
    log_probs, _ = model.score(pack_segments(*segments, TEMPERATURES, CPU))
    log_probs.sum().backward()
    exact, _ = one_by_one(AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32), *segments)
    assert 1e-5 < (log_probs - exact).abs().max() < 0.3
    assert {p.dtype for _, p in model.named_parameters()} == {p.grad.dtype for _, p in model.named_parameters()} == {torch.float32}


def test_an_output_layer_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="has a bias"):
        ScoringHead(torch.nn.Linear(4, 8))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        build_model(tmp_path, "transformers", FsdpConfig(), gradient_checkpoint="none")
