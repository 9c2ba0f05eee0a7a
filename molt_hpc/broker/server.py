"""The broker's process: one ROUTER socket, one loop, around the pure ledger and update protocol.

Workers say `credits` and are given leases; what they produce is journalled as it came (the payload is never
decoded) and then acknowledged, until a batch is complete and the actor asks for it. The actor says `trained`, has
the engines updated (`update_begin`, `update_transfer`, `update_sent`) and reports its metrics (`step_done`).
Nothing here blocks: whoever must wait is answered later, and every wait has a deadline in `_tick`.
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from molt_hpc import wire
from molt_hpc.broker.client import ENDPOINT, Refused, read_keys, write_private
from molt_hpc.broker.conductor import Conductor
from molt_hpc.broker.fleet import RESTART_PATIENCE, Fleet, Peer
from molt_hpc.broker.front import Front, Outgoing
from molt_hpc.broker.groups import Grant, ledger_config
from molt_hpc.broker.store import Store, recover
from molt_hpc.config import RunConfig
from molt_hpc.data.prompts import PromptOrder
from molt_hpc.records import Lease

log = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two looks at the deadlines."""
BURST = 128
"""Messages taken from the socket before leases are given and batches shipped again."""
FAULT_WINDOW, FAULT_MINIMUM = 64, 16
"""The data-fault rate is taken over the last 64 ended rollouts, once 16 have ended."""

HANDLED = dict[str, Any] | None
"""What a handler returns: the fields of its reply, or None if there is none or it has been sent."""


