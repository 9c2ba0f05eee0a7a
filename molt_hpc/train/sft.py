"""Supervised fine-tuning on chat rows: the warm start before reinforcement learning, with the actor's own parts.

`python -m molt_hpc sft CONFIG.toml` reads JSONL rows {"messages": [...]}, learns the assistant replies
(mean over reply tokens, one denominator for a step) and writes a Hugging Face folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from molt_hpc.config import SftConfig, dump, help_text, load
from molt_hpc.data.templates import render_with_mask
from molt_hpc.train.export import write_model
from molt_hpc.train.launch import in_process_group, run_ranks
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.micro import DUMMY
from molt_hpc.train.model import TrainModel, build_model
from molt_hpc.train.optim import TrainingError, build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import StepPlan, plan_step

log = logging.getLogger(__name__)

LOG_EVERY = 10
"""Steps between two lines of the log; metrics.jsonl has every step."""
RESOLVED = "sft.toml"


@dataclass
class Row:
    """token_ids int32 [T]; mask bool [T], True on reply tokens."""

    token_ids: np.ndarray
    mask: np.ndarray


def read_rows(config: SftConfig) -> list[Row]:
    """Render every row; raises ValueError `file:line: reason` for the first bad one.

    A row that is cut at data.max_len before its first reply token is left out and counted in the log.
    """
    path = Path(config.data.dataset)
    if not path.is_file():
        raise ValueError(f"data.dataset: there is no file {path}")
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_name_or_path)
    rows, cut = [], 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = _read_row(tokenizer, config, f"{path}:{number}", line)
            rows += [row] if row.mask.any() else []
            cut += not row.mask.any()
            if config.data.max_samples and len(rows) == config.data.max_samples:
                break
    if cut:
        log.warning("%d rows have no reply token within data.max_len %d and are left out", cut, config.data.max_len)
    if not rows:
        raise ValueError(f"data.dataset: {path} has no row with a reply within data.max_len {config.data.max_len}")
    return rows


def _read_row(tokenizer, config: SftConfig, where: str, line: str) -> Row:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(raw, dict) or config.data.input_key not in raw:
        raise ValueError(f"{where}: expected an object with the column {config.data.input_key!r} (data.input_key)")
    try:
        ids, mask = render_with_mask(tokenizer, raw[config.data.input_key], raw.get("tools"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Row(ids[:config.data.max_len], mask[:config.data.max_len])


def step_rows(count: int, config: SftConfig) -> list[list[int]]:
    """The rows of every optimizer step: each epoch is a new order, a function of train.seed; its last step may be smaller."""
    train = config.train
    steps: list[list[int]] = []
    epoch = 0
    while len(steps) < train.max_steps if train.max_steps else epoch < train.max_epochs:
        order = np.random.default_rng((train.seed, epoch)).permutation(count)
        steps += [order[at:at + train.batch_size].tolist() for at in range(0, count, train.batch_size)]
        epoch += 1
    return steps[:train.max_steps or None]


class SftTrainer:
    """One training rank."""

    def __init__(self, config: SftConfig, rows: list[Row]):
        self.config, self.rows = config, rows
        torch.manual_seed(config.train.seed)
        chosen = config.model
        self.model: TrainModel = build_model(chosen.model_name_or_path, chosen.backend, config.fsdp, chosen.gradient_checkpoint)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optim)
        self.lengths = [len(row.token_ids) for row in rows]
        self.targets = [int(row.mask.sum()) for row in rows]

    def train(self, metrics: Path | None) -> None:
        """Run all steps; rank 0 gives the file that every step is appended to."""
        steps = step_rows(len(self.rows), self.config)
        for number, chosen in enumerate(steps):
            started = time.monotonic()
            plan = plan_step(chosen, self.lengths, self.targets, self.model.data_size, self.config.train.max_tokens_per_gpu)
            rate = learning_rate(self.config.optim, number, len(steps))
            loss, norm = self._step(plan, rate)
            record = {"step": number + 1, "loss": loss, "grad_norm": norm, "learning_rate": rate, "reply_tokens": plan.denominator,
                      "tokens": sum(self.lengths[r] for r in chosen), "seconds": time.monotonic() - started}
            if metrics is not None:
                self._report(metrics, record, len(steps))

    def _step(self, plan: StepPlan, rate: float) -> tuple[float, float]:
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for chosen in plan.micro_batches[self.model.data_rank]:
            rows = [self.rows[r] for r in chosen] or [Row(DUMMY, np.array([False, True]))]
            packed = pack_segments([row.token_ids for row in rows], [row.mask for row in rows], [1.0] * len(rows), self.model.device)
            log_probs, _ = self.model.score(packed)
            loss = -log_probs.sum() * (bool(chosen) / plan.denominator)
            loss.backward()
            total += loss.detach().double()
        self.model.finish_gradients()
        share = total * self.model.data_size / dist.get_world_size()
        return guarded_step(self.optimizer, rate, self.config.optim.max_norm, share, self.model.device)

    @staticmethod
    def _report(metrics: Path, record: dict[str, float], total: int) -> None:
        with open(metrics, "a") as file:
            file.write(json.dumps(record) + "\n")
        if record["step"] == 1 or record["step"] % LOG_EVERY == 0 or record["step"] == total:
            log.info("step %d/%d | loss %.4f | grad_norm %.3f | lr %.2e | %.0f tokens/s", record["step"], total, record["loss"],
                     record["grad_norm"], record["learning_rate"], record["tokens"] / record["seconds"])


def run_rank(config: SftConfig) -> None:
    """Everything of one rank, in an initialised process group."""
    output = Path(config.output_dir)
    metrics = output / "metrics.jsonl" if dist.get_rank() == 0 else None
    if metrics is not None:
        metrics.unlink(missing_ok=True)
    trainer = SftTrainer(config, read_rows(config))
    trainer.train(metrics)
    write_model(trainer.model, output)
    log.info("the trained model is in %s", output)


def main(argv: list[str]) -> int:
    """CONFIG.toml and overrides; starts the ranks and returns the exit code (0 done, 1 failed)."""
    if "-h" in argv or "--help" in argv:
        print(f"usage: python -m molt_hpc sft [CONFIG.toml] [--section.option value ...]\n\n{help_text(SftConfig)}")
        return 0
    path = argv.pop(0) if argv and not argv[0].startswith("--") else None
    try:
        config = load(SftConfig, path, argv)
        if Path(config.output_dir).resolve() == Path(config.model.model_name_or_path).resolve():
            raise ValueError(f"output_dir: {config.output_dir} is the folder of the model to start from; name another one")
        if config.num_procs < 1:
            raise ValueError(f"num_procs: expected at least 1, got {config.num_procs}")
        output = Path(config.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        (output / RESOLVED).write_text(dump(config))
        if config.num_procs == 1:
            return _rank(output / RESOLVED)
        read_rows(config)  # an error in the data is better found before the ranks start
    except ValueError as error:
        print(f"sft: {error}", file=sys.stderr)
        return 1
    return min(1, run_ranks("molt_hpc.train.sft", [str(output / RESOLVED)], config.num_procs))


def _rank(path: Path) -> int:
    rank = os.environ.get("RANK", "0")
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s")
    try:
        in_process_group(lambda: run_rank(load(SftConfig, path)))
    except (TrainingError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1])))
