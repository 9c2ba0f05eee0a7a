"""The processes that have said hello, and how the rollout workers among them are doing. Pure bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Peer:
    """A process that has said hello. `served` is the weights version that its engines serve, -1 for none."""

    identity: bytes
    role: str
    name: str
    host: str
    last_seen: float
    ready: bool = False
    draining: bool = False
    credits: int = 0
    engines: dict[str, int] = field(default_factory=dict)
    served: int = -1
    faults_in_a_row: int = 0
    finished: int = 0
    faults: int = 0
    barred: str = ""
    progress: dict[str, Any] = field(default_factory=dict)

    def may_lease(self, version: int) -> bool:
        """Whether this worker is given leases: it asks, its engines are current, and it does not keep failing."""
        return self.credits > 0 and self.ready and not self.draining and not self.barred and self.served == version

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        return {"host": self.host, "ready": self.ready, "draining": self.draining, "credits": self.credits, "served": self.served,
                "finished": self.finished, "faults": self.faults, "barred": self.barred, **self.progress}


class Fleet:
    """Every peer by its socket identity."""

    def __init__(self, max_faults: int):
        self._max_faults = max_faults
        self.peers: dict[bytes, Peer] = {}
        self._asking: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> None:
        self.peers[peer.identity] = peer

    def remove(self, peer: Peer) -> None:
        self.peers.pop(peer.identity, None)
        self._asking.pop(peer.identity, None)

    def ask(self, peer: Peer, count: int) -> None:
        """A worker asks for `count` more leases."""
        if count > 0:
            peer.credits += count
            self._asking.setdefault(peer.identity, peer)

    def granted(self, peer: Peer) -> None:
        """A worker was given one of the leases that it has asked for."""
        peer.credits -= 1
        if peer.credits <= 0:
            self._asking.pop(peer.identity, None)

    def hungry(self, version: int) -> list[Peer]:
        """The workers that get leases now, whoever has waited longest first; of a large fleet few ask at a time."""
        return [p for p in self._asking.values() if p.may_lease(version)]

    def workers(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.role == "rollout"]

    def named(self, name: str) -> Peer | None:
        return next((p for p in self.peers.values() if p.name == name), None)

    def engines(self) -> dict[str, tuple[bytes, int]]:
        """Engine name -> (identity of its worker, world size), of workers that are ready."""
        return {engine: (p.identity, size) for p in self.workers() if p.ready for engine, size in p.engines.items()}

    def silent(self, now: float, timeout: float) -> list[Peer]:
        return [p for p in self.workers() if now - p.last_seen > timeout]

    def rollout_finished(self, peer: Peer) -> None:
        peer.finished += 1
        peer.faults_in_a_row = 0

    def infrastructure_fault(self, peer: Peer, reason: str) -> bool:
        """Count a fault; True if this worker gets no more leases from now on."""
        peer.faults += 1
        peer.faults_in_a_row += 1
        if peer.faults_in_a_row < self._max_faults or peer.barred:
            return False
        peer.barred = f"{peer.faults_in_a_row} infrastructure faults in a row, the last one: {reason.splitlines()[0][:200]}"
        return True

    def usable(self) -> list[Peer]:
        """Workers that can still produce rollouts."""
        return [p for p in self.workers() if not p.barred]
