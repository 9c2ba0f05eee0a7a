"""Scripted rollout workers, many in one process: real sockets and messages, engines that only let time pass.

Each worker has `slots` rollouts under way; a paused engine stops their clocks. All sockets are watched by one epoll.
What happened is written to <folder>/<process>.npz: `generating` rows (start, end) of a slot that generates, `held` the
same of a slot whose rollout is paused, `leases` rows (credit sent, lease received, group, attempt); times are monotonic.
"""

from __future__ import annotations

import heapq
import json
import select
import time
from array import array
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from simulate_model import Load, lengths, luck

from molt_hpc import wire
from molt_hpc.broker.client import _connect, _hello

PATIENCE = 120.0
"""Seconds without a message from the broker after which a process gives up."""


class ScriptedWorker:
    """One worker; `running` is lease id -> [lease fields, seconds left, since when]."""

    def __init__(self, fleet: Fleet, index: int):
        self.fleet, self.index, self.name, self.generation = fleet, index, f"rollout_n{index}", 0
        self.connect()
        fleet.at(time.monotonic() + fleet.load.heartbeat_seconds * (1 + index / fleet.load.workers), self.heartbeat)

    def connect(self) -> None:
        """Say hello from a new socket, knowing nothing of before."""
        self.generation += 1
        self.paused, self.stopped = False, False
        self.running: dict[str, list[Any]] = {}
        self.queue: deque[dict[str, Any]] = deque()
        self.credits: deque[float] = deque()
        self.socket = _connect(self.fleet.context, self.fleet.run, self.fleet.address)
        self.fleet.watch(self)
        self.send("hello", _hello("rollout", self.name, 1, {"request": 1}))

    def die(self) -> None:
        self.fleet.forget(self)
        for lease in self.running.values():
            self._log_piece(lease, time.monotonic())
        self.socket.close(linger=0)
        self.connect()

    def send(self, kind: str, fields: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        self.socket.send_multipart(wire.encode(kind, fields, arrays))

    def receive(self) -> None:
        """Take every message that is there. (The descriptor of a ZeroMQ socket only tells of changes.)"""
        while not self.socket.closed:
            try:
                message = wire.decode(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            getattr(self, f"on_{message.kind}")(message.fields)

    def heartbeat(self) -> None:
        if not self.stopped:
            progress = [[f["group_id"], f["sample"], f["attempt"]] for f, *_ in self.running.values()]
            self.send("heartbeat", {"running": len(self.running), "rollouts": len(self.running) + len(self.queue), "progress": progress})
            self.fleet.at(time.monotonic() + self.fleet.load.heartbeat_seconds, self.heartbeat)
            self.receive()

    # what the broker says ------------------------------------------------------------------

    def on_welcome(self, fields: dict[str, Any]) -> None:
        self.send("ready", {"engines": {f"{self.name}_e0": 1}, "request": 2})
        self.send("credits", self.ask(self.fleet.load.slots + self.fleet.load.prefetch))

    def on_ok(self, fields: dict[str, Any]) -> None:
        self.fleet.control.send_bytes(b"up")

    def on_refused(self, fields: dict[str, Any]) -> None:
        raise RuntimeError(f"{self.name}: the broker refuses: {fields['reason']}")

    def on_stop(self, fields: dict[str, Any]) -> None:
        self.stopped = True
        self.fleet.left.discard(self.index)

    def on_leases(self, fields: dict[str, Any]) -> None:
        """New leases; `accepted` names rollouts that the broker has on disk, for which a real worker frees its window."""
        for lease in fields["leases"]:
            self.fleet.leases.extend((self.credits.popleft(), time.monotonic(), lease["group_id"], lease["attempt"]))
            self.queue.append(lease)
        self._fill()

    def on_pause(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        for lease in self.running.values():
            lease[1] -= self._log_piece(lease, now)
        self.paused, self.generation = True, self.generation + 1
        self._answer("paused", fields)

    def on_transfer(self, fields: dict[str, Any]) -> None:
        self.fleet.at(time.monotonic() + self.fleet.load.update_seconds, self._answer, "applied", fields)

    def on_resume(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        for lease in self.running.values():
            self.fleet.held.extend((lease[2], now))
            self._go(lease, now)
        self.paused = False
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

    def _fill(self) -> None:
        while self.queue and len(self.running) < self.fleet.load.slots:
            fields = self.queue.popleft()
            seconds = self.fleet.lengths[fields["prompt"]["ordinal"], fields["sample"]]
            lease = self.running[fields["id"]] = [fields, seconds / 2 if self.faulty(fields) else seconds, time.monotonic()]
            if not self.paused:
                self._go(lease, lease[2])

    def faulty(self, fields: dict[str, Any]) -> bool:
        return self.fleet.luck[fields["prompt"]["ordinal"], fields["sample"]] < self.fleet.load.fault_rate ** fields["attempt"]

    def _go(self, lease: list[Any], now: float) -> None:
        lease[2] = now
        self.fleet.at(now + lease[1], self._end, lease[0]["id"], self.generation)

    def _log_piece(self, lease: list[Any], now: float) -> float:
        (self.fleet.held if self.paused else self.fleet.generating).extend((lease[2], now))
        seconds, lease[2] = now - lease[2], now
        return seconds

    def _end(self, lease_id: str, generation: int) -> None:
        """A rollout has its last token; `generation` tells that it was not paused or lost since this was planned."""
        if generation != self.generation or self.stopped:
            return
        lease = self.running.pop(lease_id)
        self._log_piece(lease, time.monotonic())
        fields, ordinal = lease[0], lease[0]["prompt"]["ordinal"]
        head = {k: fields[k] for k in ("group_id", "sample", "attempt")} | self.ask(1)
        if self.faulty(fields):
            self.send("fault", head | {"fault": "infrastructure", "reason": "scripted"})
        else:
            seconds = float(self.fleet.lengths[ordinal, fields["sample"]])
            size = int(self.fleet.load.payload_bytes * seconds / self.fleet.load.mean_seconds)
            self.send("rollout", head | {"ordinal": ordinal, "seconds": seconds, "score": 1.0}, {"payload": self.fleet.payload[:size]})
        self._fill()
        self.receive()


class Fleet:
    """The workers of one process, their sockets and their timers."""

    def __init__(self, run: Path, address: str, load: Load, control: Connection, mine: list[int]):
        self.run, self.address, self.load, self.control = run, address, load, control
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * len(mine) + 64)
        self.epoll, self.by_descriptor = select.epoll(), {}
        self.epoll.register(control.fileno(), select.EPOLLIN)
        self.timers: list[tuple] = []
        self.count = 0
        self.lengths, self.luck = lengths(load), luck(load)
        self.payload = np.zeros(int(load.payload_bytes * self.lengths.max() / load.mean_seconds) + 1, np.uint8)
        self.generating, self.held, self.leases = array("d"), array("d"), array("d")
        self.left = set(mine)
        self.workers = {index: ScriptedWorker(self, index) for index in mine}

    def watch(self, worker: ScriptedWorker) -> None:
        self.by_descriptor[worker.socket.fd] = worker
        self.epoll.register(worker.socket.fd, select.EPOLLIN)

    def forget(self, worker: ScriptedWorker) -> None:
        self.epoll.unregister(worker.socket.fd)
        del self.by_descriptor[worker.socket.fd]

    def at(self, when: float, action: Any, *words: Any) -> None:
        self.count += 1
        heapq.heappush(self.timers, (when, self.count, action, words))

    def serve(self) -> None:
        """Until the broker has stopped every worker."""
        heard = time.monotonic()
        while self.left:
            wait = max(self.timers[0][0] - time.monotonic(), 0.0) if self.timers else 1.0
            for descriptor, _ in self.epoll.poll(min(wait, 1.0)):
                heard = time.monotonic()
                if descriptor == self.control.fileno():
                    self.workers[json.loads(self.control.recv_bytes())].die()
                elif descriptor in self.by_descriptor:  # it may have died since the poll
                    self.by_descriptor[descriptor].receive()
            while self.timers and self.timers[0][0] <= time.monotonic():
                _, _, action, words = heapq.heappop(self.timers)
                action(*words)
            if time.monotonic() - heard > PATIENCE:
                raise TimeoutError(f"no word from the broker at {self.address} for {PATIENCE:.0f} s")


def work(run: Path, address: str, load: Load, control: Connection, mine: list[int], results: Path) -> None:
    """The main function of a process with the workers `mine`."""
    fleet = Fleet(run, address, load, control, mine)
    fleet.serve()
    rows = {"generating": (fleet.generating, 2), "held": (fleet.held, 2), "leases": (fleet.leases, 4)}
    np.savez(results, **{name: np.array(values).reshape(-1, width) for name, (values, width) in rows.items()})
