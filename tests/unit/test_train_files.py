"""Which checkpoint counts, what a replay needs, and the order of fine-tuning rows: pure looks at files and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molt_hpc.config import SftConfig
from molt_hpc.train.checkpoint import checkpoint_folder, checkpoints, nearest, prune
from molt_hpc.train.replay import compare, find_start, read_records
from molt_hpc.train.sft import step_rows


def make_checkpoint(run: Path, step: int, done: bool = True) -> None:
    folder = checkpoint_folder(run, step)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "part").write_text("x")
    if done:
        (folder / "DONE").touch()


def make_shards(run: Path, *steps: int) -> None:
    (run / "trajectories").mkdir(exist_ok=True)
    for step in steps:
        (run / "trajectories" / f"step_{step:06d}.safetensors").touch()


def test_only_finished_checkpoints_count(tmp_path: Path):
    assert nearest(tmp_path) is None
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20, done=False)
    (tmp_path / "checkpoints" / ".step_000030.tmp").mkdir()
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 10]
    assert nearest(tmp_path) == checkpoint_folder(tmp_path, 10)
    assert nearest(tmp_path, 9) == checkpoint_folder(tmp_path, 2)
    assert nearest(tmp_path, 1) is None


def test_pruning_keeps_the_newest_and_never_all(tmp_path: Path):
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    prune(tmp_path, 2)
    assert [step for step, _ in checkpoints(tmp_path)] == [3, 4]
    prune(tmp_path, 0)
    assert [step for step, _ in checkpoints(tmp_path)] == [4]
    assert not checkpoint_folder(tmp_path, 3).exists()


def test_a_replay_starts_after_the_nearest_checkpoint_before_the_step(tmp_path: Path):
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 4)
    make_shards(tmp_path, 3, 4)
    assert find_start(tmp_path, 4) == (checkpoint_folder(tmp_path, 2), 3)


def test_a_replay_without_checkpoints_needs_every_batch(tmp_path: Path):
    make_shards(tmp_path, 1, 2)
    assert find_start(tmp_path, 2) == (None, 1)
    make_shards(tmp_path, 4)
    with pytest.raises(ValueError, match="batch 3 is missing .* every batch from 1 on"):
        find_start(tmp_path, 4)


def test_the_last_record_of_a_step_counts(tmp_path: Path):
    rows = [{"step": 1, "loss": 1.0, "grad_norm": 2.0}, {"event": "resumed"}, {"step": 1, "loss": 3.0, "grad_norm": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_records(tmp_path) == {1: {"step": 1, "loss": 3.0, "grad_norm": 4.0}}


def test_a_run_without_metrics_is_compared_with_nothing(tmp_path: Path):
    assert read_records(tmp_path) == {}
    equal, line = compare(1, {"loss": 1.0, "grad_norm": 1.0}, None)
    assert not equal and "not in metrics.jsonl" in line


@pytest.mark.parametrize(("recorded", "word"), [
    ({"loss": 1e-9, "grad_norm": 2.00001}, "equal"), ({"loss": 1e-9, "grad_norm": 2.001}, "DIFFERENT")])
def test_a_difference_is_judged_by_the_bound(recorded, word):
    equal, line = compare(7, {"loss": 0.0, "grad_norm": 2.0}, recorded)
    assert word in line and equal == (word == "equal")


def steps(count: int, **train) -> list[list[int]]:
    config = SftConfig()
    for name, value in train.items():
        setattr(config.train, name, value)
    return step_rows(count, config)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    found = steps(10, batch_size=4, max_epochs=2)
    assert [len(rows) for rows in found] == [4, 4, 2, 4, 4, 2]
    first, second = sum(found[:3], []), sum(found[3:], [])
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_a_number_of_steps_goes_before_epochs():
    assert len(steps(10, batch_size=4, max_steps=7, max_epochs=1)) == 7
    assert len(steps(100, batch_size=4, max_steps=3)) == 3
