"""Conducts weight updates: turns the phases of `updates.WeightUpdate` into messages and replies.

The transfer group of trainer and engines is numbered by an epoch. As long as the set of engines stays
the same the group is kept; another set means a new epoch, for which the trainer opens a new store
and every engine joins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from molt_hpc import wire
from molt_hpc.broker.updates import Phase, WeightUpdate, rank_offsets
from molt_hpc.config import WeightsConfig

log = logging.getLogger(__name__)

Engines = dict[str, tuple[bytes, int]]
"""Engine name -> (identity of the worker that owns it, its world size)."""


class Conductor:
    """At most one update at a time; answers the actor's requests when their phase is over."""

    def __init__(self, config: WeightsConfig, send: Callable[..., bool], reply: Callable[..., None]):
        self._config, self._send, self._reply = config, send, reply
        self.update: WeightUpdate | None = None
        self._engines: Engines = {}
        self._epoch = 0
        self._epoch_members: frozenset[str] = frozenset()
        self._new_epoch = False
        self._actor, self._request = b"", 0
        self._begin_waiting: tuple[bytes, int, int] | None = None
        self._engine_seconds: dict[str, dict[str, float]] = {}

    def describe(self) -> str:
        if self.update is None or self.update.ended:
            return ""
        return f"version {self.update.version} {self.update.phase}, missing {', '.join(self.update.missing())}"

    def begin(self, actor: bytes, request: int, version: int, engines: Engines | None, now: float) -> None:
        """The actor wants to publish `version`. `engines` is None until every role has reported."""
        if engines is None:
            self._begin_waiting = (actor, request, version)
            return
        assert self.update is None or self.update.ended, f"version {version} while {self.describe()}"
        self._actor, self._request, self._engines, self._engine_seconds = actor, request, engines, {}
        members = frozenset(engines)
        self._new_epoch = members != self._epoch_members
        if self._new_epoch:
            self._epoch, self._epoch_members = self._epoch + 1, members
        self.update = WeightUpdate(version, self._epoch, members, self._config.timeout, now)
        log.info("update to version %d begins: pausing %s", version, ", ".join(sorted(members)))
        self._tell_engines("pause")

    def engines_ready(self, engines: Engines, now: float) -> None:
        """Every role has reported: begin the update that waited for it."""
        if self._begin_waiting:
            actor, request, version = self._begin_waiting
            self._begin_waiting = None
            self.begin(actor, request, version, engines, now)

    def _tell_engines(self, command: str, extra: dict[str, dict[str, Any]] | None = None, frames: list[Any] = (), specs: list[dict] = ()) -> None:
        """Send a command to every engine of the update, with what `extra` holds for that engine."""
        for engine, (identity, _) in self._engines.items():
            fields = {"engine": engine, "version": self.update.version, "epoch": self.update.epoch} | (extra[engine] if extra else {})
            if not self._send(identity, command, fields, frames, specs):
                self.update.failed(engine, "its worker's connection is closed")

    def _ranks(self) -> tuple[dict[str, int], int]:
        """Rank of each engine's first worker in the transfer group, and the group's size."""
        return rank_offsets({engine: size for engine, (_, size) in self._engines.items()})

    def _why_not(self) -> str:
        return self.update.reason if self.update else "no update is under way"

    def engine_answer(self, fields: dict[str, Any], now: float) -> tuple[str, Any] | None:
        """`paused`, `applied`, `resumed` or `failed` of one engine; returns the update's outcome if it has ended."""
        if self.update is None or self.update.ended:
            return None
        kind, engine = fields["answer"], fields["engine"]
        if engine not in self._engines:
            return None
        if kind == "failed":
            self.update.failed(engine, str(fields["reason"]))
            return self._outcome(now)
        self._engine_seconds.setdefault(engine, {}).update(fields.get("seconds", {}))
        moved = self.update.answer(kind, engine, fields["version"], fields["epoch"], now, fields.get("checksum", ""))
        return self._enter_phase(now) if moved else None

    def engine_failed(self, engine: str, reason: str) -> None:
        if self.update is not None and engine in self.update.receivers:
            self.update.failed(engine, reason)

    def transfer(self, message: wire.Message, request: int) -> None:
        """The trainer is about to send; its plan (opaque here) goes to every engine with its rank."""
        if self.update is None or self.update.phase != Phase.TRANSFERRING:
            self._reply(self._actor, request, "refused", {"reason": self.describe() or self._why_not()})
            return
        offsets, world = self._ranks()
        group = {k: message.fields[k] for k in ("master_address", "master_port", "backend")}
        group |= {"join": self._new_epoch, "world_size": world, "timeout": self._config.timeout}
        extra = {engine: group | {"rank_offset": offset} for engine, offset in offsets.items()}
        self._tell_engines("transfer", extra, message.frames, message.specs)
        self._reply(self._actor, request, "ok", {})

    def sent(self, fields: dict[str, Any], request: int, now: float) -> tuple[str, Any] | None:
        self._request = request
        if self.update is None or self.update.ended:
            self._reply(self._actor, request, "refused", {"reason": self._why_not()})
            return None
        if fields.get("failed"):
            self.update.failed("trainer", fields["failed"])
            return self._outcome(now)
        moved = self.update.sent(fields["version"], self.update.epoch, fields["checksum"], now)
        return self._enter_phase(now) if moved else self._outcome(now)

    def expire(self, now: float) -> str:
        """The reason if an update has failed since the last call, by its deadline or by a lost engine."""
        if self.update is None:
            return ""
        self.update.expire(now)
        if self.update.phase == Phase.FAILED:
            reason, self.update = self.update.reason, None
            return reason
        return ""

    def _enter_phase(self, now: float) -> tuple[str, Any] | None:
        if self.update.phase == Phase.TRANSFERRING:
            self._reply(self._actor, self._request, "ok", {"epoch": self.update.epoch, "join": self._new_epoch, "world_size": self._ranks()[1]})
        elif self.update.phase == Phase.RESUMING:
            self._tell_engines("resume")
        return self._outcome(now)

    def _outcome(self, now: float) -> tuple[str, Any] | None:
        update = self.update
        if update.phase == Phase.FAILED:
            return "failed", update.reason
        if update.phase != Phase.DONE:
            return None
        slowest = {name: max(s.get(name, 0.0) for s in self._engine_seconds.values())
                   for name in {n for s in self._engine_seconds.values() for n in s}}
        self._reply(self._actor, self._request, "ok", {"seconds": dict(update.seconds), "engine_seconds": slowest})
        log.info("engines serve version %d: %s", update.version, ", ".join(f"{k} {v:.2f} s" for k, v in update.seconds.items()))
        return "done", update.version
