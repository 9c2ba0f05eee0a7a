"""The broker's process: one ROUTER socket, one loop, around the pure ledger and update protocol.

Workers say `credits` and are given leases; what they produce is kept as it came (the payload is never
decoded) until a batch is complete and the actor asks for it. The actor then says `trained`, has the
engines updated (`update_begin`, `update_transfer`, `update_sent`) and reports its metrics (`step_done`).
Nothing here blocks: whoever must wait is answered later, and every wait has a deadline in `_tick`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from molt_hpc import wire
from molt_hpc.broker.client import ENDPOINT, read_keys, write_private
from molt_hpc.broker.conductor import Conductor
from molt_hpc.broker.ledger import Grant, GroupState, Ledger, LedgerConfig
from molt_hpc.config import RunConfig
from molt_hpc.data.prompts import PromptOrder
from molt_hpc.records import Lease

log = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two looks at the deadlines."""
FAULT_WINDOW, FAULT_MINIMUM = 64, 16
"""The fault rate is taken over the last 64 ended rollouts, once 16 have ended."""


@dataclass
class Peer:
    """A process that has said hello."""

    identity: bytes
    role: str
    name: str
    host: str
    last_seen: float
    ready: bool = False
    credits: int = 0
    engines: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)


class AllowedKey:
    """Lets in whoever holds the run's role key, and nobody else."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Broker:
    """State and handlers. `serve` runs the loop and returns the exit code: 0 done, 1 failed."""

    def __init__(self, run: Path, config: RunConfig, attempt: int, on_step: Callable[[dict[str, Any]], str], host: str = "127.0.0.1"):
        self.run, self.config, self.attempt, self.step_sink = run, config, attempt, on_step
        self.prompts = PromptOrder(config)
        self.ledger = Ledger(LedgerConfig(
            config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.min_group_size, config.train.max_lag,
            config.broker.max_attempts, config.broker.lease_timeout, self.prompts.total, config.train.max_steps))
        self.peers: dict[bytes, Peer] = {}
        self.finished: dict[tuple[int, int], list[Any]] = {}
        self.phase, self.reason = "roll_call", ""
        self.expected = ["actor", *(f"rollout_n{i}" for i in range(config.rollout.num_nodes))]
        self.board: dict[str, Any] = {}
        self.step_lines: list[str] = []
        self.bad_frames: Counter[str] = Counter()
        self.outcomes: deque[bool] = deque(maxlen=FAULT_WINDOW)
        self.batch_request: tuple[bytes, int, float] | None = None
        self.next_report = 0.0
        self.last_counts: Counter[str] = Counter()
        self.started = time.monotonic()
        self.conductor = Conductor(config.weights, self._send, self._reply)
        self._bind(host)

    # sockets -------------------------------------------------------------------------------

    def _bind(self, host: str) -> None:
        keys = read_keys(self.run)
        self.context = zmq.Context()
        self.auth = ThreadAuthenticator(self.context)
        self.auth.start()
        self.auth.configure_curve_callback(credentials_provider=AllowedKey(keys["role_public"]))
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys["broker_public"], keys["broker_secret"]
        self.socket.router_mandatory = True
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.maxmsgsize = self.config.broker.max_message_bytes
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = 10_000, 60_000
        self.socket.ipv6 = ":" in host
        port = self.socket.bind_to_random_port(f"tcp://{f'[{host}]' if ':' in host else host}")
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        write_private(self.run / ENDPOINT, {"address": self.address, "attempt": self.attempt})
        log.info("listening on %s, attempt %d", self.address, self.attempt)

    def _send_frames(self, identity: bytes, frames: list[Any]) -> bool:
        """Send without ever waiting. False if the peer is not connected any more."""
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False

    def _send(self, identity: bytes, kind: str, fields: dict[str, Any], frames: list[Any] = (), specs: list[dict] = ()) -> bool:
        header = wire.encode(kind, fields)[0] if not frames else wire.relay_header(kind, fields, specs)
        return self._send_frames(identity, [header, *frames])

    def _reply(self, identity: bytes, request: int, kind: str, fields: dict[str, Any]) -> None:
        self._send(identity, kind, fields | {"reply_to": request})

    # the loop ------------------------------------------------------------------------------

    def serve(self) -> int:
        next_tick = 0.0
        while self.phase not in ("done", "failed"):
            if self.socket.poll(TICK * 1000):
                for _ in range(1000):
                    try:
                        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    self._receive(frames)
            if time.monotonic() >= next_tick:
                self._tick(time.monotonic())
                next_tick = time.monotonic() + TICK
            self._give_leases()
            self._ship()
        self._say_goodbye()
        return 0 if self.phase == "done" else 1

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        try:
            message = wire.decode(frames[1:], self.config.broker.max_message_bytes)
        except wire.WireError as error:
            self.bad_frames[str(error)[:80]] += 1
            log.warning("a message that is not ours was dropped: %s", error)
            return
        peer, request = self.peers.get(identity), message.fields.get("request", 0)
        handler = getattr(self, f"on_{message.kind}", None)
        if message.kind == "hello":
            self.on_hello(identity, request, message.fields)
        elif peer is None:
            self._reply(identity, request, "refused", {"reason": "say hello first"})
        elif handler is None:
            self._reply(identity, request, "refused", {"reason": f"unknown message {message.kind!r}"})
        else:
            peer.last_seen = time.monotonic()
            try:
                handler(peer, message, request)
            except (KeyError, TypeError) as error:  # a field is missing or of the wrong type: the sender's fault
                self.bad_frames[f"{message.kind}: {error!r}"] += 1
                self._reply(identity, request, "refused", {"reason": f"{message.kind}: bad field: {error!r}"})

    def _tick(self, now: float) -> None:
        for grant in self.ledger.expire(now):
            log.warning("lease %s expired after %.0f s: leased again", grant.id, self.config.broker.lease_timeout)
        for peer in [p for p in self.peers.values() if p.role == "rollout" and now - p.last_seen > self.config.broker.heartbeat_timeout]:
            self._lose(peer, f"silent for {now - peer.last_seen:.0f} s")
        reason = self.conductor.expire(now)
        if reason:
            self.fail(reason)
        if self.phase == "roll_call" and now - self.started > self.config.launch.roll_call_timeout:
            self.fail(f"roll call: no report within {self.config.launch.roll_call_timeout:.0f} s from {', '.join(self.missing())}")
        if self.batch_request and now > self.next_report:
            self._report_wait(now)

    def _report_wait(self, now: float) -> None:
        waited, awaited = now - self.batch_request[2], self.ledger.awaited()
        self.next_report = now + 30
        if waited > 20:
            log.info("the actor has waited %.0f s for step %d: %d rollouts are out, first %s", waited,
                     self.ledger.shipped_steps + 1, len(awaited), "; ".join(awaited[:3]) or "none")

    def _lose(self, peer: Peer, reason: str) -> None:
        lost = self.ledger.worker_lost(peer.name)
        self.peers.pop(peer.identity, None)
        log.error("%s on %s is gone (%s); %d leases go to others", peer.name, peer.host, reason, len(lost))
        for engine in peer.engines:
            self.conductor.engine_failed(engine, f"{peer.name} is gone ({reason})")
        if self.phase == "running" and not self._workers():
            self.fail(f"the last rollout worker is gone: {peer.name} on {peer.host}: {reason}")

    def fail(self, reason: str) -> None:
        if self.phase not in ("done", "failed"):
            self.phase, self.reason = "failed", reason
            log.error("the run fails: %s", reason)

    def _say_goodbye(self) -> None:
        log.info("the run is %s%s", self.phase, f": {self.reason}" if self.reason else "")
        for peer in list(self.peers.values()):
            if peer.role != "supervisor":
                self._send(peer.identity, "stop", {"reason": self.reason or "the run is done"})
        # the supervisor asks once a second: let it hear the end before the socket closes
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and self.socket.poll(200) is not None:
            if self.socket.poll(0):
                self._receive(self.socket.recv_multipart(copy=False))
        self.auth.stop()
        self.socket.close(linger=500)
        self.context.term()

    # everybody -----------------------------------------------------------------------------

    def on_hello(self, identity: bytes, request: int, fields: dict[str, Any]) -> None:
        if fields.get("attempt") != self.attempt:
            self._reply(identity, request, "refused", {"reason": f"this is attempt {self.attempt}, not {fields.get('attempt')}"})
            return
        role, name = str(fields.get("role")), str(fields.get("name"))
        for old in [p for p in self.peers.values() if p.name == name and p.role == "rollout" == role]:
            self._lose(old, "it said hello again")
        self.peers[identity] = Peer(identity, role, name, str(fields.get("host")), time.monotonic())
        log.info("hello from %s on %s", name, fields.get("host"))
        self._reply(identity, request, "welcome", {"total_steps": self.ledger.total_steps, "attempt": self.attempt})

    def missing(self) -> list[str]:
        ready = {p.name for p in self.peers.values() if p.ready}
        return [name for name in self.expected if name not in ready]

    def on_ready(self, peer: Peer, message: wire.Message, request: int) -> None:
        peer.ready, peer.engines = True, dict(message.fields.get("engines", {}))
        log.info("%s is ready%s", peer.name, f" with {', '.join(peer.engines)}" if peer.engines else "")
        if self.phase == "roll_call" and not self.missing():
            self.phase = "running"
            log.info("every role has reported after %.1f s", time.monotonic() - self.started)
            self.conductor.engines_ready(self._engines(), time.monotonic())
        self._reply(peer.identity, request, "ok", {})

    def on_status(self, peer: Peer, message: wire.Message, request: int) -> None:
        first = int(message.fields.get("lines_from", 0))
        self._reply(peer.identity, request, "status", {
            "phase": self.phase, "reason": self.reason, "missing": self.missing(), "step": self.ledger.trained_steps,
            "total_steps": self.ledger.total_steps, "version": self.ledger.current_version, "groups": self.ledger.counts(),
            "awaited": self.ledger.awaited()[:5], "update": self.conductor.describe(), "step_lines": self.step_lines[first:],
            "workers": {p.name: {"host": p.host, "credits": p.credits, **p.progress} for p in self._workers()}})

    def on_stop(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._reply(peer.identity, request, "ok", {})
        self.fail(str(message.fields.get("reason", "stopped")))

    def on_publish(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.board[message.fields["key"]] = message.fields["value"]
        self._reply(peer.identity, request, "ok", {})

    def on_lookup(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._reply(peer.identity, request, "ok", {"value": self.board.get(message.fields["key"])})

    # rollout workers -----------------------------------------------------------------------

    def _workers(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.role == "rollout"]

    def _engines(self) -> dict[str, tuple[bytes, int]]:
        return {engine: (p.identity, size) for p in self._workers() for engine, size in p.engines.items()}

    def on_credits(self, peer: Peer, message: wire.Message, request: int) -> None:
        peer.credits += int(message.fields["count"])

    def on_heartbeat(self, peer: Peer, message: wire.Message, request: int) -> None:
        peer.progress = dict(message.fields)

    def on_rollout(self, peer: Peer, message: wire.Message, request: int) -> None:
        fields = message.fields
        key = (fields["group_id"], fields["sample"])
        if self.ledger.finish(*key, fields["attempt"]):
            self.finished[key] = wire.relay_frames(message)
            self.outcomes.append(True)

    def on_fault(self, peer: Peer, message: wire.Message, request: int) -> None:
        fields = message.fields
        if not self.ledger.fault(fields["group_id"], fields["sample"], fields["attempt"], fields["fault"], fields["reason"]):
            return
        log.warning("%s fault of group %d sample %d attempt %d on %s: %s", fields["fault"], fields["group_id"], fields["sample"],
                    fields["attempt"], peer.name, fields["reason"])
        with open(self.run / "quarantine.jsonl", "a") as file:
            file.write(json.dumps({k: v for k, v in fields.items() if k != "request"} | {"worker": peer.name, "time": time.time()}) + "\n")
        self.outcomes.append(False)
        bad = self.outcomes.count(False)
        if len(self.outcomes) >= FAULT_MINIMUM and bad > self.config.broker.max_fault_rate * len(self.outcomes):
            self.fail(f"{bad} of the last {len(self.outcomes)} rollouts failed (broker.max_fault_rate {self.config.broker.max_fault_rate}); "
                      f"the last one: {fields['reason']}; all of them are in {self.run / 'quarantine.jsonl'}")

    def on_engine_answer(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._settle(self.conductor.engine_answer(message.fields, time.monotonic()))

    def _give_leases(self) -> None:
        if self.phase != "running":
            return
        for peer in self._workers():
            while peer.credits > 0:
                grant = self.ledger.lease(peer.name, time.monotonic())
                if grant is None:
                    return
                peer.credits -= 1
                if not self._send(peer.identity, "lease", self._lease(grant).to_header()):
                    self._lose(peer, "its connection is closed")
                    break

    def _lease(self, grant: Grant) -> Lease:
        group = grant.group
        # one seed for each try, a function of the run's seed and of what is sampled
        parts = [self.config.train.seed, group.ordinal, grant.sample, grant.attempt]
        seed = int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFFFFFF
        return Lease(grant.id, group.id, grant.sample, grant.attempt, self.prompts.prompt(group.ordinal), seed, group.version,
                     self.config.agent.timeout)

    # the actor -----------------------------------------------------------------------------

    def on_next_batch(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.batch_request = (peer.identity, request, time.monotonic())
        self.next_report = time.monotonic() + 20

    def _ship(self) -> None:
        if self.batch_request is None:
            return
        identity, request, _ = self.batch_request
        shipped = self.ledger.ship()
        if shipped is None:
            if self.ledger.done():
                self.batch_request = None
                self._reply(identity, request, "end", {"steps": self.ledger.trained_steps})
            return
        step, groups = shipped
        parts = [self.finished.pop((g.id, sample)) for g in groups for sample in g.finished()]
        self.batch_request = None
        self._reply(identity, request, "batch", {"step": step, "rollouts": len(parts), "version": self.ledger.current_version})
        for frames in parts:
            self._send_frames(identity, frames)

    def on_trained(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.ledger.close_admission()
        self.ledger.trained(message.fields["step"])
        self._reply(peer.identity, request, "ok", {})

    def on_update_begin(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.ledger.close_admission()
        self.conductor.begin(peer.identity, request, message.fields["version"], self._engines() if self.phase == "running" else None,
                             time.monotonic())

    def on_update_transfer(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.transfer(message, request)

    def on_update_sent(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._settle(self.conductor.sent(message.fields, request, time.monotonic()))

    def _settle(self, outcome: tuple[str, Any] | None) -> None:
        """An update has ended: open admission at its version, or fail the run."""
        if outcome is None:
            return
        kind, value = outcome
        if kind == "done":
            self.ledger.version(value)
        else:
            self.fail(value)

    def on_step_done(self, peer: Peer, message: wire.Message, request: int) -> None:
        counts = Counter(self.ledger.counts()) + Counter({f"failed_rollouts_{k}": v for k, v in self.ledger.failed_samples.items()})
        ended = (str(GroupState.TRAINED), str(GroupState.DROPPED))
        record = dict(message.fields["metrics"]) | {"attempt": self.attempt, "version": self.ledger.current_version}
        record |= {f"groups_{k}": counts[k] - self.last_counts[k] for k in ended}
        record |= {f"failed_rollouts_{k}": counts[f"failed_rollouts_{k}"] - self.last_counts[f"failed_rollouts_{k}"]
                   for k in ("infrastructure", "data")}
        record |= {"groups_in_flight": len(self.ledger.groups), "ledger_balance": self.ledger.balance()}
        self.last_counts = counts
        self.step_lines.append(self.step_sink(record | {"total_steps": self.ledger.total_steps}))
        self._reply(peer.identity, request, "ok", {})

    def on_finished(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._reply(peer.identity, request, "ok", {})
        if self.phase == "running":
            self.phase = "done"
