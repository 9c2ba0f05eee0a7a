"""Reference and critic on training ranks of their own give what they give on the actor's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from molt_hpc.train.apart import put, take
from molt_hpc.train.collectives import outcome_of, value_of
from molt_hpc.train.optim import BadStep
from tests.train.ranks import run_ranks


@pytest.mark.parametrize("size", [0, 3, 10 << 20])
def test_a_message_of_any_size_passes_through_the_store_and_leaves_nothing_there(size: int):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before, raw = store.num_keys(), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    put(store, "ask0", raw)
    assert take(store, "ask0") == raw and store.num_keys() == before


@pytest.mark.parametrize("error", [ValueError, BadStep])
def test_an_error_reaches_the_asking_side_as_what_it_was(error: type[Exception]):
    def fail() -> bytes:
        raise error("why")

    with pytest.raises(error, match="^why$"):
        value_of(outcome_of(fail))
    assert value_of(outcome_of(lambda: b"")) == b""


@pytest.mark.slow
def test_a_run_with_own_ranks_learns_resumes_and_reports_as_one_without(tiny_qwen3, tiny_models, write_config, tmp_path: Path):
    options = {"algo__advantage__estimator": "gae", "critic__adam__lr": 1e-3, "algo__kl__init_coef": 0.1, "train__batch_size": 2,
               "ref__model_name_or_path": str(tiny_models("qwen3", seed=1)), "actor__backend": "automodel"}
    run_ranks("train", 2, write_config(tiny_qwen3, "together.toml", **options), tmp_path / "together", 1, 3)
    apart = write_config(tiny_qwen3, "apart.toml", **options, ref__num_procs=1, critic__num_procs=1)
    run_ranks("train", 4, apart, tmp_path / "first", 1, 2, 2)
    assert len(list((tmp_path / "run" / "checkpoints" / "step_000002" / "critic").iterdir())) >= 2
    run_ranks("train", 4, apart, tmp_path / "second", 3, 3, "", "resume")
    together = json.loads((tmp_path / "together.json").read_text())[0]
    found = [record for name in ("first", "second") for record in json.loads((tmp_path / f"{name}.json").read_text())[0]]
    for one, two in zip(together, found, strict=True):
        assert one.keys() == two.keys() and one["critic_grad_norm"] > 0 and one["kl_mean"] > 0
        for key in ("loss", "grad_norm", "kl_mean", "critic_loss", "critic_grad_norm", "value_mean", "return_mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key
    one, two = load_file(tmp_path / "together.safetensors"), load_file(tmp_path / "second.safetensors")
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-4
