"""The actor on two ranks: it learns, reports the same on all ranks, and refuses what is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.ranks import run_ranks


def test_what_one_rank_cannot_train_on_is_an_error_on_all_and_changes_nothing(tiny_qwen3, write_config, tmp_path: Path):
    run_ranks("broken", 2, write_config(tiny_qwen3), tmp_path / "metrics.json")
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
