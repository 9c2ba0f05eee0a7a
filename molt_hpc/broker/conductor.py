"""Conducts weight updates: turns what `updates.WeightUpdate` asks for into messages and replies.

The transfer group of trainer and engines stands as long as its members stay the same; another set, a lost member
or an aborted transfer means a new one, for which the trainer opens a new store and every engine joins
again. The trainer always has exactly one request open when it is free; it is answered with `send` (an epoch to be
sent, the first or once more) or with `done` and how it went.
"""

import logging
from collections.abc import Callable
from typing import Any

from molt_hpc import wire
from molt_hpc.broker.fleet import NOTHING, Fleet, Peer
from molt_hpc.broker.updates import Phase, WeightUpdate, rank_offsets
from molt_hpc.config import RunConfig

log = logging.getLogger(__name__)


class Conductor:
    """At most one update at a time.

    opened(version) is called when the first engine serves the version: everybody else who still takes part has proved to hold it.
    lost(text) hears of every engine that was dropped, failed(reason) of an update that cannot be finished.
    """

    def __init__(self, config: RunConfig, fleet: Fleet, send: Callable[..., bool], reply: Callable[..., None],
                 opened: Callable[[int], None], lost: Callable[[str], None], failed: Callable[[str], None]):
        self._timeout, self._start_timeout, self._fleet = config.weights.timeout, config.vllm.start_timeout, fleet
        self._send, self._reply, self._opened, self._lost, self._failed = send, reply, opened, lost, failed
        self.update: WeightUpdate | None = None
        self._epoch = 0
        self._group: frozenset[str] = frozenset()
        self._actor, self._request = b"", 0
        self._engine_seconds: dict[str, dict[str, float]] = {}
        self._probes: dict[str, bytes] = {}
        self._asked: tuple[bytes, int, int, float] | None = None
        self._over = False

    def describe(self) -> str:
        if self.update is None or self.update.ended:
            return ""
        update = self.update
        return f"version {update.version} epoch {update.epoch} {update.phase}, missing {', '.join(update.missing()[:8])}"

    # the actor -----------------------------------------------------------------------------

    def begin(self, actor: bytes, request: int, version: int, roll_call_done: bool, now: float) -> None:
        """The actor wants to give `version` to all engines that do not serve it, once the roll call is over."""
        assert self.update is None or self.update.ended, f"version {version} while {self.describe()}"
        self._asked = actor, request, version, now
        if roll_call_done:
            self.roll_call_done(now)

    def roll_call_done(self, now: float) -> None:
        """Every role has reported: begin the update that waited for it."""
        if self._asked is None:
            return
        (self._actor, self._request, version, asked), self._asked = self._asked, None
        self._engine_seconds, self._probes, self._over = {}, {}, False
        members, ready = self._fleet.stale_engines(version), self._fleet.ready_engines()
        log.info("update to version %d, epoch %d: pausing %s", version, self._epoch + 1, ", ".join(sorted(members)) or "nobody")
        self.update = WeightUpdate(version, self._epoch + 1, members, self._timeout, now, self._group, len(members) < len(ready))
        self.update.seconds["drain"] = now - asked
        self._act(now)

    def transfer(self, message: wire.Message, request: int, now: float) -> None:
        """The trainer is about to send; its plan (opaque here) goes to every engine with its rank."""
        update, fields = self.update, message.fields
        if update is None or update.phase != Phase.TRANSFERRING or fields["epoch"] != update.epoch:
            self.sent(fields | {"failed": "not begun"}, request, now)
        else:
            offsets, world = self._ranks()
            group = {k: fields[k] for k in ("master_address", "master_port", "backend")}
            group |= {"join": update.join, "world_size": world, "timeout": self._timeout}
            for engine in sorted(update.members):
                self._tell("transfer", engine, now, group | {"rank_offset": offsets[engine]}, message.frames, message.specs)
            self._reply(self._actor, request, "ok", {})
            self._act(now)

    def sent(self, fields: dict[str, Any], request: int, now: float) -> None:
        """The trainer has sent everything, or has stopped; either way it waits with this request for what comes next."""
        update = self.update
        if update is None or update.ended:
            self._reply(self._actor, request, "refused", {"reason": (update and update.reason) or "no update is under way"})
            return
        self._request = request
        update.sent(fields["version"], fields["epoch"], fields.get("checksum"), now, str(fields.get("failed")))
        self._act(now)

    # the engines ---------------------------------------------------------------------------

    def engine_answer(self, fields: dict[str, Any], now: float) -> None:
        """`paused`, `applied`, `aborted`, `resumed` or `failed` of one engine."""
        update, engine = self.update, fields["engine"]
        if update is None or update.ended:
            return
        if fields["answer"] == "failed":
            update.failed(engine, str(fields["reason"]), fields["version"], fields["epoch"], now)
        elif update.answer(fields["answer"], engine, fields["version"], fields["epoch"], now, fields.get("checksum", "")):
            self._engine_seconds.setdefault(engine, {}).update(fields.get("seconds", {}))
            if "probe" in fields:
                self._probes[engine] = fields["probe"]
        self._act(now)

    def engine_gone(self, peer: Peer, fields: dict[str, Any], now: float) -> None:
        """A worker says that a server of its has ended or hangs; `starting`: it is being started again."""
        state, engine, reason = peer.engines.get(fields["engine"]), fields["engine"], str(fields["reason"])
        if state is None:
            return
        log.error("%s is gone: %s", engine, reason)
        served = state.lost_at()
        self._fleet.engine_gone(engine, bool(fields["starting"]))
        self.engines_lost({engine: served}, reason.splitlines()[0][:300], now)

    def engine_ready(self, peer: Peer, fields: dict[str, Any], now: float) -> None:
        """A server that was started again is up, without weights."""
        self._fleet.engine_ready(peer, fields["engine"], int(fields["world_size"]))
        log.info("%s is up again", fields["engine"])
        self._act(now)

    def engines_lost(self, engines: dict[str, int | None], reason: str, now: float) -> None:
        """Engines are gone, as the fleet already knows, with what they served until then (None: they were being started)."""
        for engine, served in engines.items():
            taking_part = self.update is not None and not self.update.ended and engine in self.update.members
            self._group = frozenset() if engine in self._group else self._group
            if self.update is not None:
                self.update.lost(engine, reason, now)
            if not taking_part and served is not None:
                self._lost(f"{engine} while {'stale' if served == NOTHING else f'serving version {served}'}: {reason}")
        self._act(now)

    def expire(self, now: float) -> None:
        """Take up the engines that are ready by now, then look at the deadlines."""
        self._act(now)
        if self.update is not None and not self.update.ended:
            waiting = self.update.phase == Phase.WAITING
            self.update.expire(now, self._fleet.engine_patience(self._start_timeout) if waiting else 0.0)
            self._act(now)

    # what the update asks for --------------------------------------------------------------

    def _act(self, now: float) -> None:
        """Do what the update asks for, until it asks for nothing more."""
        update = self.update
        if update is None or self._over:
            return
        if update.phase == Phase.WAITING:
            update.came_back(self._fleet.ready_engines(), now)
        while actions := update.take():
            for action, engine in actions:
                if action == "go":
                    self._go()
                elif action == "stop":
                    self._send(self._actor, "update_stop", {"version": update.version, "epoch": update.epoch})
                elif action == "serve":
                    self._serve(engine)
                else:
                    self._tell(action, engine, now)
            if update.phase == Phase.WAITING:
                update.came_back(self._fleet.ready_engines(), now)
        self._epoch, self._group = update.epoch, update.group
        self._over = update.ended
        if update.phase == Phase.DONE:
            self._done(update)
        elif update.phase == Phase.FAILED:
            self._failed(update.reason)

    def _go(self) -> None:
        update, (_, world) = self.update, self._ranks()
        log.info("sending version %d, epoch %d, to %s", update.version, update.epoch, ", ".join(sorted(update.members)))
        self._reply(self._actor, self._request, "send", {"epoch": update.epoch, "join": update.join, "world_size": world})
        self._request = 0

    def _serve(self, engine: str) -> None:
        if len(self.update.served) == 1:
            self._opened(self.update.version)
        self._fleet.engines[engine].served = self.update.version

    def _tell(self, command: str, engine: str, now: float, extra: dict[str, Any] | None = None, frames: list[Any] = (),
              specs: list[dict] = ()) -> None:
        """Send a command of this epoch to an engine; one that cannot be reached is lost."""
        update, state = self.update, self._fleet.engines.get(engine)
        fields = {"engine": engine, "version": update.version, "epoch": update.epoch} | (extra or {})
        if command == "drop":
            drop = next(d for d in reversed(update.dropped) if d.engine == engine)
            fields["reason"] = drop.reason
            log.error("%s is dropped from the update to version %d while %s: %s", engine, update.version, drop.phase, drop.reason)
            self._lost(f"{engine} while {drop.phase} version {update.version}: {drop.reason}")
        if state is None or state.starting:  # it was dropped because it is gone
            return
        if command in ("pause", "drop"):
            state.served, state.starting = NOTHING, command == "drop"
        if not self._send(state.worker.identity, command, fields, frames, specs) and command != "drop":
            update.lost(engine, "its worker's connection is closed", now)

    def _ranks(self) -> tuple[dict[str, int], int]:
        """Rank of each member's first worker in the transfer group, and the group's size."""
        return rank_offsets({engine: self._fleet.engines[engine].world_size for engine in self.update.members})

    def _done(self, update: WeightUpdate) -> None:
        names = {name for seconds in self._engine_seconds.values() for name in seconds}
        slowest = {name: max(s.get(name, 0.0) for s in self._engine_seconds.values()) for name in names}
        self._reply(self._actor, self._request, "done", {"seconds": update.seconds, "engine_seconds": slowest, "epoch": update.epoch,
                                                           "probes": {e: p for e, p in self._probes.items() if e in update.served}})
        self._request = 0
        log.info("%d engines serve version %d: %s", len(update.served), update.version,
                 ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in update.seconds.items()))
