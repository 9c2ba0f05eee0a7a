"""One weight update as a state machine: pause -> transfer -> verify -> resume. Pure, no I/O, no clock.

    PAUSING       every engine of the receiver set must say `paused`
    TRANSFERRING  the trainer must say `sent`, every engine `applied`, with the checksum of the bytes
    RESUMING      every engine must say `resumed` with the new version
    DONE / FAILED

Each phase has one deadline. An answer that belongs to another update, comes twice, or comes from
an engine outside the receiver set changes nothing. No engine is told to resume before the checksums of
all of them equal the trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    PAUSING = "pausing"
    TRANSFERRING = "transferring"
    RESUMING = "resuming"
    DONE = "done"
    FAILED = "failed"


ANSWERS = {"paused": Phase.PAUSING, "applied": Phase.TRANSFERRING, "resumed": Phase.RESUMING}
"""Which answer of an engine belongs to which phase."""


@dataclass
class WeightUpdate:
    """The update to `version` of the engines `receivers`, numbered by `epoch` of their transfer group."""

    version: int
    epoch: int
    receivers: frozenset[str]
    timeout: float
    started: float
    phase: Phase = Phase.PAUSING
    reason: str = ""
    answered: set[str] = field(default_factory=set)
    checksums: dict[str, str] = field(default_factory=dict)
    sent_checksum: str | None = None
    phase_started: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.phase_started = self.started
        if not self.receivers:
            self._fail("there is no engine to update")

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def missing(self) -> list[str]:
        """Who has not answered in this phase yet; `trainer` stands for the sender."""
        waiting = sorted(self.receivers - self.answered)
        return waiting + ["trainer"] if self.phase == Phase.TRANSFERRING and self.sent_checksum is None else waiting

    def answer(self, kind: str, engine: str, version: int, epoch: int, now: float, checksum: str = "") -> bool:
        """An engine's `paused`, `applied` or `resumed`. Returns whether it moved the update to its next phase."""
        if ANSWERS.get(kind) != self.phase or engine not in self.receivers or (version, epoch) != (self.version, self.epoch):
            return False
        self.answered.add(engine)
        if kind == "applied":
            self.checksums[engine] = checksum
        return self._advance(now)

    def sent(self, version: int, epoch: int, checksum: str, now: float) -> bool:
        """The trainer has sent everything; `checksum` is of the bytes that it sent."""
        if self.phase != Phase.TRANSFERRING or (version, epoch) != (self.version, self.epoch):
            return False
        self.sent_checksum = checksum
        return self._advance(now)

    def failed(self, engine: str, reason: str) -> None:
        """An engine (or the trainer) reports that it cannot go on."""
        if not self.ended:
            self._fail(f"{engine}: {reason}")

    def expire(self, now: float) -> bool:
        """True if the phase's deadline has just passed: the update has failed."""
        if self.ended or now - self.phase_started < self.timeout:
            return False
        self._fail(f"no answer within {self.timeout:.0f} s from {', '.join(self.missing())}")
        return True

    def _advance(self, now: float) -> bool:
        # counted, not listed: thousands of engines answer, each of them thrice
        if len(self.answered) < len(self.receivers) or (self.phase == Phase.TRANSFERRING and self.sent_checksum is None):
            return False
        if self.phase == Phase.TRANSFERRING:
            wrong = sorted(e for e, c in self.checksums.items() if c != self.sent_checksum)
            if wrong:
                self._fail(f"the bytes that arrived are not those sent ({self.sent_checksum}): "
                           + ", ".join(f"{e} has {self.checksums[e]}" for e in wrong))
                return True
        following = {Phase.PAUSING: Phase.TRANSFERRING, Phase.TRANSFERRING: Phase.RESUMING, Phase.RESUMING: Phase.DONE}
        self.seconds[str(self.phase)] = now - self.phase_started
        self.phase, self.phase_started, self.answered = following[self.phase], now, set()
        return True

    def _fail(self, reason: str) -> None:
        self.reason = f"weight update to version {self.version} failed while {self.phase}: {reason}"
        self.phase = Phase.FAILED


def rank_offsets(world_sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Rank of each engine's first worker in the transfer group, and the group's size; rank 0 is the trainer.

    Engines are taken in the order of their names, so every party computes the same map.
    """
    offsets, rank = {}, 1
    for engine in sorted(world_sizes):
        offsets[engine] = rank
        rank += world_sizes[engine]
    return offsets, rank
