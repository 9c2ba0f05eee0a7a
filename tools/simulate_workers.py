"""What a simulated run draws, and its scripted rollout workers: real sockets and messages, engines that only let time pass.

Each worker has `slots` rollouts under way; a paused engine stops their clocks. All of them live in one event loop.
What happened is written to <folder>/<process>.npz: `generating` rows (start, end) of a slot that generates, `leases` rows (credit sent,
lease received, group, attempt), `deaths` rows (version, worker); times are monotonic.
"""

import asyncio
import heapq
import math
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import zmq

from molt_hpc import wire
from molt_hpc.broker.client import _connect, _hello
from molt_hpc.options import opt

PATIENCE = 120.0
"""Seconds without a message from the broker after which a process gives up."""
CUT = 1e-3
"""Share of the rollouts that are cut, all of them `tail` x the median long."""


# what a simulated run does, as functions of its arguments and seed ----------------------------


@dataclass(frozen=True)
class Load:
    """What is simulated; all seconds are real ones."""

    workers: int = opt(64, "rollout workers, each with one engine")
    slots: int = opt(4, "rollouts that an engine generates at a time")
    steps: int = opt(20, "optimizer steps")
    batch_size: int = opt(512, "prompt groups of a step")
    samples: int = opt(8, "rollouts of a group")
    max_lag: int = opt(2, "batches that may be admitted ahead of the trainer")
    mean_seconds: float = opt(0.3, "mean seconds of a rollout")
    tail: float = opt(20.0, "longest rollout over the median; 1 is no spread")
    step_seconds: float = opt(2.0, "seconds of a training step")
    update_seconds: float = opt(0.05, "seconds of a weight transfer")
    fault_rate: float = opt(0.001, "share of the leases that end in an infrastructure fault")
    deaths: int = opt(0, "workers that lose their connection and start anew")
    payload_bytes: int = opt(512, "bytes of a rollout of mean length")
    heartbeat_seconds: float = opt(2.0, "seconds between two heartbeats of a worker")
    processes: int = opt(2, "processes that the workers live in")
    seed: int = opt(0, "of everything that is drawn")


def lengths(load: Load) -> np.ndarray:
    """Seconds of generation of each rollout, float64 [prompts, samples]: log-normal, cut at tail x the median."""
    normal = NormalDist()
    sigma = math.log(load.tail) / normal.inv_cdf(1 - CUT)
    below = normal.cdf(math.log(load.tail) / sigma - sigma) if sigma else 1.0
    mean_over_median = math.exp(sigma * sigma / 2) * below + load.tail * CUT * (sigma > 0)
    drawn = np.random.default_rng([load.seed, 0]).lognormal(0.0, sigma, (load.steps * load.batch_size, load.samples))
    return np.minimum(drawn, load.tail) * load.mean_seconds / mean_over_median


def luck(load: Load) -> np.ndarray:
    """Uniform [prompts, samples]; attempt k of a rollout ends in a fault if it is below fault_rate ** k."""
    return np.random.default_rng([load.seed, 1]).random((load.steps * load.batch_size, load.samples))


