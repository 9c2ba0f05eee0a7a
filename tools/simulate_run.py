"""A simulated run: the real broker, scripted workers in a few processes, a scripted trainer in this one; and its report."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_run import actor_client, base_config, publish, running_broker, spawn
from simulate_workers import Load, batch_synchronous, lengths, work

from molt_hpc.broker.client import BrokerClient

PATIENCE = 300.0
"""Seconds that the trainer waits for an answer."""


class Trainer:
    """Takes batches, lets the step's time pass, publishes; remembers what came and when."""

    def __init__(self, client: BrokerClient, load: Load):
        self.client, self.load = client, load
        self.received: Counter[tuple[int, int]] = Counter()
        self.waits: list[float] = []
        self.trained_at: list[float] = []
        self.closed_at: list[float] = []
        self.opened_at: list[float] = []
        self.version_at: dict[int, float] = {}

    def publish(self, version: int, closed_at: float | None = None) -> None:
        """Update every engine; nothing is admitted since `closed_at` (None: now)."""
        self.closed_at.append(closed_at or time.monotonic())
        publish(self.client, version, PATIENCE)
        self.opened_at.append(time.monotonic())
        self.version_at.setdefault(version, self.opened_at[-1])

    def train(self) -> dict[str, Any]:
        """The whole run; returns the broker's last status."""
        self.publish(0)
        while True:
            began = time.monotonic()
            reply = self.client.call("next_batch", timeout=PATIENCE)
            if reply.kind == "republish":  # a worker is back without weights
                self.publish(reply.fields["version"])
                continue
            if reply.kind == "end":
                status = self.client.request("status", timeout=PATIENCE)
                self.client.request("finished", timeout=PATIENCE)
                return status
            self.waits.append(time.monotonic() - began)
            self._step(reply.fields["step"], reply.fields["rollouts"])

    def _step(self, step: int, rollouts: int) -> None:
        for _ in range(rollouts):
            part = self.client.receive("rollout", PATIENCE)
            part.arrays()
            self.received[part.fields["ordinal"], part.fields["sample"]] += 1
        time.sleep(self.load.step_seconds)
        closed_at = time.monotonic()
        self.client.request("trained", {"step": step}, timeout=PATIENCE)
        self.trained_at.append(time.monotonic())
        self.publish(step, closed_at)
        self.client.request("step_done", {"metrics": {"step": step, "version": step}}, timeout=PATIENCE)


def simulate(load: Load) -> dict[str, Any]:
    """Run it; returns the report (see `tools/simulate --help`)."""
    with tempfile.TemporaryDirectory() as folder:
        config = base_config(Path(folder), load.steps * load.batch_size)
        config.rollout.batch_size, config.rollout.n_samples_per_prompt = load.batch_size, load.samples
        config.rollout.num_nodes = config.vllm.num_engines = load.workers
        config.train.max_lag, config.train.seed, config.broker.max_attempts = load.max_lag, load.seed, 10
        config.check()
        with running_broker(config) as (run, address):
            broker = next(p for p in psutil.Process().children(recursive=True) if p.cmdline()[1:4] == ["-m", "molt_hpc", "broker"])
            started = time.monotonic()
            trainer, status, logs, usage = _play(run, address, load, broker)
            wall = time.monotonic() - started
        return {"load": vars(load), "wall_seconds": wall} | _count(trainer, load) | {"workers_died": len(logs["deaths"])} | usage | {
            "broker_loop_p99_seconds": status["loop_p99_seconds"], "lease_ends": status["lease_ends"]} | _rates(trainer, load, logs)


def _play(run: Path, address: str, load: Load, broker: psutil.Process) -> tuple[Trainer, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(trainer, the broker's last status, the workers' logs by name, the broker's use of the machine)."""
    processes = [spawn(work, run, address, load, range(number, load.workers, load.processes), run / f"{number}.npz")
                 for number in range(load.processes)]
    client = actor_client(run, address)
    trainer = Trainer(client, load)
    status = trainer.train()
    usage = {"broker_cpu_seconds": sum(broker.cpu_times()[:2]), "broker_mib": broker.memory_info().rss / 2**20}
    client.close()
    for process in processes:
        process.join(30)
    parts = [np.load(run / f"{number}.npz") for number in range(load.processes)]
    return trainer, status, {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}, usage


def _count(trainer: Trainer, load: Load) -> dict[str, int]:
    """Every (prompt, sample) must have been trained on once."""
    expected = {(prompt, sample) for prompt in range(load.steps * load.batch_size) for sample in range(load.samples)}
    came = trainer.received
    return {"rollouts_once": sum(came[key] == 1 for key in expected), "rollouts_lost": len(expected - came.keys()),
            "rollouts_duplicated": sum(n - 1 for n in came.values()), "rollouts_unknown": len(came.keys() - expected)}


def _rates(trainer: Trainer, load: Load, logs: dict[str, np.ndarray]) -> dict[str, float]:
    """Shares and seconds over the steady state: neither the first steps nor the last, when prompts run out."""
    first = min(load.max_lag + 2, load.steps // 3)
    last = max(load.steps - load.max_lag - 2, first + 1)
    start, end = trainer.trained_at[first], trainer.trained_at[min(last, load.steps - 1)]
    steps, slots = min(last, load.steps - 1) - first, load.workers * load.slots
    pieces = logs["generating"]
    generating = np.clip(np.minimum(pieces[:, 1], end) - np.maximum(pieces[:, 0], start), 0, None).sum()
    latency = _lease_latency(trainer, load, logs["leases"], start, end)
    generation = lengths(load).mean() * load.batch_size * load.samples / slots
    training, step = load.step_seconds + load.update_seconds, (end - start) / max(steps, 1)
    return {"steady_steps": steps, "utilisation": float(generating / (slots * max(end - start, 1e-9))),
            "lease_p50_seconds": float(np.quantile(latency, 0.5)), "lease_p99_seconds": float(np.quantile(latency, 0.99)),
            "trainer_wait_seconds": float(np.mean(trainer.waits[first + 1:last + 1] or [0.0])), "step_seconds": step,
            "generation_seconds": float(generation), "training_seconds": training, "step_to_bound": step / max(generation, training),
            **batch_synchronous(load)}


def _lease_latency(trainer: Trainer, load: Load, leases: np.ndarray, start: float, end: float) -> np.ndarray:
    """Seconds from a credit to its lease, not counting the time before the rollout could be given out.

    A group may be given out once enough others are trained and the version of that time is served; nothing new is
    admitted within an update.
    """
    credit, came, group, _ = leases[(leases[:, 1] >= start) & (leases[:, 1] < end) & (leases[:, 3] == 1)].T
    closed, opened = np.array(trainer.closed_at), np.array(trainer.opened_at)
    versions = np.maximum(group.astype(int) // load.batch_size - load.max_lag, 0)
    possible = np.maximum(credit, np.array([trainer.version_at[v] for v in versions]))
    update = np.searchsorted(closed, possible, "right") - 1
    reopened = opened[np.maximum(update, 0)]
    possible = np.where((reopened > possible) & (came >= reopened), reopened, possible)
    return np.maximum(came - possible, 0.0) if len(came) else np.zeros(1)
