"""The training ranks' main loop: batch in, step, weights out. Started by torchrun, one process a rank.

Rank 0 speaks with the broker and tells the others what comes next with one small integer; all ranks then
run the same collectives. While rank 0 waits for a batch it sends `WAIT` now and then, so that no collective
of the others is ever older than its timeout.
"""

import argparse
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from molt_hpc.broker.client import BrokerClient, Refused, RunStopped, address_towards
from molt_hpc.config import RunConfig, load
from molt_hpc.data.references import resolve
from molt_hpc.data.shards import build_batch, shard_path, write_shard
from molt_hpc.records import Rollout
from molt_hpc.train.actor import Actor
from molt_hpc.train.checkpoint import checkpoint_folder, load_checkpoint, nearest, prune, save_checkpoint
from molt_hpc.train.collectives import announce
from molt_hpc.train.drift import DriftError, DriftProbe, probe_tokens
from molt_hpc.train.export import export_hf
from molt_hpc.train.gather import published
from molt_hpc.train.launch import in_process_group, leave
from molt_hpc.train.optim import TrainingError
from molt_hpc.train.publish import Publisher
from molt_hpc.weights.publish import make_sender

log = logging.getLogger(__name__)

END, BATCH, WAIT, PUBLISH, SAVE = range(5)


class Loop:
    """Trains batch after batch; `client` is None on ranks other than 0.

    trained_steps: batches that were trained on in earlier attempts of this run, as the broker's journal has it.
    """

    def __init__(self, run: Path, config: RunConfig, actor: Actor, client: BrokerClient | None, publisher: Publisher, total_steps: int,
                 trained_steps: int):
        self.run, self.config, self.actor, self.client, self.publisher = run, config, actor, client, publisher
        self.total_steps, self.trained_steps = total_steps, trained_steps
        self.version = self.saved_step = 0

    def main(self) -> None:
        """Catch up with earlier attempts, train until the broker has no batch left, then save and export."""
        self._catch_up()
        if self.version < self.total_steps:
            self.publisher.publish(self.version)
            while self._step():
                if self.config.ckpt.save_steps and self.version % self.config.ckpt.save_steps == 0:
                    self._save()
        self._save()
        folder = checkpoint_folder(self.run, self.version) / "hf"
        if not folder.exists():
            export_hf(self.actor, folder)
        if self.client:
            log.info("the trained model is in %s", folder)
            self.client.request("finished")

    def _catch_up(self) -> None:
        """After a restart: load the newest checkpoint and train the saved batches behind it once more.

        The batches are read from their shards, so every prompt stays trained exactly once in the weights that come out.
        """
        folder = nearest(self.run, self.trained_steps)
        if folder is not None:
            self.version = self.saved_step = load_checkpoint(self.actor, folder)["version"]
            log.info("resumed from %s", folder)
        while self.version < self.trained_steps:
            started = time.monotonic()
            metrics = self.actor.train_batch(shard_path(self.run, self.version + 1).read_bytes() if self.client else None)
            self.version += 1
            if self.client:
                log.info("step %d was trained again from its shard", self.version)
                self._report(metrics | {"replayed": 1}, {}, {"wait": 0.0, "train": time.monotonic() - started, "sync": 0.0})

    def _save(self) -> None:
        if self.version > self.saved_step:
            save_checkpoint(self.actor, self.run, self.version, {"version": self.version})
            prune(self.run, self.config.ckpt.max_num)
            self.saved_step = self.version

    def _announce(self, code: int) -> int:
        return announce(code, self.actor.device)

    def _next(self) -> tuple[int, bytes | None]:
        """What comes next on all ranks: BATCH with its bytes on rank 0, PUBLISH, SAVE, or END."""
        code, raw = self._ask() if self.client else (END, None)
        code = self._announce(code)
        while code == WAIT:
            code = self._announce(END)
        return code, raw

    def _step(self) -> bool:
        """Train one batch and publish; False at the end of the run."""
        started = time.monotonic()
        code, raw = self._next()
        while code in (PUBLISH, SAVE):  # engines have joined that serve nothing yet; the run is about to be stopped
            if code == PUBLISH:
                self.publisher.publish(self.version)
            else:
                self._save()
            code, raw = self._next()
        if code == END:
            return False
        waited = time.monotonic()
        metrics = self._train(raw)
        trained = time.monotonic()
        self.version += 1
        if self.client:
            self.client.request("trained", {"step": self.version}, timeout=60)
        update = self.publisher.publish(self.version)
        if self.client:
            self._report(metrics, update, {"wait": waited - started, "train": trained - waited, "sync": time.monotonic() - trained})
        return True

    def _train(self, raw: bytes | None) -> dict[str, Any]:
        """Train the batch; one that cannot be trained on is kept in <run>/quarantine, whatever becomes of the saved trajectories."""
        failed = True
        try:
            metrics = self.actor.train_batch(raw)
            failed = bool(metrics.get("batch_skipped"))
        finally:
            if failed and self.client:
                shard = shard_path(self.run, self.version + 1)
                kept = self.run / "quarantine" / shard.name
                kept.parent.mkdir(exist_ok=True)
                kept.unlink(missing_ok=True)
                os.link(shard, kept)
                log.error("the batch is kept as %s", kept)
        return metrics

    def _ask(self) -> tuple[int, bytes | None]:
        """Rank 0: wait for the next batch and write its shard before it is trained on."""
        broker = self.config.broker
        limit = self.config.agent.timeout * broker.max_attempts + broker.lease_timeout + 600
        message = self.client.call("next_batch", timeout=limit, waiting=lambda: self._announce(WAIT))
        if message.kind != "batch":
            return {"end": END, "republish": PUBLISH, "save": SAVE}[message.kind], None
        rollouts = []
        for _ in range(message.fields["rollouts"]):
            part = resolve(self.run, self.client.receive("rollout", timeout=60))
            rollouts.append(Rollout.from_wire(part.fields, part.arrays()))
        batch = build_batch(message.fields["step"], self.version, rollouts)
        assert batch.step == self.version + 1, f"batch {batch.step} came after version {self.version}"
        raw = batch.to_bytes()
        write_shard(self.run, batch.step, raw)
        return BATCH, raw

    def _report(self, metrics: dict[str, Any], update: dict[str, float], seconds: dict[str, float]) -> None:
        total = sum(seconds.values())
        record = {"step": self.version, "version": self.version, "time": time.time(), **metrics, **{f"seconds_{k}": v for k, v in seconds.items()},
                  "seconds_step": total, "tokens_per_second": metrics["tokens"] / total,
                  "sampled_tokens_per_second": metrics["sampled_tokens"] / total, **update}
        self.client.request("step_done", {"metrics": record}, timeout=60)


