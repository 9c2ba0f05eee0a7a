"""The processes that have said hello, the rollout workers among them, and which engine serves what. Pure bookkeeping."""

from dataclasses import dataclass, field
from typing import Any

RESTART_PATIENCE = 120.0
"""Seconds for a role that is started again to say hello: a cold file system may need a minute for its imports."""
PROBE_PATIENCE = 5.0
"""Seconds that a worker's first lease after a fault has to fail like the last one; then it is given as many as it asks for again."""
NOTHING = -1
"""The version that a stale engine serves."""


@dataclass
class EngineState:
    """One engine as the broker knows it: `served` is the version that it has proved and serves, or NOTHING; `starting`: it is not up."""

    worker: "Peer"
    world_size: int
    served: int = NOTHING
    starting: bool = False

    def lost_at(self) -> int | None:
        """What it served when it was lost now; None if it had been lost before."""
        return None if self.starting else self.served

    def describe(self) -> str:
        return "starting" if self.starting else "stale" if self.served == NOTHING else f"serves {self.served}"


@dataclass
class Peer:
    """A process that has said hello; a rollout worker has engines."""

    identity: bytes
    role: str
    name: str
    host: str
    last_seen: float
    ready: bool = False
    draining: bool = False
    credits: int = 0
    engines: dict[str, EngineState] = field(default_factory=dict)
    faults_in_a_row: int = 0
    last_fault: float = 0.0
    probe: float = 0.0
    finished: int = 0
    faults: int = 0
    barred: str = ""
    progress: dict[str, Any] = field(default_factory=dict)

    def may_lease(self, version: int, now: float) -> bool:
        """Whether this worker is given a lease: it asks, one of its engines is current, and it does not keep failing.

        After a fault it gets one at first: a worker that fails at once shall not fail everything that it has room for.
        """
        if self.faults_in_a_row and self.probe and now - self.probe < PROBE_PATIENCE:
            return False
        return (self.credits > 0 and self.ready and not self.draining and not self.barred and any(e.served == version for e in self.engines.values()))

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        return {"host": self.host, "ready": self.ready, "draining": self.draining, "credits": self.credits,
                "served": max((e.served for e in self.engines.values()), default=NOTHING),
                "engines": {name: e.describe() for name, e in self.engines.items()},
                "finished": self.finished, "faults": self.faults, "barred": self.barred, **self.progress}


class Fleet:
    """Every peer by its socket identity, every engine by its name."""

    def __init__(self, max_faults: int, restart_patience: float = 0.0):
        self._max_faults, self.restart_patience = max_faults, restart_patience
        self.peers: dict[bytes, Peer] = {}
        self.engines: dict[str, EngineState] = {}
        self._asking: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> None:
        self.peers[peer.identity] = peer

    def remove(self, peer: Peer) -> None:
        self.peers.pop(peer.identity, None)
        self._asking.pop(peer.identity, None)
        for engine in peer.engines:
            self.engines.pop(engine, None)

    def engine_ready(self, peer: Peer, engine: str, world_size: int) -> None:
        """A server is up; it serves nothing before an update has given it the weights."""
        self.engines[engine] = peer.engines[engine] = EngineState(peer, world_size)

    def engine_gone(self, engine: str, starting: bool) -> None:
        """A server has ended; `starting`: its worker starts it again."""
        state = self.engines[engine]
        state.served, state.starting = NOTHING, starting
        if not starting:
            del self.engines[engine], state.worker.engines[engine]

    def ready_engines(self) -> set[str]:
        return {name for name, e in self.engines.items() if not e.starting}

    def stale_engines(self, version: int) -> set[str]:
        """Engines that are up and do not serve `version`."""
        return {name for name, e in self.engines.items() if not e.starting and e.served != version}

    def engine_patience(self, start_timeout: float) -> float:
        """Seconds for which an engine may be awaited because one is being started, or its whole role is."""
        if any(e.starting for e in self.engines.values()) or any(not p.ready for p in self.workers()):
            return start_timeout
        return 0.0 if self.workers() else self.restart_patience

    def engine_counts(self, version: int) -> dict[str, int]:
        """Engines by state: serving `version`, stale, starting."""
        starting, stale = sum(e.starting for e in self.engines.values()), len(self.stale_engines(version))
        return {"serving": len(self.engines) - starting - stale, "stale": stale, "starting": starting}

    def ask(self, peer: Peer, count: int) -> None:
        """A worker asks for `count` more leases."""
        if count > 0:
            peer.credits += count
            self._asking.setdefault(peer.identity, peer)

    def granted(self, peer: Peer, now: float) -> None:
        """A worker was given one of the leases that it has asked for."""
        peer.credits -= 1
        peer.probe = peer.probe or now
        if peer.credits <= 0:
            self._asking.pop(peer.identity, None)

    def hungry(self, version: int, now: float) -> list[Peer]:
        """The workers that get leases now, whoever has waited longest first; of a large fleet few ask at a time."""
        return [p for p in self._asking.values() if p.may_lease(version, now)]

    def workers(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.role == "rollout"]

    def named(self, name: str) -> Peer | None:
        return next((p for p in self.peers.values() if p.name == name), None)

    def silent(self, now: float, timeout: float) -> list[Peer]:
        return [p for p in self.workers() if now - p.last_seen > timeout]

    def rollout_finished(self, peer: Peer) -> None:
        peer.finished += 1
        peer.faults_in_a_row = 0

    def infrastructure_fault(self, peer: Peer, granted: float, now: float, reason: str) -> bool:
        """Count the fault of a lease that was granted at that time; True if this worker gets no more leases from now on.

        All that ran when the last one was counted had the same cause, and counts once.
        """
        peer.faults += 1
        if granted <= peer.last_fault or peer.barred:
            return False
        peer.faults_in_a_row, peer.last_fault, peer.probe = peer.faults_in_a_row + 1, now, 0.0
        if peer.faults_in_a_row < self._max_faults:
            return False
        peer.barred = f"{peer.faults_in_a_row} infrastructure faults in a row, the last one: {reason.splitlines()[0][:200]}"
        return True

    def usable(self) -> list[Peer]:
        """Workers that can still produce rollouts."""
        return [p for p in self.workers() if not p.barred]
