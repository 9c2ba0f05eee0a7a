"""The gradient does not depend on ranks, token budget, packing or how a rollout is cut into segments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_tiny_vision
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
def test_gradient_of_a_batch_with_few_images_does_not_depend_on_ranks_and_packing(write_config, tmp_path: Path):
    """With the small budget there are micro-batches without an image on either rank; the vision tower's gradient must not notice."""
    model = make_tiny_vision("qwen3_vl", tmp_path / "model")
    run_ranks("invariance", 1, write_config(model), tmp_path, 100000)
    run_ranks("invariance", 2, write_config(model, "automodel.toml", actor__backend="automodel"), tmp_path, 60, 100000)
    reference = load_file(tmp_path / "1_100000.safetensors")
    assert all(tensor.abs().max() > 1e-7 for name, tensor in reference.items())
    for name in ("2_60", "2_100000"):
        assert largest_difference(reference, load_file(tmp_path / f"{name}.safetensors")) < 1e-4, name


ON_ENGINE = {"algo.advantage.proximal": "rollout", "algo.advantage.is_correction_level": "off"}
VARIANTS = {
    **{loss: ON_ENGINE | {"actor.loss_mode": loss} for loss in ("ppo", "gspo", "dppo", "sapo")},
    "cispo": ON_ENGINE | {"actor.loss_mode": "cispo", "actor.eps_clip_low_high": [0.2, 1.2]},
    **{name: {"actor.loss_aggregation": name} for name in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")},
    "two steps": {"train.batch_size": 2, "actor.loss_mode": "gspo", "algo.advantage.is_correction_preset": "icepop"},
    "seq": {"algo.advantage.is_correction_preset": "mis", "algo.advantage.is_correction_threshold": [0.01, 100.0]},
    "geo by version": {"algo.advantage.is_correction_preset": "seq-mask-tis", "algo.advantage.is_correction_by_version": True},
    "kl and entropy": {"algo.kl.init_coef": 0.5, "algo.kl.use_loss": True, "algo.kl.estimator": "k3", "actor.entropy_coef": 0.1},
    "gae": {"algo.advantage.estimator": "gae", "algo.advantage.lam": 0.9, "algo.kl.init_coef": 0.2, "critic.adam.lr": 0.05},
    "reinforce": {"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.95, "fsdp.defer_grad_sync": True},
}
"""Every loss, aggregation and kind of correction; all of them make two epochs, so that the policy has left its start."""
ON_FOUR = ("gspo", "seq-mean-token-sum-norm", "two steps", "kl and entropy", "gae")
"""Those of which every denominator and every exchange between ranks is a different one."""


@pytest.mark.slow
def test_what_is_learned_is_the_same_in_float64_on_one_two_and_four_ranks(tiny_qwen3, tiny_models, write_config, tmp_path: Path):
    options = {"train__max_epochs": 2, "actor__adam__lr": 0.05, "rollout__batch_size": 4, "rollout__n_samples_per_prompt": 4,
               "data__max_len": 64}
    config = write_config(tiny_qwen3, **options)
    variants = VARIANTS | {"kl and entropy": VARIANTS["kl and entropy"] | {"ref.model_name_or_path": str(tiny_models("qwen3", seed=1))}}
    for ranks in (1, 2, 4):
        chosen = {name: options for name, options in variants.items() if ranks < 4 or name in ON_FOUR}
        run_ranks("double_invariance", ranks, config, tmp_path, json.dumps(chosen), timeout=500)
    for name in VARIANTS:
        reference = load_file(tmp_path / f"1_{name}.safetensors")
        for ranks in (1, 2, 4) if name in ON_FOUR else (1, 2):
            for label, moved in load_file(tmp_path / f"{ranks}_{name}.safetensors").items():
                expected = reference["small" if label.startswith("small") else "100000"]
                assert expected.abs().max() > 1e-6
                assert (moved - expected).abs().max() < 1e-6 * expected.abs().max(), f"{name}, {ranks} ranks, {label}"


MASKED = {"rollout__top_k": 20}
"""The batch comes with sampling masks, and with the experts that an engine chose."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "options"), [
    ("qwen3", 2, {}), ("qwen3", 2, {"fsdp__tp_size": 2, **MASKED}), ("qwen3", 4, {"fsdp__tp_size": 2}),
    ("qwen3_moe", 2, {"fsdp__ep_size": 2, **MASKED, "train__routing_replay": True}), ("qwen3_moe", 4, {"fsdp__ep_size": 2}),
    ("qwen3_moe", 2, {"actor__gradient_checkpoint": "full", **MASKED, "train__routing_replay": True}),
], ids=["dense", "tp2", "tp2 x dp2", "ep2", "ep2 x dp2", "moe with recomputation"])
def test_automodel_gives_the_gradient_of_plain_transformers(tiny_models, write_config, tmp_path: Path, kind, ranks, options):
    model = tiny_models(kind)
    run_ranks("invariance", 1, write_config(model, **{k: v for k, v in options.items() if k.startswith(("rollout", "train"))}), tmp_path, 100000)
    reference = load_file(tmp_path / "1_100000.safetensors")
    (tmp_path / "automodel").mkdir()
    config = write_config(model, "automodel.toml", actor__backend="automodel", **options)
    run_ranks("invariance", ranks, config, tmp_path / "automodel", 90)
    assert largest_difference(reference, load_file(tmp_path / "automodel" / f"{ranks}_90.safetensors")) < 1e-5
