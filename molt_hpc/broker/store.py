"""Finished rollouts between worker and actor: on disk before they are acknowledged, in memory as far as a bound allows."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from molt_hpc.broker.journal import Journal
from molt_hpc.broker.ledger import Ledger
from molt_hpc.broker.recovery import Places, next_segment, snapshot

log = logging.getLogger(__name__)

SYNC_INTERVAL = 0.5
"""Seconds between two looks of the thread that makes closed groups durable."""
SEGMENT_BYTES = 256 << 20
"""A journal segment that has grown beyond this is followed by a new one after the next step."""


class Store:
    """The journal, and a cache of what is in it; every change of the ledger goes through `commit`."""

    def __init__(self, folder: Path, ledger: Ledger, places: Places, segment: int, memory_bytes: int):
        self._ledger, self._places, self._memory_bytes = ledger, places, memory_bytes
        self._cache: dict[tuple[int, int], list[Any]] = {}
        self.cached_bytes = 0
        self._journal = Journal(folder, segment, snapshot(ledger, places))
        self._journal.drop_before(min((p.segment for p in places.values()), default=segment))
        self._dirty, self._ended = threading.Event(), threading.Event()
        self._syncing = threading.Thread(target=self._sync_closed_groups, daemon=True, name="journal sync")
        self._syncing.start()

    def commit(self, frames: list[Any] = ()) -> None:
        """Journal what the ledger has changed; `frames` belong to the one rollout that has finished."""
        for event in self._ledger.events():
            if event["kind"] != "finish":
                self._journal.append(event)
                continue
            key = (event["group"], event["sample"])
            self._places[key] = self._journal.append(event, frames)
            size = sum(self._places[key].lengths)
            if self.cached_bytes + size <= self._memory_bytes:
                self._cache[key] = frames
                self.cached_bytes += size
            group = self._ledger.groups.get(event["group"])
            if group is None or group.unsettled == 0:
                self._dirty.set()

    def flush(self) -> None:
        """Write what was committed; comes before every message that acknowledges it."""
        self._journal.flush()

    def size(self, group: int, sample: int) -> int:
        """Bytes of a finished rollout's frames."""
        return sum(self._places[group, sample].lengths)

    def frames(self, group: int, sample: int) -> list[Any]:
        """The frames of a finished rollout, from memory or from the journal."""
        cached = self._cache.get((group, sample))
        return cached if cached is not None else self._journal.read(self._places[group, sample])

    def header(self, group: int, sample: int) -> bytes:
        """The first of these frames, from the journal."""
        return self._journal.read(self._places[group, sample], 1)[0]

    def forget(self, group: int) -> None:
        """A group has ended: its rollouts are not needed any more."""
        for sample in range(self._ledger.config.n_samples):
            place = self._places.pop((group, sample), None)
            if self._cache.pop((group, sample), None) is not None:
                self.cached_bytes -= sum(place.lengths)

    def step_done(self) -> None:
        """Make a finished step durable; begin a new segment if this one has grown large."""
        self._journal.flush()
        self._journal.sync()
        if self._journal.size > SEGMENT_BYTES:
            next_segment(self._journal, self._ledger, self._places)

    def _sync_closed_groups(self) -> None:
        while not self._ended.wait(SYNC_INTERVAL):
            if self._dirty.is_set():
                self._dirty.clear()
                self._journal.sync()

    def close(self) -> None:
        self._ended.set()
        self._syncing.join()
        self._journal.close()