def deaths(load: Load) -> set[tuple[int, int]]:
    """(version, worker): who loses its connection and all that it runs when it is paused for that version."""
    drawn = np.random.default_rng([load.seed, 2]).choice(max(load.steps - 1, 0) * load.workers, load.deaths, replace=False)
    return {(int(number) // load.workers + 1, int(number) % load.workers) for number in drawn}


def batch_synchronous(load: Load) -> dict[str, float]:
    """Step time and utilisation of the same fleet if each batch is dealt, awaited to its last rollout, then trained on."""
    slots, total, makespans = load.workers * load.slots, 0.0, 0.0
    for batch in lengths(load).reshape(load.steps, -1):
        free = [0.0] * slots
        for seconds in batch.tolist():
            heapq.heapreplace(free, free[0] + seconds)
        makespans += max(free)
        total += float(batch.sum())
    wall = makespans + load.steps * (load.step_seconds + load.update_seconds)
    return {"batch_synchronous_step_seconds": wall / load.steps, "batch_synchronous_utilisation": total / (slots * wall)}


# the workers -----------------------------------------------------------------------------------


class ScriptedWorker:
    """One worker; `running` is lease id -> [lease fields, seconds left, since when]."""

    def __init__(self, fleet: "Fleet", index: int):
        self.fleet, self.load, self.index, self.name, self.generation = fleet, fleet.load, index, f"rollout_n{index}", 0
        self.connect()
        self.later(self.load.heartbeat_seconds * (1 + index / self.load.workers), self.heartbeat)

    def connect(self) -> None:
        """Say hello from a new socket, knowing nothing of before."""
        self.generation += 1
        self.paused, self.stopped = False, False
        self.running: dict[str, list[Any]] = {}
        self.credits: deque[float] = deque()
        self.socket = _connect(self.fleet.context, self.fleet.run, self.fleet.address)
        self.fleet.loop.add_reader(self.socket.fd, self.receive)
        self.send("hello", _hello("rollout", self.name, 1))

    def die(self) -> None:
        self.fleet.loop.remove_reader(self.socket.fd)
        self._stop_clocks()
        self.socket.close(linger=0)
        self.connect()

    def later(self, seconds: float, action: Any, *words: Any) -> None:
        self.fleet.loop.call_later(seconds, action, *words)

    def send(self, kind: str, fields: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        self.socket.send_multipart(wire.encode(kind, fields, arrays))

    def receive(self) -> None:
        """Take every message that is there. (The descriptor of a ZeroMQ socket only tells of changes.)"""
        while not self.socket.closed:
            try:
                message = wire.decode(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.fleet.heard = time.monotonic()
            getattr(self, f"on_{message.kind}")(message.fields)

    def heartbeat(self) -> None:
        if not self.stopped:
            progress = [[f["group_id"], f["sample"], f["attempt"]] for f, *_ in self.running.values()]
            self.send("heartbeat", {"running": len(self.running), "rollouts": len(self.running), "progress": progress})
            self.later(self.load.heartbeat_seconds, self.heartbeat)
            self.receive()

    # what the broker says ------------------------------------------------------------------

    def on_welcome(self, fields: dict[str, Any]) -> None:
        self.send("ready", {"engines": {f"{self.name}_e0": 1}, "request": 2})
        self.send("credits", self.ask(self.load.slots))

    def on_ok(self, fields: dict[str, Any]) -> None:
        """It has heard that this worker is ready."""

    def on_refused(self, fields: dict[str, Any]) -> None:
        raise RuntimeError(f"{self.name}: the broker refuses: {fields['reason']}")

    def on_stop(self, fields: dict[str, Any]) -> None:
        self.stopped = True
        self.fleet.left.discard(self.index)

    def on_leases(self, fields: dict[str, Any]) -> None:
        """New leases; `accepted` names rollouts that the broker has on disk, for which a real worker frees its window."""
        for lease in fields["leases"]:
            now = time.monotonic()
            self.fleet.leases.extend((self.credits.popleft(), now, lease["group_id"], lease["attempt"]))
            seconds = self.fleet.lengths[lease["prompt"]["ordinal"], lease["sample"]]
            self.running[lease["id"]] = [lease, seconds / 2 if self.faulty(lease) else seconds, now]
            if not self.paused:
                self._go(self.running[lease["id"]], now)

    def on_pause(self, fields: dict[str, Any]) -> None:
        doom = (fields["version"], self.index)
        if doom in self.fleet.deaths:
            self.fleet.deaths.discard(doom)
            self.fleet.died.extend(doom)
            self.die()
            return
        self._stop_clocks()
        self.paused, self.generation = True, self.generation + 1
        self._answer("paused", fields)

    def on_transfer(self, fields: dict[str, Any]) -> None:
        self.later(self.load.update_seconds, self._answer, "applied", fields)

    def on_resume(self, fields: dict[str, Any]) -> None:
        self.paused = False
        for rollout in self.running.values():
            self._go(rollout, time.monotonic())
        self._answer("resumed", fields)

    def on_abort(self, fields: dict[str, Any]) -> None:
        self._answer("aborted", fields)

    def on_drop(self, fields: dict[str, Any]) -> None:
        raise RuntimeError(f"{self.name}: the broker dropped {fields['engine']}: {fields['reason']}")

    def _answer(self, answer: str, fields: dict[str, Any]) -> None:
        self.send("engine_answer", {"answer": answer, "checksum": "x"} | {k: fields[k] for k in ("engine", "version", "epoch")})
        self.receive()

    # rollouts ------------------------------------------------------------------------------

    def ask(self, count: int) -> dict[str, int]:
        """The field of a message that asks for so many leases."""
        self.credits.extend([time.monotonic()] * count)
        return {"credits": count}

    def faulty(self, fields: dict[str, Any]) -> bool:
        return self.fleet.luck[fields["prompt"]["ordinal"], fields["sample"]] < self.load.fault_rate ** fields["attempt"]

    def _go(self, rollout: list[Any], now: float) -> None:
        rollout[2] = now
        self.later(rollout[1], self._end, rollout[0]["id"], self.generation)

    def _stop_clocks(self) -> None:
        """Note what has been generated so far, unless the engine is paused already."""
        now = time.monotonic()
        for rollout in [] if self.paused else self.running.values():
            self.fleet.generating.extend((rollout[2], now))
            rollout[1] -= now - rollout[2]

    def _end(self, lease_id: str, generation: int) -> None:
        """A rollout has its last token; `generation` tells that it was not paused or lost since this was planned."""
        if generation != self.generation or self.stopped:
            return
        fields, _, since = self.running.pop(lease_id)
        self.fleet.generating.extend((since, time.monotonic()))
        head = {k: fields[k] for k in ("group_id", "sample", "attempt")} | self.ask(1)
        if self.faulty(fields):
            self.send("fault", head | {"fault": "infrastructure", "reason": "scripted"})
        else:
            ordinal = fields["prompt"]["ordinal"]
            seconds = float(self.fleet.lengths[ordinal, fields["sample"]])
            size = int(self.load.payload_bytes * seconds / self.load.mean_seconds)
            self.send("rollout", head | {"ordinal": ordinal, "seconds": seconds, "score": 1.0}, {"payload": self.fleet.payload[:size]})
        self.receive()


class Fleet:
    """The workers of one process and what they have in common."""

    def __init__(self, run: Path, address: str, load: Load, mine: range):
        self.run, self.address, self.load = run, address, load
        self.loop, self.heard, self.failures = asyncio.get_running_loop(), time.monotonic(), []
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * len(mine) + 64)
        self.lengths, self.luck, self.deaths = lengths(load), luck(load), deaths(load)
        self.payload = np.zeros(int(load.payload_bytes * self.lengths.max() / load.mean_seconds) + 1, np.uint8)
        self.generating, self.leases, self.died = array("d"), array("d"), array("d")
        self.left = set(mine)
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context["exception"]))
        self.workers = [ScriptedWorker(self, index) for index in mine]

    async def serve(self) -> None:
        """Until the broker has stopped every worker."""
        while self.left:
            await asyncio.sleep(0.1)
            if self.failures:
                raise self.failures[0]
            if time.monotonic() - self.heard > PATIENCE:
                raise TimeoutError(f"no word from the broker at {self.address} for {PATIENCE:.0f} s")


def work(run: Path, address: str, load: Load, mine: range, results: Path) -> None:
    """The main function of a process with the workers `mine`."""
    async def main() -> Fleet:
        fleet = Fleet(run, address, load, mine)
        await fleet.serve()
        return fleet

    fleet = asyncio.run(main())
    np.savez(results, generating=np.array(fleet.generating).reshape(-1, 2), leases=np.array(fleet.leases).reshape(-1, 4),
             deaths=np.array(fleet.died).reshape(-1, 2))
