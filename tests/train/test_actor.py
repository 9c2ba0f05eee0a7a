"""The actor on two ranks: it learns, reports the same on all ranks, and leaves out what is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.ranks import run_ranks


def test_what_one_rank_cannot_train_on_is_left_out_by_all_and_stops_them_when_it_goes_on(tiny_qwen3, write_config, tmp_path: Path):
    run_ranks("broken", 2, write_config(tiny_qwen3, train__max_bad_steps=2), tmp_path / "metrics.json")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["grad_norm"] > 0


def test_several_updates_a_batch_move_the_ratio_away_from_one(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3, train__batch_size=2, train__max_epochs=2, actor__lr_scheduler="linear")
    run_ranks("train", 2, config, tmp_path / "several", 1, 2)
    ranks = json.loads((tmp_path / "several.json").read_text())
    assert ranks[0] == ranks[1]
    first, second = ranks[0]
    assert first["optimizer_steps"] == 4
    assert first["ratio_std"] > 0 and first["clip_fraction"] > 0
    assert 0 < second["learning_rate"] < first["learning_rate"]


@pytest.mark.slow
def test_one_update_a_batch_has_ratio_one(tiny_qwen3, write_config, tmp_path: Path):
    run_ranks("train", 2, write_config(tiny_qwen3), tmp_path / "one", 1, 1)
    metrics = json.loads((tmp_path / "one.json").read_text())[0][0]
    assert (metrics["ratio_mean"], metrics["ratio_std"], metrics["clip_fraction"]) == (1.0, 0.0, 0.0)
    assert metrics["optimizer_steps"] == 1 and metrics["micro_batches"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "where"), [(1, "_backward"), (2, "score_all")])
def test_a_micro_batch_that_does_not_fit_is_named_with_the_option_to_lower(tiny_qwen3, write_config, epochs: int, where: str):
    said = run_ranks("out_of_memory", 1, write_config(tiny_qwen3, train__max_tokens_per_gpu=12000, train__max_epochs=epochs))
    assert "out of memory on a micro-batch of 1" in said and "(budget 12000): lower train.max_tokens_per_gpu" in said
    assert f"'{where}'" in said


@pytest.mark.slow
def test_deterministic_steps_are_bit_equal(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3, train__deterministic=True, train__max_epochs=2, actor__loss_mode="gspo")
    for name in ("one", "two"):
        run_ranks("train", 2, config, tmp_path / name, 1, 3)
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


@pytest.mark.slow
def test_what_saves_memory_or_traffic_changes_no_step(tiny_qwen3, write_config, tmp_path: Path):
    run_ranks("train", 2, write_config(tiny_qwen3), tmp_path / "plain", 1, 2)
    plain = load_file(tmp_path / "plain.safetensors")
    for options in ({"fsdp__offload": "full"}, {"fsdp__offload": "optimizer"}, {"fsdp__defer_grad_sync": True},
                    {"actor__gradient_checkpoint": "selective"}):
        run_ranks("train", 2, write_config(tiny_qwen3, "other.toml", **options), tmp_path / "other", 1, 2)
        other = load_file(tmp_path / "other.safetensors")
        assert max((plain[name] - other[name]).abs().max().item() for name in plain) < 1e-4, options


@pytest.mark.slow
def test_muon_on_two_ranks_makes_the_step_of_one(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3, actor__optim="muon", actor__muon__lr=0.01)
    for ranks in (1, 2):
        run_ranks("train", ranks, config, tmp_path / str(ranks), 1, 2)
    paths = (tiny_qwen3 / "model.safetensors", tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    start, one, two = (load_file(path) for path in paths)
    matrix = "model.layers.0.self_attn.q_proj.weight"
    assert (one[matrix] - start[matrix]).abs().max() > 1e-3
    # Newton-Schulz runs in bfloat16: equal up to its rounding
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 2e-3


@pytest.mark.slow
def test_the_critic_learns_alone_while_the_actor_is_frozen_and_the_same_with_tensor_parallelism(tiny_qwen3, write_config, tmp_path: Path):
    options = {"algo__advantage__estimator": "gae", "actor__freezing_steps": 2, "critic__adam__lr": 1e-3, "algo__kl__init_coef": 0.01}
    config = write_config(tiny_qwen3, **options)
    parallel = write_config(tiny_qwen3, "tp2.toml", actor__backend="automodel", fsdp__tp_size=2, **options)
    run_ranks("train", 2, config, tmp_path / "frozen", 1, 2)
    start, found = load_file(tiny_qwen3 / "model.safetensors"), load_file(tmp_path / "frozen.safetensors")
    assert all(torch.equal(start[name], found[name]) for name in start)
    records = {}
    for name, path in (("dp2", config), ("tp2", parallel)):
        run_ranks("train", 2, path, tmp_path / name, 1, 3)
        records[name], other = json.loads((tmp_path / f"{name}.json").read_text())
        assert records[name] == other and [r["optimizer_steps"] for r in other] == [0, 0, 1]
    assert not torch.equal(start["model.embed_tokens.weight"], load_file(tmp_path / "dp2.safetensors")["model.embed_tokens.weight"])
    for one, two in zip(*records.values(), strict=True):
        assert one["critic_grad_norm"] > 0
        for key in ("critic_loss", "critic_grad_norm", "value_mean", "return_mean", "loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key


@pytest.mark.slow
def test_a_frozen_router_keeps_its_weights_and_the_experts_learn(tiny_models, write_config, tmp_path: Path):
    model = tiny_models("qwen3_moe")
    run_ranks("train", 1, write_config(model, actor__freeze_moe_router=True), tmp_path / "moe", 1, 1)
    start, found = load_file(model / "model.safetensors"), load_file(tmp_path / "moe.safetensors")
    changed = {name for name in start if not torch.equal(start[name], found[name])}
    assert "model.layers.0.mlp.gate.weight" not in changed and "model.layers.0.mlp.experts.0.gate_proj.weight" in changed
