"""The training ranks' main loop: batch in, step, weights out. Started by torchrun, one process a rank.

Rank 0 speaks with the broker and tells the others what comes next with one small integer; all ranks then
run the same collectives. While rank 0 waits for a batch it sends `WAIT` now and then, so that no collective
of the others is ever older than its timeout.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from molt_hpc.broker.client import BrokerClient, Refused, RunStopped
from molt_hpc.config import RunConfig, load
from molt_hpc.data.shards import build_batch, write_shard
from molt_hpc.records import Rollout
from molt_hpc.train.actor import Actor, TrainingError
from molt_hpc.train.checkpoint import checkpoint_folder, prune, save_checkpoint
from molt_hpc.train.export import export_hf
from molt_hpc.train.publish import Publisher
from molt_hpc.weights.publish import make_sender

log = logging.getLogger(__name__)

END, BATCH, WAIT, PUBLISH = 0, 1, 2, 3


class Loop:
    """Trains batch after batch; `client` is None on ranks other than 0."""

    def __init__(self, run: Path, config: RunConfig, actor: Actor, client: BrokerClient | None, publisher: Publisher, total_steps: int):
        self.run, self.config, self.actor, self.client, self.publisher = run, config, actor, client, publisher
        self.total_steps = total_steps
        self.version = self.saved_step = 0

    def main(self) -> None:
        """Train until the broker has no batch left; then save and export."""
        self.publisher.publish(0)
        while self._step():
            if self.config.ckpt.save_steps and self.version % self.config.ckpt.save_steps == 0:
                self._save()
        self._save()
        folder = checkpoint_folder(self.run, self.version) / "hf"
        export_hf(self.actor, folder)
        if self.client:
            log.info("the trained model is in %s", folder)
            self.client.request("finished")

    def _save(self) -> None:
        if self.version > self.saved_step:
            save_checkpoint(self.actor, self.run, self.version, {"version": self.version})
            prune(self.run, self.config.ckpt.max_num)
            self.saved_step = self.version

    def _announce(self, code: int) -> int:
        """Rank 0 tells every rank what comes next; returns it on all ranks."""
        value = torch.tensor([code], dtype=torch.int64, device=self.actor.device)
        dist.broadcast(value, 0)
        return int(value.item())

    def _step(self) -> bool:
        started = time.monotonic()
        raw = self._next_batch() if self.client else None
        code = self._announce(BATCH if raw else END)
        while code == WAIT:
            code = self._announce(END)
        if code == END:
            return False
        waited = time.monotonic()
        metrics = self.actor.train_batch(raw)
        trained = time.monotonic()
        self.version += 1
        if self.client:
            self.client.request("trained", {"step": self.version}, timeout=60)
        update = self.publisher.publish(self.version)
        if self.client:
            self._report(metrics, update, {"wait": waited - started, "train": trained - waited, "sync": time.monotonic() - trained})
        return True

    def _next_batch(self) -> bytes | None:
        """Rank 0: wait for the next batch and write its shard; None at the end of the run."""
        broker = self.config.broker
        message = self.client.call("next_batch", timeout=broker.lease_timeout * broker.max_attempts + 600, waiting=lambda: self._announce(WAIT))
        if message.kind == "end":
            return None
        rollouts = []
        for _ in range(message.fields["rollouts"]):
            part = self.client.receive("rollout", timeout=60)
            rollouts.append(Rollout.from_wire(part.fields, part.arrays()))
        batch = build_batch(message.fields["step"], self.version, rollouts)
        assert batch.step == self.version + 1, f"batch {batch.step} came after version {self.version}"
        raw = batch.to_bytes()
        write_shard(self.run, batch.step, raw)
        return raw

    def _report(self, metrics: dict[str, Any], update: dict[str, float], seconds: dict[str, float]) -> None:
        total = sum(seconds.values())
        record = {"step": self.version, "time": time.time(), **metrics, **{f"seconds_{k}": v for k, v in seconds.items()},
                  "seconds_step": total, "tokens_per_second": metrics["tokens"] / total,
                  "sampled_tokens_per_second": metrics["sampled_tokens"] / total, **update}
        self.client.request("step_done", {"metrics": record}, timeout=60)


def local_address(broker: str) -> str:
    """The address of this host's interface towards the broker; engines reach the trainer there."""
    host, port = broker.removeprefix("tcp://").rsplit(":", 1)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing: only chooses the route
        return probe.getsockname()[0]


def run_rank(run: Path, config: RunConfig, broker: str, attempt: int) -> None:
    """Everything of one rank, in an initialised process group."""
    rank = dist.get_rank()
    client = BrokerClient(run, broker, "actor", "actor", attempt) if rank == 0 else None
    steps = torch.tensor([client.welcome["total_steps"] if client else 0], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(steps, 0)
    actor = Actor(config, int(steps.item()))
    dtype = None if config.vllm.dtype == "auto" else getattr(torch, config.vllm.dtype)
    sender = make_sender(config.weights.backend, actor.weights(dtype), rank, local_address(broker), config.weights.bucket_bytes, config.weights.timeout)
    publisher = Publisher(client, sender, config.weights.timeout, config.launch.roll_call_timeout)
    if client:
        client.request("ready")
    Loop(run, config, actor, client, publisher, int(steps.item())).main()
    dist.barrier()
    sender.close()
    if client:
        client.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m molt_hpc.train.loop")
    parser.add_argument("run", type=Path)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s rank {os.environ.get('RANK', 0)}: %(message)s")
    config = load(RunConfig, args.run / "config.toml")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    waits = timedelta(seconds=config.launch.roll_call_timeout + 2 * config.weights.timeout + 60)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=waits)
    try:
        run_rank(args.run, config, args.broker, args.attempt)
    except (RunStopped, Refused, TimeoutError, TrainingError) as error:
        log.error("the actor ends: %s: %s", type(error).__name__, error)
        # ranks that sit in a collective cannot be told: torchrun ends them when this one is gone
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
