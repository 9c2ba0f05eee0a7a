"""The batch on its way to the actor: as many rollouts as it has room for, so that no socket queue holds a whole batch."""

from __future__ import annotations

from collections import deque

from molt_hpc.broker.client import ACKNOWLEDGE_BYTES
from molt_hpc.broker.front import Front
from molt_hpc.broker.store import Store


class Outgoing:
    """The rollouts of one batch that are not sent yet, and the bytes that are sent and not yet taken."""

    def __init__(self, front: Front, store: Store, memory_bytes: int):
        self._front, self._store = front, store
        self._window = max(memory_bytes // 4, 2 * ACKNOWLEDGE_BYTES)
        self._keys: deque[tuple[int, int]] = deque()
        self._identity, self._unread = b"", 0

    def clear(self, identity: bytes) -> None:
        """The actor asks for a batch: nothing of an earlier one is under way."""
        self._keys.clear()
        self._identity, self._unread = identity, 0

    def add(self, keys: list[tuple[int, int]]) -> None:
        self._keys.extend(keys)

    def got(self, nbytes: int) -> None:
        """The actor has taken so many bytes."""
        self._unread -= nbytes

    def pump(self) -> None:
        """Send on while the actor has room; one rollout may overshoot."""
        while self._keys and self._unread < self._window:
            key = self._keys.popleft()
            self._unread += self._store.size(*key)
            self._front.send(self._identity, self._store.frames(*key))
