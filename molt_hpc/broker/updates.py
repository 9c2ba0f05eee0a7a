"""One weight update as a state machine. Pure: no I/O, no clock; what is to be done comes out of `take()`.

    PAUSING       every member must say `paused`
    TRANSFERRING  the trainer must say `sent`, every member `applied` with the checksum of its bytes
    ABORTING      somebody was lost on the way: trainer and members must say that they are free of the old group
    RESUMING      every member must say `resumed`; each of them serves from then on
    WAITING       no member is left: an engine that comes back begins anew (unless engines outside of this update serve the version)
    DONE / FAILED

The members are the engines that still take part. Whoever dies, fails, hangs past the phase's deadline or holds other
bytes than the trainer sent is dropped with a reason, and the update goes on for the others: an interrupted
transfer is repeated under a new epoch. Every message carries version and epoch; one that belongs to another epoch or phase,
comes twice, or comes from an engine that is no member changes nothing. No engine is told to resume before the
checksums of all members equal the trainer's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    PAUSING = "pausing"
    TRANSFERRING = "transferring"
    ABORTING = "aborting"
    RESUMING = "resuming"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


ANSWERS = {"paused": Phase.PAUSING, "applied": Phase.TRANSFERRING, "aborted": Phase.ABORTING, "resumed": Phase.RESUMING}
"""Which answer of an engine belongs to which phase."""

FRUITLESS = 2
"""A transfer that is aborted so often although nobody can be blamed is the sender's or the network's fault."""
RETURNS = 3
"""Times that an update may lose all its engines and wait for one to come back."""


@dataclass(frozen=True)
class Dropped:
    """An engine that was left behind, in which phase and why."""

    engine: str
    phase: str
    reason: str


@dataclass
class WeightUpdate:
    """The update to `version` of the engines `members`.

    epoch: number of the present try, larger than that of any try before. group: the engines that
    stand in a transfer group with the trainer from an earlier update; the group is kept if they are the members.
    others_serve: engines that are not members serve the version already, so an update without members is over.
    """

    version: int
    epoch: int
    members: set[str]
    timeout: float
    started: float
    group: frozenset[str] = frozenset()
    others_serve: bool = False
    phase: Phase = Phase.PAUSING
    reason: str = ""
    join: bool = True
    dropped: list[Dropped] = field(default_factory=list)
    served: set[str] = field(default_factory=set)
    checksums: dict[str, str] = field(default_factory=dict)
    sent_checksum: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    phase_started: float = 0.0
    _answered: set[str] = field(default_factory=set)
    _suspects: dict[str, str] = field(default_factory=dict)
    _trainer_sends: bool = False
    _blamed: bool = False
    _fruitless: int = 0
    _returns: int = 0
    _actions: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members, self.phase_started = set(self.members), self.started
        self._tell("pause", self.members)
        self._advance(self.started)

    # what others see -----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def take(self) -> list[tuple[str, str]]:
        """What is to be done since the last call, in order, as (action, engine).

        pause, abort, resume, drop: tell that engine. go: the trainer may send this epoch; stop: it must stop
        sending (both with an empty engine). serve: the engine serves `version` from now on.
        """
        actions, self._actions = self._actions, []
        return actions

    def missing(self) -> list[str]:
        """Who has not answered in this phase yet; `trainer` stands for the sender."""
        if self.phase == Phase.WAITING:
            return ["an engine that comes back"]
        waiting = sorted(self.members - self._answered)
        trainer = self.phase == Phase.TRANSFERRING and self.sent_checksum is None or self.phase == Phase.ABORTING and self._trainer_sends
        return [*waiting, "trainer"] if trainer else waiting

    # what happens --------------------------------------------------------------------------

    def answer(self, kind: str, engine: str, version: int, epoch: int, now: float, checksum: str = "") -> bool:
        """An engine's `paused`, `applied`, `aborted` or `resumed`. Returns whether it counted."""
        if ANSWERS.get(kind) != self.phase or engine not in self.members or engine in self._answered or not self._is_now(version, epoch):
            return False
        self._answered.add(engine)
        if kind == "applied":
            self.checksums[engine] = checksum
        if kind == "resumed":
            self.served.add(engine)
            self._actions.append(("serve", engine))
        self._advance(now)
        return True

    def failed(self, engine: str, reason: str, version: int, epoch: int, now: float) -> None:
        """An engine could not do what it was told.

        In a transfer that alone says little: one engine's death breaks the others' connections. It is
        a suspect, and dropped if by the end of the abort nobody turns out to be lost.
        """
        if engine not in self.members or not self._is_now(version, epoch):
            return
        if self.phase == Phase.TRANSFERRING:
            self._suspects[engine] = reason
            self._abort(now)
        elif self.phase == Phase.ABORTING:  # said before it heard of the abort, to which it will answer too
            self._suspects.setdefault(engine, reason)
        elif self.phase in (Phase.PAUSING, Phase.RESUMING):
            self.lost(engine, reason, now)

    def lost(self, engine: str, reason: str, now: float) -> None:
        """An engine is gone, restarted, or so far behind that it is given up."""
        self._leave_group(engine)
        if self.ended or engine not in self.members:
            return
        self._drop(engine, reason)
        if self.phase == Phase.TRANSFERRING and self.sent_checksum is None:
            self._abort(now)
        else:
            self._advance(now)

    def sent(self, version: int, epoch: int, checksum: str | None, now: float, failure: str = "") -> bool:
        """The trainer is free for another epoch. Returns whether it counted.

        checksum: of the bytes, everything, that it sent; None: it has stopped, told to or not, because of `failure`.
        """
        if not self._trainer_sends or not self._is_now(version, epoch):
            return False
        self._trainer_sends = False
        if self.phase == Phase.TRANSFERRING and checksum is None:
            self._suspects.setdefault("trainer", failure)
            self._abort(now)
            return True
        if self.phase == Phase.TRANSFERRING:
            self.sent_checksum = checksum
        self._advance(now)
        return True

    def came_back(self, engines: Iterable[str], now: float) -> None:
        """Engines are ready; an update that has none left begins anew with them."""
        if self.phase == Phase.WAITING and (engines := set(engines)):
            self.epoch, self.members = self.epoch + 1, engines
            self._enter(Phase.PAUSING, now)
            self._tell("pause", engines)

    def fail(self, reason: str) -> None:
        """The trainer, or the run, cannot go on."""
        if not self.ended:
            self.reason = f"weight update to version {self.version} failed while {self.phase}: {reason}"
            self.phase = Phase.FAILED

    def expire(self, now: float, extra: float = 0.0) -> None:
        """Give up whoever has missed the phase's deadline; `extra` seconds are added while an engine is awaited."""
        limit = self.timeout + (extra if self.phase == Phase.WAITING else 0.0)
        if self.ended or now - self.phase_started < limit:
            return
        if self.phase == Phase.WAITING:
            self.fail(f"no engine is left, and none came back within {limit:.0f} s; "
                      + "; ".join(f"{d.engine} was lost while {d.phase}: {d.reason}" for d in self.dropped[-4:]))
        elif self.phase == Phase.TRANSFERRING and self.sent_checksum is None:
            late = self.members - self._answered
            blamed = late | ({"trainer"} if late == self.members else set())
            self._suspects |= dict.fromkeys(sorted(blamed), f"not done within {limit:.0f} s (weights.timeout)")
            self._abort(now)
        elif self.phase == Phase.ABORTING and self._trainer_sends:
            self.fail(f"the trainer did not stop sending within {limit:.0f} s")
        else:
            for engine in sorted(self.members - self._answered):
                self._drop(engine, f"no answer within {limit:.0f} s (weights.timeout)")
            self._advance(now)

    # phases --------------------------------------------------------------------------------

    def _is_now(self, version: int, epoch: int) -> bool:
        return (version, epoch) == (self.version, self.epoch)

    def _tell(self, action: str, engines: Iterable[str]) -> None:
        self._actions += [(action, engine) for engine in sorted(engines)]

    def _leave_group(self, engine: str) -> None:
        """A transfer group that has lost a member is of no use to the others."""
        self.group = frozenset() if engine in self.group else self.group

    def _drop(self, engine: str, reason: str) -> None:
        for names in (self.members, self.served, self._answered):
            names.discard(engine)
        self._leave_group(engine)
        self._blamed = True
        phase = Phase.TRANSFERRING if self.phase == Phase.ABORTING else self.phase
        self.dropped.append(Dropped(engine, str(phase), reason))
        self._actions.append(("drop", engine))

    def _enter(self, phase: Phase, now: float) -> None:
        self.seconds[str(self.phase)] = self.seconds.get(str(self.phase), 0.0) + now - self.phase_started
        self.phase, self.phase_started, self._answered = phase, now, set()

    def _abort(self, now: float) -> None:
        self._enter(Phase.ABORTING, now)
        self.group = frozenset()
        if self._trainer_sends:
            self._actions.append(("stop", ""))
        self._tell("abort", self.members)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Go on to the next phase if nobody is missing in this one."""
        # counted, not listed: thousands of engines answer, each of them thrice
        if self.ended or self.phase == Phase.WAITING or len(self._answered) < len(self.members):
            return
        if self.phase == Phase.ABORTING:
            if not self._trainer_sends:
                self._after_abort(now)
        elif not self.members:
            # the trainer of a transfer that nobody receives any more must be free before it can be asked again
            if self._trainer_sends:
                self._abort(now)
            else:
                self._wait(now)
        elif self.phase == Phase.PAUSING:
            self._transfer(now)
        elif self.phase == Phase.RESUMING:
            self._enter(Phase.DONE, now)
        elif self.sent_checksum is not None:
            self._verify(now)

    def _wait(self, now: float) -> None:
        if self.others_serve:
            self._enter(Phase.DONE, now)
            return
        self._returns += 1
        self._enter(Phase.WAITING, now)
        if self._returns > RETURNS:
            self.fail(f"all engines were lost {self._returns} times; the last one: {self.dropped[-1].reason}")

    def _transfer(self, now: float) -> None:
        self.join = self.members != self.group
        self.group = frozenset(self.members)
        self._enter(Phase.TRANSFERRING, now)
        self.checksums, self.sent_checksum, self._suspects, self._blamed = {}, None, {}, False
        self._trainer_sends = True
        self._actions.append(("go", ""))

    def _after_abort(self, now: float) -> None:
        """Everybody is free: repeat the transfer without those that are to blame, if somebody is."""
        guilty = [] if self._blamed else [engine for engine in self._suspects if engine in self.members]
        if guilty and (len(guilty) < len(self.members) or self._fruitless and "trainer" not in self._suspects):
            for engine in guilty:
                self._drop(engine, self._suspects[engine])
        elif not self._blamed:
            self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            self.fail(f"given up {self._fruitless} times though every engine answers: "
                      + "; ".join(f"{who}: {why}" for who, why in self._suspects.items()))
        elif not self.members:
            self._wait(now)
        else:
            self.epoch += 1
            self._transfer(now)

    def _verify(self, now: float) -> None:
        """Every byte has arrived everywhere: whoever holds other bytes than were sent is dropped."""
        wrong = sorted(e for e in self.members if self.checksums[e] != self.sent_checksum)
        if len(wrong) == len(self.members):
            self.fail(f"the bytes that arrived are not those sent ({self.sent_checksum}): "
                      + ", ".join(f"{e} has {self.checksums[e]}" for e in wrong[:4]))
            return
        for engine in wrong:
            self._drop(engine, f"the bytes that arrived ({self.checksums[engine]}) are not those sent ({self.sent_checksum})")
        self._enter(Phase.RESUMING, now)
        self._tell("resume", self.members)


def rank_offsets(world_sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Rank of each engine's first worker in the transfer group, and the group's size; rank 0 is the trainer.

    Engines are taken in the order of their names, so every party computes the same map.
    """
    offsets, rank = {}, 1
    for engine in sorted(world_sizes):
        offsets[engine] = rank
        rank += world_sizes[engine]
    return offsets, rank