def run_rank(run: Path, config: RunConfig, broker: str, attempt: int, store: dist.Store) -> None:
    """Everything of one rank, in an initialised process group."""
    rank = dist.get_rank()
    client = BrokerClient(run, broker, "actor", "actor", attempt) if rank == 0 else None
    steps = torch.tensor([client.welcome["total_steps"], client.welcome["trained_steps"]] if client else [0, 0],
                         device="cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(steps, 0)
    total, trained = steps.tolist()
    actor = Actor(config, total, store)
    dtype = None if config.vllm.dtype == "auto" else getattr(torch, config.vllm.dtype)
    target = urlsplit(broker)  # the engines reach this rank on the interface that leads to the broker
    sender = make_sender(config.weights, published(actor.model, config.weights.backend, dtype), rank,
                         address_towards(target.hostname, target.port), run / "weights" / f"attempt_{attempt}")
    prompts = config.weights.drift_prompts
    probe = DriftProbe(actor.model, config.weights, probe_tokens(actor.model.folder, prompts)) if prompts else None
    publisher = Publisher(client, sender, config, actor.device, probe)
    if client:
        client.request("ready")
    Loop(run, config, actor, client, publisher, total, trained).main()
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
    try:
        in_process_group(lambda store: run_rank(args.run, config, args.broker, args.attempt, store), config, waits)
    except (RunStopped, Refused, TimeoutError, TrainingError, DriftError) as error:
        log.error("the actor ends: %s: %s", type(error).__name__, error)
        # ranks that sit in a collective cannot be told: torchrun ends them when this one is gone
        leave(1)
    return 0


if __name__ == "__main__":
    leave(main())
