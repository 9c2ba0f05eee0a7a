"""Supervised fine-tuning on chat rows: the warm start before reinforcement learning, with the actor's own parts.

`python -m molt_hpc sft CONFIG.toml` reads JSONL rows {"messages": [...]}, learns the assistant replies
(mean over reply tokens, one denominator for a step) and writes a Hugging Face folder.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from molt_hpc.config import SftConfig, dump, help_text, load
from molt_hpc.data.prompts import json_rows
from molt_hpc.data.shards import Batch
from molt_hpc.data.templates import render_with_mask
from molt_hpc.train.export import write_model
from molt_hpc.train.launch import in_process_group, leave, run_ranks
from molt_hpc.train.micro import MicroBatch, TokenTable, accumulate
from molt_hpc.train.model import TrainModel, build_model
from molt_hpc.train.optim import TrainingError, build_optimizer, guarded_step, learning_rate
from molt_hpc.train.planner import plan_step

log = logging.getLogger(__name__)

LOG_EVERY = 10
"""Steps between two lines of the log; metrics.jsonl has every step."""
RESOLVED = "sft.toml"


Row = tuple[np.ndarray, np.ndarray]
"""Token ids int32 [T]; mask bool [T], True on reply tokens."""


def read_rows(config: SftConfig) -> list[Row]:
    """Render every row; raises ValueError `file:line: reason` for the first bad one.

    A row that is cut at data.max_len before its first reply token is left out and counted in the log.
    """
    tokenizer, longest = AutoTokenizer.from_pretrained(config.model.model_name_or_path), config.data.max_len
    rows, cut = [], 0
    for where, _, raw in json_rows(Path(config.data.dataset), "data.dataset", config.data.input_key):
        try:
            ids, mask = render_with_mask(tokenizer, raw[config.data.input_key], raw.get("tools"))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if mask[:longest].any():
            rows.append((ids[:longest], mask[:longest]))
        else:
            cut += 1
        if config.data.max_samples and len(rows) == config.data.max_samples:
            break
    if cut:
        log.warning("%d rows have no reply token within data.max_len %d and are left out", cut, longest)
    if not rows:
        raise ValueError(f"data.dataset: {config.data.dataset} has no row with a reply within data.max_len {longest}")
    return rows


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


def batch_of(rows: list[Row]) -> Batch:
    """Rows as a batch of one segment each, over which the actor's passes run."""
    lengths, nothing = [len(ids) for ids, _ in rows], np.zeros(len(rows), np.float32)
    empty = np.zeros(sum(lengths), np.float32)
    return Batch(step=0, version=0, token_ids=np.concatenate([ids for ids, _ in rows]), logprobs=empty,
                 action_mask=np.concatenate([mask for _, mask in rows]).astype(np.uint8), versions=empty.astype(np.int32),
                 segment_offsets=np.cumsum([0, *lengths]), segment_rollout=np.arange(len(rows)), segment_temperature=nothing + 1,
                 rollout_reward=nothing, rollout_score=nothing, rollout_group=nothing, group_ordinal=nothing, rollouts=[])


class SftTrainer:
    """One training rank."""

    def __init__(self, config: SftConfig, rows: list[Row]):
        self.config, self.rows = config, rows
        torch.manual_seed(config.train.seed)
        chosen = config.model
        self.model: TrainModel = build_model(chosen.model_name_or_path, chosen.backend, config.fsdp, chosen.gradient_checkpoint)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optim, config.fsdp.offload)

    def train(self, metrics: Path | None) -> None:
        """Run all steps; rank 0 gives the file that every step is appended to."""
        steps = step_rows(len(self.rows), self.config)
        for number, chosen in enumerate(steps, 1):
            started = time.monotonic()
            table = TokenTable(batch_of([self.rows[r] for r in chosen]))
            rate = learning_rate(self.config.optim, number - 1, len(steps))
            loss, norm = self._step(table, rate)
            record = {"step": number, "loss": loss, "grad_norm": norm, "learning_rate": rate, "reply_tokens": len(table["sequence"]),
                      "tokens": len(table.batch.token_ids), "seconds": time.monotonic() - started}
            if metrics is not None:
                with open(metrics, "a") as file:
                    file.write(json.dumps(record) + "\n")
            if number == 1 or number % LOG_EVERY == 0 or number == len(steps):
                log.info("step %d/%d | loss %.4f | grad_norm %.3f | lr %.2e | %.0f tokens/s", number, len(steps), loss, norm, rate,
                         record["tokens"] / record["seconds"])

    def _step(self, table: TokenTable, rate: float) -> tuple[float, float]:
        """(loss, gradient norm) of one optimizer step over all rows of the table."""
        lengths = table.batch.segment_lengths.tolist()
        plan = plan_step(range(len(lengths)), lengths, table.counts.tolist(), self.model.data_size, self.config.train.max_tokens_per_gpu)

        def loss_of(micro: MicroBatch) -> torch.Tensor:
            return -torch.where(micro.mask, self.model.score(micro.packed)[0], 0.0).sum() / plan.denominator

        share = accumulate(self.model, table, plan, loss_of)
        return guarded_step(self.optimizer, rate, self.config.optim.max_norm, share, self.model.device)


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
        in_process_group(lambda store: run_rank(load(SftConfig, path)))
    except (TrainingError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    leave(_rank(Path(sys.argv[1])))
