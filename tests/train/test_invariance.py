"""The gradient does not depend on ranks, token budget, packing or how a rollout is cut into segments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.ranks import run_ranks

BUDGETS = (40, 90, 100000)


def largest_difference(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative to the largest gradient of each parameter."""
    assert reference.keys() == other.keys()
    return max(((reference[k] - other[k]).abs().max() / reference[k].abs().max().clamp(min=1e-12)).item() for k in reference)


def test_gradient_of_two_ranks_equals_that_of_one(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3)
    run_ranks("invariance", 1, config, tmp_path, 100000)
    run_ranks("invariance", 2, config, tmp_path, *BUDGETS)
    reference = load_file(tmp_path / "1_100000.safetensors")
    assert reference["model.layers.0.self_attn.q_proj.weight"].abs().max() > 1e-4
    for name in [f"2_{budget}" for budget in BUDGETS] + ["1_split", "2_split"]:
        assert largest_difference(reference, load_file(tmp_path / f"{name}.safetensors")) < 1e-5, name


@pytest.mark.slow
def test_gradient_is_the_same_in_float64_on_one_two_and_four_ranks(tiny_qwen3, tmp_path: Path):
    for ranks in (1, 2, 4):
        run_ranks("double_invariance", ranks, tiny_qwen3, tmp_path, *BUDGETS)
    reference = load_file(tmp_path / f"1_{BUDGETS[-1]}.safetensors")
    for ranks in (1, 2, 4):
        for budget in BUDGETS:
            assert largest_difference(reference, load_file(tmp_path / f"{ranks}_{budget}.safetensors")) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "options"), [
    ("qwen3", 2, {}), ("qwen3", 2, {"fsdp__tp_size": 2}), ("qwen3", 4, {"fsdp__tp_size": 2}),
    ("qwen3_moe", 2, {"fsdp__ep_size": 2}), ("qwen3_moe", 4, {"fsdp__ep_size": 2}), ("qwen3_moe", 2, {"actor__gradient_checkpoint": True}),
], ids=["dense", "tp2", "tp2 x dp2", "ep2", "ep2 x dp2", "moe with recomputation"])
def test_automodel_gives_the_gradient_of_plain_transformers(tiny_models, write_config, tmp_path: Path, kind, ranks, options):
    model = tiny_models(kind)
    run_ranks("invariance", 1, write_config(model), tmp_path, 100000)
    reference = load_file(tmp_path / "1_100000.safetensors")
    (tmp_path / "automodel").mkdir()
    config = write_config(model, "automodel.toml", actor__backend="automodel", **options)
    run_ranks("invariance", ranks, config, tmp_path / "automodel", 90)
    assert largest_difference(reference, load_file(tmp_path / "automodel" / f"{ranks}_90.safetensors")) < 1e-5
