"""Training again what a run has trained, from its checkpoints and saved batches, and comparing the numbers.

Answers whether the learning side did what it said: the run's loss and gradient norm must come out
again. Needs the run folder only: config.toml, trajectories/, metrics.jsonl, and checkpoints/ if there are any.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

from molt_hpc.config import RunConfig, load
from molt_hpc.data.shards import shard_path
from molt_hpc.train.actor import Actor
from molt_hpc.train.checkpoint import load_checkpoint, nearest
from molt_hpc.train.launch import in_process_group, leave, run_ranks
from molt_hpc.train.optim import TrainingError

BOUND = 1e-5
"""Largest relative difference that counts as equal: sums over ranks and micro-batches may be ordered differently."""
KEYS = ("loss", "grad_norm")

log = logging.getLogger(__name__)


def read_records(run: Path) -> dict[int, dict[str, float]]:
    """step -> its record in metrics.jsonl; the last one counts (a resumed run trains some steps twice)."""
    path = run / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    return {record["step"]: record for record in records if "step" in record}


def compare(step: int, replayed: dict[str, float], recorded: dict[str, float] | None) -> tuple[bool, str]:
    """(whether they are equal, a line about it). A batch that was left out has no loss and norm, in the run and here.

    The difference is relative to the recorded value, for the loss, which may be close to 0, to at least 1.
    """
    found = f"step {step}: " + ", ".join(f"{key} {replayed.get(key, 0.0):.9g}" for key in KEYS)
    if recorded is None:
        return False, f"{found} | not in metrics.jsonl"
    pairs = [(replayed.get(key, 0.0), recorded.get(key, 0.0), floor) for key, floor in zip(KEYS, (1.0, 1e-12), strict=True)]
    difference = max(abs(new - old) / max(abs(old), floor) for new, old, floor in pairs)
    if difference <= BOUND:
        return True, f"{found} | equal ({difference:.1e} <= {BOUND:.0e})"
    was = ", ".join(f"{key} {recorded.get(key, 0.0):.9g}" for key in KEYS)
    return False, f"{found} | recorded {was} | DIFFERENT by {difference:.3e}, the bound is {BOUND:.0e}"


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


def replay(run: Path, step: int, store: dist.Store) -> list[int]:
    """Train up to `step` and compare, one line a step; returns the steps that differ. All ranks of an initialised process group call it."""
    config, recorded = load(RunConfig, run / "config.toml"), read_records(run)
    config.output_dir = str(run)  # it may have been moved, and its images with it
    checkpoint, first = find_start(run, step)
    totals = [record["total_steps"] for record in recorded.values() if "total_steps" in record]
    actor = Actor(config, totals[-1] if totals else config.train.max_steps or None, store)
    if checkpoint is not None:
        load_checkpoint(actor, checkpoint)
    log.info("replaying steps %d..%d of %s from %s", first, step, run, checkpoint.name if checkpoint else "the initial model")
    different = []
    for number in range(first, step + 1):
        raw = shard_path(run, number).read_bytes() if dist.get_rank() == 0 else None
        equal, line = compare(number, actor.train_batch(raw), recorded.get(number))
        different += [] if equal else [number]
        if dist.get_rank() == 0:
            print(line, flush=True)
    if dist.get_rank() == 0:
        print(f"not equal: steps {different}" if different else "equal", flush=True)
    return different


def main(argv: list[str]) -> int:
    """`step RUN --step N`: 0 if all steps on the way are equal, 1 if not or if the run cannot be replayed."""
    parser = argparse.ArgumentParser(prog="tools/replay.py", description="Train a run's saved batches again and compare.")
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="replay up to one step, from the nearest checkpoint before it")
    step.add_argument("run", type=Path)
    step.add_argument("--step", type=int, required=True)
    step.add_argument("--ranks", type=int, help="training ranks on this machine; unset: as many as the run had")
    args = parser.parse_args(argv)
    try:
        actor = load(RunConfig, args.run / "config.toml").actor
        if args.step < 1:
            raise ValueError(f"--step: expected at least 1, got {args.step}")
        find_start(args.run, args.step)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return min(1, run_ranks("molt_hpc.train.replay", [str(args.run), str(args.step)], args.ranks or actor.num_nodes * actor.num_procs_per_node))


def _rank(run: Path, step: int) -> int:
    logging.basicConfig(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING, format="%(levelname)s %(message)s")
    different: list[int] = []
    try:
        in_process_group(lambda store: different.extend(replay(run, step, store)), load(RunConfig, run / "config.toml"))
    except (TrainingError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return int(bool(different))


if __name__ == "__main__":
    leave(_rank(Path(sys.argv[1]), int(sys.argv[2])))
