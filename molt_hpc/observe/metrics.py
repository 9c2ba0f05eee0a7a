"""One record a step: into metrics.jsonl always, into TensorBoard if wanted, and as one readable line.

metrics.jsonl is the truth: append-only, keyed by (step, attempt); readers take the last attempt of a step. The
meaning of each key stands in train/metrics.py (learning), broker/ledger.py (groups and leases) and train/loop.py (seconds).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class StepWriter:
    """Writes the records of one attempt; calling it with a record returns the readable line."""

    def __init__(self, run: Path, tensorboard: bool):
        self._file = open(run / METRICS, "a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(str(run / "tensorboard"))

    def __call__(self, record: dict[str, Any]) -> str:
        """Raises ValueError if a value is not finite: such a step must not have been taken."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events:
            self._events.add_event(_event(record))
            self._events.flush()
        return step_line(record)


def _event(record: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in record.items()
              if isinstance(value, (int, float)) and name not in ("step", "time", "total_steps")]
    return Event(wall_time=record.get("time", time.time()), step=record["step"], summary=Summary(value=values))


def step_line(record: dict[str, Any]) -> str:
    """The step in one line, always in the same order; what the record lacks is shown as a dash."""

    def show(key: str, form: str) -> str:
        return format(record[key], form) if record.get(key) is not None else "-"

    ended = [f"{record.get('groups_trained', 0)}", *(f"{record[k]} {text}" for k, text in (
        ("groups_dropped", "dropped"), ("failed_rollouts_data", "data faults"), ("failed_rollouts_infrastructure", "infrastructure faults"))
        if record.get(k))]
    return (f"step {record['step']}/{record.get('total_steps', '?')} | reward {show('reward_mean', '.3f')} | pass {show('pass_rate', '.3f')} | "
            f"loss {show('loss', '+.4f')} | grad {show('grad_norm', '.3f')} | clip {show('clip_fraction', '.3f')} | "
            f"gap {show('logprob_gap_mean', '.1e')} | stale {show('staleness_mean', '.1f')}/{show('staleness_max', '.0f')} | "
            f"groups {', '.join(ended)} | {show('sampled_tokens_per_second', '.0f')} tok/s | wait {show('seconds_wait', '.1f')}s "
            f"train {show('seconds_train', '.1f')}s sync {show('seconds_sync', '.1f')}s"
            + "".join(f" | lost {e}" for e in record.get("engines_lost", ())))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run in order of step, the last attempt of each."""
    path = run / METRICS
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; has the run taken a step?")
    latest: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        latest[record["step"]] = record
    return [latest[step] for step in sorted(latest)]