class Broker:
    """State and handlers. `serve` runs the loop and returns the exit code: 0 done, 1 failed."""

    def __init__(self, run: Path, config: RunConfig, attempt: int, on_step: Callable[[dict[str, Any]], str], host: str = "127.0.0.1"):
        self.run, self.config, self.attempt, self.step_sink = run, config, attempt, on_step
        self.prompts = PromptOrder(config)
        self.ledger, places, segment = recover(run / "journal", ledger_config(config, self.prompts.total, self.prompts.epoch_rows), time.time())
        for rows in self.ledger.epochs:
            self.prompts.begin_epoch(rows)
        self.store = Store(run, self.ledger, places, segment, config.broker.memory_bytes)
        self.fleet = Fleet(config.broker.max_worker_faults, RESTART_PATIENCE if config.launch.max_restarts else 0.0)
        self.phase, self.reason = "roll_call", ""
        self.expected = ["actor", *(f"rollout_n{i}" for i in range(config.rollout.num_nodes))]
        self.board: dict[str, Any] = {}
        self.step_lines: list[str] = []
        self.bad_frames = 0
        self.outcomes: deque[bool] = deque(maxlen=FAULT_WINDOW)
        self.answers: dict[bytes, dict[str, list[Any]]] = {}
        self.batch_request: tuple[bytes, int, float] | None = None
        self.save_asked: tuple[bytes, int] | None = None
        self.save_told = False
        self.stale = False
        self.engines_lost: list[str] = []
        self.next_report = 0.0
        self.last_counts: Counter[str] = self.ledger.totals()
        self.started = self.last_usable = time.monotonic()
        self.loop_seconds: deque[float] = deque(maxlen=10_000)
        self.conductor = Conductor(config, self.fleet, self._send, self._reply, self._opened, self.engines_lost.append, self.fail)
        self.front = Front(read_keys(run), host, config.broker.max_message_bytes)
        self.outgoing = Outgoing(self.front, self.store, config.broker.memory_bytes)
        self.address = self.front.address
        write_private(run / ENDPOINT, {"address": self.address, "attempt": attempt})
        log.info("listening on %s, attempt %d; %d steps are trained, %d groups under way", self.address, attempt,
                 self.ledger.trained_steps, len(self.ledger.groups))

    # the socket ----------------------------------------------------------------------------

    def _send(self, identity: bytes, kind: str, fields: dict[str, Any], frames: list[Any] = (), specs: list[dict] = ()) -> bool:
        self.store.flush()
        return self.front.send(identity, [wire.relay_header(kind, fields, specs), *frames])

    def _reply(self, identity: bytes, request: int, kind: str, fields: dict[str, Any]) -> None:
        self._send(identity, kind, fields | {"reply_to": request})

    # the loop ------------------------------------------------------------------------------

    def serve(self) -> int:
        next_tick = 0.0
        while self.phase not in ("done", "failed"):
            self.front.socket.poll(TICK * 1000)
            began = time.monotonic()
            for frames in self.front.waiting(BURST):
                self._receive(frames)
            if began >= next_tick:
                self._tick(time.monotonic())
                next_tick = time.monotonic() + TICK
            self._begin_epochs()
            self._give_leases()
            self._answer_workers()
            self._ship()
            self.store.flush()
            self.outgoing.pump()
            self.loop_seconds.append(time.monotonic() - began)
        self._say_goodbye()
        return 0 if self.phase == "done" else 1

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        try:
            message = wire.decode(frames[1:], self.config.broker.max_message_bytes)
        except wire.WireError as error:
            self.bad_frames += 1
            if self.bad_frames <= 20:
                log.warning("a message that is not ours was dropped: %s", error)
            return
        request = message.fields.get("request", 0)
        try:
            reply = self._handle(identity, message, request)
            if reply is not None:
                self._reply(identity, request, "ok", reply)
        except Refused as error:
            self._reply(identity, request, "refused", {"reason": str(error)})
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # a field is missing or wrong
            self.bad_frames += 1
            self._reply(identity, request, "refused", {"reason": f"{message.kind}: bad field: {error!r}"})
        self.store.commit()

    def _handle(self, identity: bytes, message: wire.Message, request: int) -> HANDLED:
        """Call the handler `on_<kind>`. Raises Refused."""
        if message.kind == "hello":
            return self._hello(identity, request, message.fields)
        peer, handler = self.fleet.peers.get(identity), getattr(self, f"on_{message.kind}", None)
        if peer is None:
            raise Refused("say hello first")
        if handler is None:
            raise Refused(f"unknown message {message.kind!r}")
        peer.last_seen = time.monotonic()
        return handler(peer, message, request)

    def _tick(self, now: float) -> None:
        for grant in self.ledger.expire(time.time()):
            log.warning("lease %s made no progress for %.0f s: leased again", grant.id, self.config.broker.lease_timeout)
        for group in self.ledger.late_groups(time.time()):
            self._close_late(group.id)
        self.store.commit()
        for peer in self.fleet.silent(now, self.config.broker.heartbeat_timeout):
            self._lose(peer, f"silent for {now - peer.last_seen:.0f} s")
        self.conductor.expire(now)
        if self.phase == "roll_call" and now - self.started > self.config.launch.roll_call_timeout:
            self.fail(f"roll call: no report within {self.config.launch.roll_call_timeout:.0f} s from {', '.join(self.missing())}")
        self._check_fleet(now)
        self.stale = bool(self.fleet.stale_engines(self.ledger.current_version))
        if self.ledger.filtered_in_a_row > self.config.broker.max_filtered_groups:
            seen = "; ".join(f"{count} x {reason}" for reason, count in self.ledger.reasons.most_common() if "mean score" in reason)
            self.fail(f"{self.ledger.filtered_in_a_row} groups in a row were filtered (broker.max_filtered_groups): {seen}")
        if self.batch_request and now > self.next_report:
            self._report_wait(now)

    def _check_fleet(self, now: float) -> None:
        """A run without a usable worker waits as long as a silent one is waited for, then ends with the reason."""
        if self.phase != "running" or self.fleet.usable():
            self.last_usable = now
        elif barred := [p for p in self.fleet.workers() if p.barred]:
            self.fail(f"no worker can be given leases: {barred[0].name} on {barred[0].host}: {barred[0].barred}")
        elif now - self.last_usable > self.config.broker.heartbeat_timeout + self.fleet.restart_patience:
            self.fail(f"no rollout worker for {now - self.last_usable:.0f} s")

    def _report_wait(self, now: float) -> None:
        waited = now - self.batch_request[2]
        self.next_report = now + 30
        if waited > 20:
            log.info("the actor has waited %.0f s for step %d: %s", waited, self.ledger.shipped_steps + 1,
                     "; ".join(self.ledger.awaited(3)) or "nothing is out")

    def _lose(self, peer: Peer, reason: str) -> None:
        lost = self.ledger.worker_lost(peer.name, time.time()) if peer.role == "rollout" else []
        self.fleet.remove(peer)
        self.store.referred.gone(peer.identity)
        self.store.commit()
        log.error("%s on %s is gone (%s); %d leases go to others", peer.name, peer.host, reason, len(lost))
        engines = {engine: state.lost_at() for engine, state in peer.engines.items()}
        self.conductor.engines_lost(engines, f"{peer.name} is gone ({reason})", time.monotonic())

    def _close_late(self, group: int) -> None:
        cut = self.ledger.close_group(group, time.time())
        log.warning("group %d passed its deadline (rollout.group_timeout): it goes on without %d rollouts", group, len(cut))
        for grant in cut:
            worker = self.fleet.named(grant.group.samples[grant.sample].worker)
            if worker:
                self._send(worker.identity, "cancel", {"lease": grant.id})

    def fail(self, reason: str) -> None:
        if self.phase not in ("done", "failed"):
            self.phase, self.reason = "failed", reason
            log.error("the run fails: %s", reason)

    def _say_goodbye(self) -> None:
        log.info("the run is %s%s", self.phase, f": {self.reason}" if self.reason else "")
        for peer in list(self.fleet.peers.values()):
            self.store.referred.gone(peer.identity)
            if peer.role != "supervisor":
                self._send(peer.identity, "stop", {"reason": self.reason or "the run is done"})
        # the supervisor asks once a second: let it hear the end before the socket closes
        deadline = time.monotonic() + (3 if any(p.role == "supervisor" for p in self.fleet.peers.values()) else 0)
        while time.monotonic() < deadline:
            if self.front.socket.poll(200):
                frames = self.front.socket.recv_multipart(copy=False)
                if len(frames) > 1 and b"status" in frames[1].bytes[:200]:
                    self._receive(frames)
        self.store.close()
        self.front.close()

    # everybody -----------------------------------------------------------------------------

    def _hello(self, identity: bytes, request: int, fields: dict[str, Any]) -> None:
        if fields.get("attempt") != self.attempt:
            raise Refused(f"this is attempt {self.attempt}, not {fields.get('attempt')}")
        role, name = str(fields.get("role")), str(fields.get("name"))
        for old in [p for p in self.fleet.workers() if p.name == name and role == "rollout"]:
            self._lose(old, "it said hello again")
        self.fleet.add(Peer(identity, role, name, str(fields.get("host")), time.monotonic()))
        log.info("hello from %s on %s", name, fields.get("host"))
        window = max(self.config.broker.memory_bytes // max(self.config.rollout.num_nodes, len(self.fleet.workers())), 1)
        self._reply(identity, request, "welcome", {"total_steps": self.ledger.planned_steps, "attempt": self.attempt, "window_bytes": window,
                                                   "trained_steps": self.ledger.trained_steps})

    def missing(self) -> list[str]:
        ready = {p.name for p in self.fleet.peers.values() if p.ready}
        return [name for name in self.expected if name not in ready]

    def on_ready(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        peer.ready = True
        for engine, world_size in message.fields.get("engines", {}).items():
            self.fleet.engine_ready(peer, engine, int(world_size))
        log.info("%s is ready%s", peer.name, f" with {', '.join(peer.engines)}" if peer.engines else "")
        if self.phase == "roll_call" and not self.missing():
            self.phase = "running"
            log.info("every role has reported after %.1f s", time.monotonic() - self.started)
            self.conductor.roll_call_done(time.monotonic())
        self.conductor.expire(time.monotonic())
        return {}

    def on_status(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        first = int(message.fields.get("lines_from", 0))
        latency = sorted(self.loop_seconds)
        return {
            "phase": self.phase, "reason": self.reason, "missing": self.missing(), "step": self.ledger.trained_steps,
            "total_steps": self.ledger.total_steps, "version": self.ledger.current_version, "groups": self.ledger.counts(),
            "awaited": self.ledger.awaited(), "update": self.conductor.describe(), "step_lines": self.step_lines[first:],
            "workers": {p.name: p.describe() for p in self.fleet.workers()[:64]}, "worker_count": len(self.fleet.workers()),
            "lease_ends": dict(self.ledger.ended_leases), "reasons": dict(self.ledger.reasons.most_common(10)),
            "cached_bytes": self.store.cached_bytes, "bad_frames": self.bad_frames,
            "loop_p99_seconds": latency[int(0.99 * (len(latency) - 1))] if latency else 0.0}

    def on_stop(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        self.fail(str(message.fields.get("reason", "stopped")))
        return {}

    def on_save(self, peer: Peer, message: wire.Message, request: int) -> None:
        """The run is about to be stopped: answered when the actor has saved what it has trained."""
        if self.phase != "running":
            raise Refused(f"the run is in its phase {self.phase}: there is nothing to save")
        self.save_asked = (peer.identity, request)

    def on_publish(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        self.board[message.fields["key"]] = message.fields["value"]
        return {}

    def on_lookup(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        return {"value": self.board.get(message.fields["key"])}

    # rollout workers -----------------------------------------------------------------------

    def on_credits(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.fleet.ask(peer, int(message.fields["credits"]))

    def on_heartbeat(self, peer: Peer, message: wire.Message, request: int) -> None:
        peer.progress = {k: message.fields.get(k) for k in ("running", "rollouts", "sampled_tokens")}
        for group, sample, attempt in message.fields.get("progress", ()):
            self.ledger.progress(group, sample, attempt, time.time())
        if request:
            self._reply(peer.identity, request, "alive", {})

    def on_drain(self, peer: Peer, message: wire.Message, request: int) -> None:
        peer.draining, peer.credits = True, 0
        log.info("%s on %s drains: it finishes what it has and takes nothing new", peer.name, peer.host)

    def on_goodbye(self, peer: Peer, message: wire.Message, request: int) -> None:
        self._lose(peer, "it said goodbye")

    def on_rollout(self, peer: Peer, message: wire.Message, request: int) -> None:
        fields = message.fields
        key, reference = (fields["group_id"], fields["sample"]), fields.get("reference")
        if reference:
            self.store.referred.seen(peer.identity, reference)
        if self.ledger.finish(*key, fields["attempt"], float(fields.get("seconds", 0.0)), float(fields.get("score", 0.0))):
            if reference:
                self.store.referred.add(key[0], reference)
            self.store.commit(wire.relay_frames(message))
            self.store.forget_ended(key[0])
            self.fleet.rollout_finished(peer)
            self.outcomes.append(True)
        self._answer(peer, "accepted", f"{key[0]}.{key[1]}.{fields['attempt']}")
        self.fleet.ask(peer, int(fields.get("credits", 0)))

    def on_fault(self, peer: Peer, message: wire.Message, request: int) -> None:
        fields = message.fields
        self.fleet.ask(peer, int(fields.get("credits", 0)))
        now, lease = time.time(), self.ledger.leased(fields["group_id"], fields["sample"], fields["attempt"])
        if lease is None:
            return
        self.ledger.fault(fields["group_id"], fields["sample"], fields["attempt"], fields["fault"], fields["reason"], now)
        self.store.commit()
        self.store.forget_ended(fields["group_id"])
        log.warning("%s fault of group %d sample %d attempt %d on %s: %s", fields["fault"], fields["group_id"], fields["sample"],
                    fields["attempt"], peer.name, fields["reason"])
        with open(self.run / "quarantine.jsonl", "a") as file:
            file.write(json.dumps({k: v for k, v in fields.items() if k != "request"} | {"worker": peer.name, "time": time.time()}) + "\n")
        if fields["fault"] == "infrastructure":
            if not fields.get("engine_lost") and self.fleet.infrastructure_fault(peer, lease.granted, now, fields["reason"]):
                log.error("%s on %s gets no more leases: %s", peer.name, peer.host, peer.barred)
            return
        self.outcomes.append(False)
        bad = self.outcomes.count(False)
        if len(self.outcomes) >= FAULT_MINIMUM and bad > self.config.broker.max_fault_rate * len(self.outcomes):
            self.fail(f"{bad} of the last {len(self.outcomes)} rollouts failed (broker.max_fault_rate {self.config.broker.max_fault_rate}); "
                      f"the last one: {fields['reason']}; all of them are in {self.run / 'quarantine.jsonl'}")

    def on_engine_answer(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.engine_answer(message.fields, time.monotonic())

    def on_engine_gone(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.engine_gone(peer, message.fields, time.monotonic())

    def on_engine_ready(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.engine_ready(peer, message.fields, time.monotonic())

    def _begin_epochs(self) -> None:
        """Choose the prompts of the next epoch (data.difficulty_sampling); journalled, so that an attempt after this one has the same."""
        while self.ledger.epoch_wanted():
            rows, rates = self.prompts.choose(self.ledger.rates, self.ledger.recorded)
            self.prompts.begin_epoch(rows)
            self.ledger.begin_epoch(rows, rates)
            self.store.commit()
            log.info("epoch %d has %d of %d prompts", len(self.ledger.epochs) + 1, len(rows) // 4, self.prompts.epoch_rows)

    def _give_leases(self) -> None:
        if self.phase != "running" or not self.ledger.has_work():
            return
        version, now = self.ledger.current_version, time.time()
        hungry = self.fleet.hungry(version, now)
        # one each in turn, so that a small fleet and a large one are filled alike
        while hungry:
            for peer in list(hungry):
                grant = self.ledger.lease(peer.name, now)
                self.store.commit()
                if grant is None:
                    return
                self.fleet.granted(peer, now)
                self._answer(peer, "leases", self._lease(grant).to_header())
                if not peer.may_lease(version, now):
                    hungry.remove(peer)

    def _answer(self, peer: Peer, what: str, value: Any) -> None:
        self.answers.setdefault(peer.identity, {"leases": [], "accepted": []})[what].append(value)

    def _answer_workers(self) -> None:
        """One message for each worker that got leases or whose rollouts were taken in this turn of the loop."""
        answers, self.answers = self.answers, {}
        for identity, fields in answers.items():
            if not self._send(identity, "leases", fields) and identity in self.fleet.peers:
                self._lose(self.fleet.peers[identity], "its connection is closed")

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
        self.outgoing.clear(peer.identity)
        self.next_report = time.monotonic() + 20

    def on_got(self, peer: Peer, message: wire.Message, request: int) -> None:
        """The actor has taken so many bytes of its batch: there is room for more."""
        self.outgoing.got(int(message.fields["nbytes"]))

    def _ship(self) -> None:
        """Answer the actor's `next_batch`: with a batch, with the end, or by asking it to save or to send the weights again."""
        if self.batch_request is None:
            return
        identity, request, _ = self.batch_request
        if self.save_asked or self.save_told:
            self._save_first(identity, request)
            return
        step = self.ledger.trained_steps + 1
        again = self.ledger.batch(step)  # shipped before, but its step was never reported: after a restart
        shipped = (step, again) if again else self.ledger.ship()
        self.store.commit()
        if shipped is not None:
            self.batch_request, (step, groups) = None, shipped
            keys = [(group.id, sample) for group in groups for sample in group.finished()]
            self._reply(identity, request, "batch", {"step": step, "rollouts": len(keys), "version": self.ledger.current_version})
            self.outgoing.add(keys)
        elif self.ledger.done():
            self.batch_request = None
            self._reply(identity, request, "end", {"steps": self.ledger.trained_steps})
        elif self.stale and self.fleet.stale_engines(self.ledger.current_version):  # `stale` since not every turn may ask thousands
            self.batch_request = None
            self._reply(identity, request, "republish", {"version": self.ledger.current_version})

    def _save_first(self, identity: bytes, request: int) -> None:
        """The actor has asked for a batch: it saves instead. When it has, it asks once more, and is given nothing."""
        if self.save_told:
            if self.save_asked is not None:
                self._reply(*self.save_asked, "ok", {"step": self.ledger.trained_steps})
            self.save_asked = None
            return
        self.save_told, self.batch_request = True, None
        self._reply(identity, request, "save", {})

    def on_trained(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        step = message.fields["step"]
        groups = [g.id for g in self.ledger.batch(step)]
        self.ledger.close_admission()
        self.ledger.trained(step)
        self.store.commit()
        for group in groups:
            self.store.forget_ended(group)
        self.store.step_done()
        return {}

    def on_update_begin(self, peer: Peer, message: wire.Message, request: int) -> None:
        version = message.fields["version"]
        if version != self.ledger.current_version:  # else newcomers get what the others go on serving
            self.ledger.close_admission()
        self.conductor.begin(peer.identity, request, version, self.phase == "running", time.monotonic())

    def on_update_transfer(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.transfer(message, request, time.monotonic())

    def on_update_sent(self, peer: Peer, message: wire.Message, request: int) -> None:
        self.conductor.sent(message.fields, request, time.monotonic())

    def _opened(self, version: int) -> None:
        """The first engine serves `version`, and all others of the update hold it: admission opens."""
        if version != self.ledger.current_version or not self.ledger.admission_open:
            self.ledger.version(version)
            self.store.commit()

    def on_step_done(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        counts = self.ledger.totals()
        record = dict(message.fields["metrics"]) | {"attempt": self.attempt}
        record |= {name: counts[name] - self.last_counts[name] for name in counts}
        record |= {"groups_in_flight": len(self.ledger.groups), "ledger_balance": self.ledger.balance()}
        record |= {f"engines_{state}": n for state, n in self.fleet.engine_counts(self.ledger.current_version).items()}
        record["engines_lost"], self.engines_lost[:] = self.engines_lost[:], []
        self.last_counts = counts
        self.step_lines.append(self.step_sink(record | {"total_steps": self.ledger.planned_steps}))
        return {}

    def on_finished(self, peer: Peer, message: wire.Message, request: int) -> HANDLED:
        if self.ledger.done():
            self.phase = "done"
        else:
            self.fail(f"the actor finished after step {self.ledger.trained_steps} of {self.ledger.total_steps}")
        return {}
