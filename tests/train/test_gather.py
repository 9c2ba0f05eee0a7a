"""Weights as they leave the training ranks: names, shapes and dtypes of the published checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.ranks import run_ranks
from tests.weight_fleet import read_folder, rewritten


@pytest.mark.parametrize(("kind", "options"), [("qwen3_moe", {}), ("qwen3_moe", {"actor__backend": "automodel", "fsdp__ep_size": 2})],
                         ids=["transformers", "automodel ep2"])
def test_a_float32_router_of_a_bfloat16_model_stays_float32(tiny_models, write_config, tmp_path: Path, kind, options):
    mixed = rewritten(tiny_models(kind), tmp_path / "mixed", lambda name, t: t if "mlp.gate." in name else t.bfloat16())
    run_ranks("export", 2, write_config(mixed, **options), tmp_path / "hf")
    wanted, found = read_folder(mixed), read_folder(tmp_path / "hf")
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {name: (t.dtype, t.shape) for name, t in wanted.items()}
    assert {t.dtype for t in found.values()} == {torch.float32, torch.bfloat16}
