"""Training again what a run has trained, from its checkpoints and saved batches, and comparing the numbers.

Answers whether the learning side did what it said: the run's loss and gradient norm must come out
again. Needs the run folder only: config.toml, trajectories/, metrics.jsonl, and checkpoints/ if there are any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from molt_hpc.config import RunConfig, load
from molt_hpc.data.shards import shard_path
from molt_hpc.train.actor import Actor, TrainingError
from molt_hpc.train.checkpoint import load_checkpoint, nearest
from molt_hpc.train.launch import in_process_group, run_ranks

BOUND = 1e-5
"""Largest relative difference that counts as equal: sums over ranks and micro-batches may be ordered differently."""
KEYS = ("loss", "grad_norm")

log = logging.getLogger(__name__)


@dataclass
class Comparison:
    """One step, replayed and recorded. `recorded` is None where metrics.jsonl has no such step."""

    step: int
    replayed: dict[str, float]
    recorded: dict[str, float] | None

    def difference(self) -> float:
        """The largest difference, relative to the recorded value (to 1 for the loss, which may be close to 0)."""
        assert self.recorded is not None
        return max(abs(self.replayed[k] - self.recorded[k]) / max(abs(self.recorded[k]), 1.0 if k == "loss" else 1e-12) for k in KEYS)

    def line(self) -> str:
        numbers = ", ".join(f"{k} {self.replayed[k]:.9g}" for k in KEYS)
        if self.recorded is None:
            return f"step {self.step}: {numbers} | not in metrics.jsonl"
        if self.difference() <= BOUND:
            return f"step {self.step}: {numbers} | equal ({self.difference():.1e} <= {BOUND:.0e})"
        return (f"step {self.step}: {numbers} | recorded " + ", ".join(f"{k} {self.recorded[k]:.9g}" for k in KEYS)
                + f" | DIFFERENT by {self.difference():.3e}, the bound is {BOUND:.0e}")


def read_metrics(run: Path) -> dict[int, dict[str, float]]:
    """step -> loss and grad_norm; the last record of a step counts (a resumed run trains some steps twice)."""
    found: dict[int, dict[str, float]] = {}
    path = run / "metrics.jsonl"
    if path.is_file():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "step" in record and ("batch_skipped" in record or all(key in record for key in KEYS)):
                found[record["step"]] = {key: record.get(key, 0.0) for key in KEYS}
    return found


def read_total_steps(run: Path, config: RunConfig) -> int | None:
    """How many steps the run was to have, as recorded with its metrics, else train.max_steps, else None."""
    path = run / "metrics.jsonl"
    totals = [json.loads(line).get("total_steps") for line in path.read_text().splitlines()] if path.is_file() else []
    return next((int(total) for total in reversed(totals) if total), config.train.max_steps or None)


def find_start(run: Path, step: int) -> tuple[Path | None, int]:
    """(checkpoint or None for the initial model, first step to train) for a replay of `step`.

    Raises ValueError if a needed batch is missing.
    """
    checkpoint = nearest(run, step - 1)
    first = int(checkpoint.name.removeprefix("step_")) + 1 if checkpoint else 1
    missing = [s for s in range(first, step + 1) if not shard_path(run, s).is_file()]
    if missing:
        raise ValueError(f"step {step} of {run}: batch {missing[0]} is missing ({shard_path(run, missing[0])}); "
                         f"a replay from {checkpoint.name if checkpoint else 'the initial model'} needs every batch from {first} on")
    return checkpoint, first


def replay(run: Path, step: int, total_steps: int | None) -> list[Comparison]:
    """Train up to `step` and compare; all ranks of an initialised process group call it."""
    config = load(RunConfig, run / "config.toml")
    checkpoint, first = find_start(run, step)
    actor = Actor(config, total_steps)
    if checkpoint is not None:
        load_checkpoint(actor, checkpoint)
    else:
        actor.step = first - 1
    log.info("replaying steps %d..%d of %s from %s", first, step, run, checkpoint.name if checkpoint else "the initial model")
    recorded, found = read_metrics(run), []
    for number in range(first, step + 1):
        raw = shard_path(run, number).read_bytes() if dist.get_rank() == 0 else None
        metrics = actor.train_batch(raw)
        # a batch that was left out has neither, in the run and here
        found.append(Comparison(number, {key: metrics.get(key, 0.0) for key in KEYS}, recorded.get(number)))
        if dist.get_rank() == 0:
            print(found[-1].line(), flush=True)
    return found


def main(argv: list[str]) -> int:
    """`step RUN --step N`: 0 if all steps on the way are equal, 1 if not or if the run cannot be replayed."""
    parser = argparse.ArgumentParser(prog="tools/replay.py", description="Train a run's saved batches again and compare.")
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="replay up to one step, from the nearest checkpoint before it")
    step.add_argument("run", type=Path)
    step.add_argument("--step", type=int, required=True)
    step.add_argument("--total-steps", type=int,
                      help="steps of the whole run, for schedules that need them; unset: what metrics.jsonl says, else train.max_steps")
    step.add_argument("--ranks", type=int, help="training ranks on this machine; unset: as many as the run had")
    args = parser.parse_args(argv)
    try:
        config = load(RunConfig, args.run / "config.toml")
        if args.step < 1:
            raise ValueError(f"--step: expected at least 1, got {args.step}")
        find_start(args.run, args.step)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    total = args.total_steps or read_total_steps(args.run, config)
    ranks = args.ranks or config.actor.num_nodes * config.actor.num_procs_per_node
    return min(1, run_ranks("molt_hpc.train.replay", [str(args.run), str(args.step), str(total or 0)], ranks))


def _rank(run: Path, step: int, total_steps: int) -> int:
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO if rank == "0" else logging.WARNING, format="%(levelname)s %(message)s")
    found: list[Comparison] = []
    try:
        in_process_group(lambda: found.extend(replay(run, step, total_steps or None)))
    except (TrainingError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    unknown = [c.step for c in found if c.recorded is None]
    different = [c.step for c in found if c.recorded is not None and c.difference() > BOUND]
    if rank == "0":
        verdict = f"not equal: steps {different} differ, steps {unknown} have no record" if different or unknown else "equal"
        print(verdict, flush=True)
    return int(bool(different or unknown)) if rank == "0" else 0


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
