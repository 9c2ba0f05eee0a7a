"""A resumed run trains on bit for bit, and what is exported is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_hpc.train.checkpoint import checkpoint_folder, nearest
from tests.train.ranks import run_ranks


def assert_resumes_bit_equal(config: Path, folder: Path) -> None:
    run_ranks("train", 2, config, folder / "straight", 1, 4, 2)
    assert (checkpoint_folder(folder / "run", 2) / "DONE").is_file()
    run_ranks("train", 2, config, folder / "second", 3, 4, "", "resume")
    straight, resumed = load_file(folder / "straight.safetensors"), load_file(folder / "second.safetensors")
    assert straight.keys() == resumed.keys()
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name
    records = json.loads((folder / "straight.json").read_text())
    assert records[0] == records[1], "the ranks report different metrics"
    assert records[0][2:] == json.loads((folder / "second.json").read_text())[0]


def test_training_resumes_bit_equal_in_a_new_process(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3, actor__lr_scheduler="linear", train__batch_size=2, train__max_epochs=2, rollout__batch_size=4)
    assert_resumes_bit_equal(config, tmp_path)


@pytest.mark.slow
def test_critic_muon_and_the_kl_coefficient_resume_too(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3, actor__optim="muon", algo__advantage__estimator="gae", algo__kl__init_coef=0.1,
                          algo__kl__target=0.001, algo__kl__horizon=100)
    assert_resumes_bit_equal(config, tmp_path)
    coefficients = [record["kl_coef"] for record in json.loads((tmp_path / "straight.json").read_text())[0]]
    assert len(set(coefficients)) == len(coefficients)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [
    ("qwen3", {}), ("qwen3", {"fsdp__tp_size": 2}), ("qwen3_moe", {"fsdp__ep_size": 2})], ids=["dense", "tp2", "ep2"])
def test_automodel_training_resumes_bit_equal(tiny_models, write_config, tmp_path: Path, kind, options):
    assert_resumes_bit_equal(write_config(tiny_models(kind), actor__backend="automodel", **options), tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_opens_on_one(tiny_qwen3, write_config, tmp_path: Path):
    config = write_config(tiny_qwen3)
    run_ranks("train", 2, config, tmp_path / "two", 1, 2, 2)
    run_ranks("train", 1, config, tmp_path / "one", 3, 3, "", "resume")
    run_ranks("train", 2, config, tmp_path / "both", 3, 3, "", "resume")
    one, both = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "both.safetensors")
    assert max((one[name] - both[name]).abs().max().item() for name in one) < 1e-5
    assert nearest(tmp_path / "run") == checkpoint_folder(tmp_path / "run", 2)


@pytest.mark.parametrize(("kind", "options"), [
    ("qwen3", {}),
    pytest.param("qwen3_tied", {}, marks=pytest.mark.slow), pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
    pytest.param("qwen3", {"actor__backend": "automodel", "fsdp__tp_size": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3_tied", {"actor__backend": "automodel"}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", {"actor__backend": "automodel", "fsdp__ep_size": 2}, marks=pytest.mark.slow)],
    ids=["dense", "tied", "moe", "automodel tp2", "automodel tied", "automodel ep2"])
def test_the_exported_folder_opens_and_scores_like_the_trainer(tiny_models, write_config, tmp_path: Path, kind, options):
    model = tiny_models("qwen3", tied=True) if kind == "qwen3_tied" else tiny_models(kind)
    run_ranks("export", 2, write_config(model, **options), tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = load_file(tmp_path / "hf.expected")
    with torch.no_grad():
        logits = exported(input_ids=expected["ids"][None]).logits[0]
    log_probs = torch.log_softmax(logits[:-1], -1).gather(-1, expected["ids"][1:, None])[:, 0]
    assert (log_probs - expected["log_probs"]).abs().max() < 1e-5
    original = load_file(model / "model.safetensors")
    trained = load_file(tmp_path / "hf" / "model.safetensors")
    assert trained.keys() == original.keys()
    assert any(not torch.equal(trained[name], original[name]) for name in original)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert (tmp_path / "hf" / "generation_config.json").is_file()


@pytest.mark.slow
def test_the_export_keeps_the_dtype_of_the_original_checkpoint(tiny_models, write_config, tmp_path: Path):
    run_ranks("export", 1, write_config(tiny_models("qwen3", dtype="bfloat16")), tmp_path / "hf")
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
