"""Scripted ends of a run around a real broker: its process, a rollout worker and an actor, all on the real wire.

The worker holds its leases for a while and answers them in random order; the actor trains nothing but keeps what it
got. Both belong to one attempt; a test that kills the broker makes new ones. Whatever a BrokerProcess has opened is
closed with it: a ZeroMQ context that is collected with an open socket never returns.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from molt_hpc import wire
from molt_hpc.broker.client import BrokerClient, RunStopped, create_keys, read_keys, wait_for_endpoint
from molt_hpc.config import RunConfig, dump
from molt_hpc.data.references import Producer, resolve
from molt_hpc.guard import guarded
from molt_hpc.records import Prompt, Rollout, Segment


class BrokerProcess:
    """`python -m molt_hpc broker` on a run folder, which outlives the process; each `start` is a new attempt."""

    def __init__(self, config: RunConfig):
        self.run, self.attempt, self.process, self.address = Path(config.output_dir), 0, None, ""
        self._ends: list[Any] = []
        self.run.mkdir(parents=True)
        (self.run / "config.toml").write_text(dump(config))
        create_keys(self.run)

    def start(self) -> BrokerProcess:
        self.attempt += 1
        with open(self.run / f"broker_{self.attempt}.log", "ab") as log:
            words = [sys.executable, "-m", "molt_hpc", "broker", str(self.run), "--attempt", str(self.attempt)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(guarded(words, owner=os.getpid()), stdout=log, stderr=log, env=env)
        self.address = wait_for_endpoint(self.run, self.attempt, 60, lambda: self.process.poll() is None)
        return self

    def pid(self) -> int:
        """Of the broker itself: the guard's two processes run it below them."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid

    def rss(self) -> int:
        """Resident bytes of the broker's process."""
        return int(Path(f"/proc/{self.pid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """SIGKILL, at whatever it is doing; fine if it has ended."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(self.pid(), signal.SIGKILL)
        self.process.wait(20)

    def log(self) -> str:
        return (self.run / f"broker_{self.attempt}.log").read_text()

    def client(self, role: str = "tool", name: str = "test") -> BrokerClient:
        return self._opened(BrokerClient(self.run, self.address, role, name, self.attempt))

    def worker(self, **options: Any) -> ScriptedWorker:
        return self._opened(ScriptedWorker(self, self.attempt, **options))

    def actor(self) -> ScriptedActor:
        return self._opened(ScriptedActor(self, self.attempt))

    def raw_socket(self, **options: int) -> zmq.Socket:
        """A DEALER with the run's keys that has not said hello; options are set before it connects."""
        keys, peer = read_keys(self.run), zmq.Context.instance().socket(zmq.DEALER)
        peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = keys["broker_public"], keys["role_public"], keys["role_secret"]
        peer.linger = 0
        for name, value in options.items():
            setattr(peer, name, value)
        peer.connect(self.address)
        return self._opened(peer)

    def _opened(self, end: Any) -> Any:
        self._ends.append(end)
        return end

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for end in self._ends:
            end.close()


def made_rollout(lease: dict, version: int, score: float, tokens: int) -> Rollout:
    """A rollout of a lease whose content is a function of the lease."""
    ids = np.random.default_rng([lease["group_id"], lease["sample"], lease["attempt"]]).integers(0, 1000, 3 + tokens).astype(np.int32)
    logprobs = np.zeros(3 + tokens, np.float32)
    logprobs[3:] = -1.0
    segment = Segment(ids, logprobs, np.array([[3, 3 + tokens]], np.int32), np.array([[3, 3 + tokens, version]], np.int32), 1.0)
    return Rollout(lease["group_id"], lease["sample"], lease["attempt"], Prompt(**lease["prompt"]), [segment], score, score, "terminated",
                   True, False, 1, 0.1)


ENGINE_ANSWERS = {"pause": "paused", "transfer": "applied", "resume": "resumed", "abort": "aborted"}
"""What an engine answers to the commands of an update."""


class ScriptedWorker(threading.Thread):
    """A rollout node with one engine: answers its leases in random order, as long as the broker's window of bytes has room.

    score(lease) and tokens(lease) say what a rollout holds. `linger` is the chance that a lease waits for another round.
    """

    def __init__(self, broker: BrokerProcess | object, attempt: int = 1, credits: int = 8,
                 score: Callable[[dict], float] = lambda lease: 1.0, tokens: Callable[[dict], int] = lambda lease: 4,
                 linger: float = 0.3, inline_bytes: int = 1 << 62, name: str = "rollout_n0"):
        super().__init__(daemon=True)
        self.inline_bytes, self.producer = inline_bytes, Producer(broker.run, name, file_bytes=2000)
        self.client = BrokerClient(broker.run, broker.address, "rollout", name, attempt)
        self.credits, self.score, self.tokens, self.linger, self.engine = credits, score, tokens, linger, f"{name}_e0"
        self.window, self.sizes, self.held, self.sent = self.client.welcome["window_bytes"], {}, [], []
        self.reason, self.version, self.ended, self.hold = None, -1, threading.Event(), threading.Event()
        self.start()

    def _send(self, kind: str, fields: dict, arrays: dict | None = None) -> None:
        self.client._socket.send_multipart(wire.encode(kind, fields, arrays))

    def run(self) -> None:
        self._send("ready", {"engines": {self.engine: 1}})
        self._send("credits", {"credits": self.credits})
        while not self.ended.is_set() and self.reason is None:
            if self.client._socket.poll(2 if self.held else 50):
                self._receive(wire.decode(self.client._socket.recv_multipart()))
            elif self.held and not self.hold.is_set():
                self._answer()
        self.client.close()

    def _receive(self, message: wire.Message) -> None:
        fields = message.fields
        if message.kind == "stop":
            self.reason = fields["reason"]
        elif message.kind in ENGINE_ANSWERS:
            self._command(message.kind, fields)
        elif message.kind == "leases":
            self.held += fields["leases"]
            for lease in fields["accepted"]:
                self.sizes.pop(lease, None)

    def _command(self, kind: str, fields: dict) -> None:
        self.version = fields["version"]
        own = {"engine": self.engine, "version": self.version, "epoch": fields["epoch"], "checksum": "aa"}
        self._send("engine_answer", {"answer": ENGINE_ANSWERS[kind]} | own)

    def _answer(self) -> None:
        random.shuffle(self.held)
        waiting = []
        for lease in self.held:
            if random.random() < self.linger or not self._send_rollout(lease):
                waiting.append(lease)
        self.held = waiting

    def _send_rollout(self, lease: dict) -> bool:
        fields, arrays = made_rollout(lease, self.version, self.score(lease), self.tokens(lease)).to_wire()
        frames = wire.encode("rollout", fields | {"credits": 1}, arrays)
        if self.sizes and sum(self.sizes.values()) + wire.size_of(frames) > self.window:
            return False
        if wire.size_of(frames) > self.inline_bytes:
            (frames,) = self.producer.put([frames])
        self.sizes[lease["id"]] = wire.size_of(frames)
        self.client._socket.send_multipart(frames)
        self.sent.append(lease["id"])
        return True

    def close(self) -> None:
        """End without a word, as a process that is gone does."""
        self.ended.set()
        self.join(10)


class BrokerGone(Exception):
    """The test has ended this attempt's broker."""


class ScriptedActor:
    """The actor's end of one attempt. `heard(n)` is called with its n-th message.

    Set `gone` when the broker is killed: whatever waits then raises BrokerGone.
    """

    def __init__(self, broker: BrokerProcess | object, attempt: int = 1, timeout: float = 60.0):
        self.run, self.timeout, self.gone, self._requests = broker.run, timeout, threading.Event(), 0
        self.received, self.heard = 0, lambda count: None
        self.client = BrokerClient(broker.run, broker.address, "actor", "actor", attempt)
        self.version = self.client.welcome["trained_steps"]

    def _receive(self) -> wire.Message:
        deadline = time.monotonic() + self.timeout
        while not self.client._socket.poll(20):
            if self.gone.is_set():
                raise BrokerGone
            if time.monotonic() > deadline:
                raise TimeoutError(f"the broker said nothing for {self.timeout:.0f} s")
        frames = self.client._socket.recv_multipart()
        message = wire.decode(frames)
        self.received += 1
        self.heard(self.received)
        if message.kind == "stop":
            raise RunStopped(message.fields["reason"])
        if message.kind == "rollout":
            self.client._socket.send_multipart(wire.encode("got", {"nbytes": sum(len(f) for f in frames)}))
        return message

    def call(self, kind: str, fields: dict | None = None, arrays: dict | None = None) -> wire.Message:
        """A request and its reply; AssertionError if it is refused."""
        self._requests += 1
        number = 1_000_000 + self._requests
        self.client._socket.send_multipart(wire.encode(kind, (fields or {}) | {"request": number}, arrays))
        while (message := self._receive()).fields.get("reply_to") != number:
            pass
        assert message.kind != "refused", f"{kind}: {message.fields}"
        return message

    def publish(self, version: int) -> None:
        """Send as often as the broker says; `epochs` are those of the last update."""
        reply, self.epochs = self.call("update_begin", {"version": version}), []
        while reply.kind == "send":
            self.epochs.append(reply.fields["epoch"])
            epoch = {"version": version, "epoch": reply.fields["epoch"]}
            reply = self.call("update_transfer", epoch | {"master_address": "x", "master_port": 1, "backend": "gloo"},
                              {"plan": np.zeros(2, np.uint8)})
            if reply.kind == "ok":
                reply = self.call("update_sent", epoch | self.transfer())
        self.report = reply.fields

    def transfer(self) -> dict:
        """What this trainer says at the end of a transfer."""
        return {"checksum": "aa"}

    def begin(self) -> None:
        """Report as ready and send the first weights."""
        self.call("ready")
        self.publish(self.version)

    def next_batch(self) -> tuple[int, list[Rollout]] | None:
        """(step, rollouts) or None at the end of the run; checks every payload."""
        while (message := self.call("next_batch")).kind == "republish":
            self.publish(self.version)
        if message.kind == "end":
            return None
        parts = [resolve(self.run, self._receive()) for _ in range(message.fields["rollouts"])]
        return message.fields["step"], [Rollout.from_wire(part.fields, part.arrays()) for part in parts]

    def trained(self, step: int) -> None:
        self.call("trained", {"step": step})
        self.version = step
        self.publish(step)
        self.call("step_done", {"metrics": {"step": step, "version": step}})

    def close(self) -> None:
        """Close the socket; may be called again."""
        if not self.client._socket.closed:
            self.client.close()
