"""What a submitted job runs: `molt_hpc run` as a child, and its result for the one who submitted.

It lives in the package, not in the launcher, because the job unpickles it by its import path.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from molt_hpc.guard import guarded

RUN_PROGRAM = (sys.executable, "-m", "molt_hpc", "run")
STOP_PATIENCE = 100.0
"""Seconds that an interrupted run may need to save and for its orderly stop."""


def read_result(run: Path) -> dict[str, Any]:
    """{reward: mean reward of the last step, steps, run} from <run>/metrics.jsonl.

    Raises ValueError if the run wrote no metrics.
    """
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []
    if not records:
        raise ValueError(f"{path}: no step has been reported")
    last = max(records, key=lambda record: record["step"])
    return {"reward": last["reward_mean"], "steps": last["step"], "run": str(run)}


@dataclass
class TrainingJob:
    """A picklable callable. `config_text` is a whole configuration as TOML, `run` the run folder.

    Interrupted (preemption, time limit) it stops the run in order; submitit then requeues it, and the requeued job
    goes on with the run in the same folder.
    """

    config_text: str
    run: str
    program: tuple[str, ...] = RUN_PROGRAM
    _child: subprocess.Popen | None = field(default=None, repr=False)

    def __call__(self) -> dict[str, Any]:
        """Run to the end and return `read_result`. Raises RuntimeError with the run's own message if it fails."""
        signal.signal(signal.SIGTERM, self._on_cancel)  # submitit would ignore it
        run = Path(self.run)
        with tempfile.TemporaryDirectory() as folder:
            config, errors = Path(folder) / "config.toml", Path(folder) / "errors"
            config.write_text(self.config_text)
            argv = guarded([*self.program, str(config), "--output_dir", str(run), "--ckpt.resume"], grace=STOP_PATIENCE / 3, owner=os.getpid())
            with open(errors, "wb") as stream:
                self._child = subprocess.Popen(argv, stderr=stream)
                while self._child.poll() is None:
                    time.sleep(0.2)
            text = errors.read_text(errors="replace")
        print(text, file=sys.stderr, end="", flush=True)
        if self._child.returncode != 0:
            reason = next((line for line in text.splitlines() if line.startswith("molt_hpc: error:")), "no message")
            raise RuntimeError(f"the run {run} ended with exit code {self._child.returncode}: {reason}")
        return read_result(run)

    def checkpoint(self) -> Any:
        """Called by submitit before the job is taken away: stop the run, then name what to run after a requeue."""
        from submitit.helpers import DelayedSubmission
        if self._child is not None:
            self._child.send_signal(signal.SIGUSR2)  # not SIGUSR1: it would hand the job in as well
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_PATIENCE)
        return DelayedSubmission(replace(self, _child=None))

    def _on_cancel(self, number: int, _frame: object) -> None:
        if self._child is not None:
            self._child.send_signal(number)
