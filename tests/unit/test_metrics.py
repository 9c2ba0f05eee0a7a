"""The step record: file, event file and line say the same."""

import json

import pytest

from molt_hpc.observe.metrics import StepWriter, read_metrics, step_line

RECORD = {"step": 3, "total_steps": 9, "attempt": 1, "reward_mean": 0.25, "pass_rate": 0.2, "loss": -0.01, "grad_norm": 1.5, "clip_fraction": 0.0,
          "logprob_gap_mean": 1e-6, "staleness_mean": 0.0, "staleness_max": 0.0, "groups_trained": 8, "groups_dropped": 1,
          "sampled_tokens_per_second": 812.3, "seconds_wait": 1.0, "seconds_train": 2.0, "seconds_sync": 0.1}


def test_records_are_appended_and_the_last_attempt_of_a_step_counts(tmp_path):
    for attempt in (1, 2):
        writer = StepWriter(tmp_path, tensorboard=False)
        for step in (3, 4):
            writer(RECORD | {"step": step, "attempt": attempt})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert [(r["step"], r["attempt"]) for r in read_metrics(tmp_path)] == [(3, 2), (4, 2)]


def test_the_event_file_holds_what_the_record_holds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    StepWriter(tmp_path, tensorboard=True)(RECORD)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("reward_mean")[0].step == 3
    assert events.Scalars("reward_mean")[0].value == pytest.approx(0.25)


def test_the_line_names_reward_staleness_ends_and_seconds():
    line = step_line(RECORD)
    assert line.startswith("step 3/9 | reward 0.250")
    assert "groups 8, 1 dropped" in line and "wait 1.0s train 2.0s sync 0.1s" in line
    assert "gap -" in step_line({k: v for k, v in RECORD.items() if k != "logprob_gap_mean"})
    assert step_line(RECORD | {"engines_lost": ["e1 while pausing version 3: HTTP 500"]}).endswith(" | lost e1 while pausing version 3: HTTP 500")


def test_a_value_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        StepWriter(tmp_path, tensorboard=False)(RECORD | {"loss": float("nan")})
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
