"""Finished rollouts between worker and actor: on disk before they are acknowledged, in memory as far as a bound allows; and how
a broker that starts anew finds them and its ledger again (`recover`)."""

import logging
import threading
from pathlib import Path
from typing import Any

from molt_hpc import wire
from molt_hpc.broker.journal import Journal, JournalError, Place, read_segment, segments
from molt_hpc.broker.ledger import Ledger, LedgerConfig
from molt_hpc.broker.referred import Referred

log = logging.getLogger(__name__)

SYNC_INTERVAL = 0.5
"""Seconds between two looks of the thread that makes closed groups durable."""
SEGMENT_BYTES = 256 << 20
"""A journal segment that has grown beyond this is followed by a new one after the next step."""

Places = dict[tuple[int, int], Place]
"""(group, sample) -> where the frames of its finished rollout lie."""


class Store:
    """The journal, and a cache of what is in it; every change of the ledger goes through `commit`."""

    def __init__(self, run: Path, ledger: Ledger, places: Places, segment: int, memory_bytes: int):
        self._ledger, self._places, self._memory_bytes = ledger, places, memory_bytes
        self._cache: dict[tuple[int, int], list[Any]] = {}
        self.cached_bytes = 0
        self._journal = Journal(run / "journal", segment, snapshot(ledger, places))
        self._journal.drop_before(min((p.segment for p in places.values()), default=segment))
        self.referred = Referred(run)
        for (group, _), place in places.items():
            if reference := wire.decode_header(self._journal.read(place, 1)[0])["fields"].get("reference"):
                self.referred.add(group, reference)
        self.referred.delete_others()
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

    def forget_ended(self, group: int) -> None:
        """If the group has ended its rollouts are not needed any more."""
        if group in self._ledger.groups:
            return
        self.referred.ended(group)
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


# from a journal back to the state of the broker that wrote it ----------------------------------


def snapshot(ledger: Ledger, places: Places) -> dict[str, Any]:
    """What a segment starts with; every event before it has been journalled."""
    assert not ledger.events(), "a snapshot was taken before the last events were journalled"
    rows = [[*key, place.segment, place.offset, list(place.lengths)] for key, place in places.items()]
    return {"config": vars(ledger.config), "ledger": ledger.snapshot(), "rollouts": rows}


def recover(folder: Path, config: LedgerConfig, now: float) -> tuple[Ledger, Places, int]:
    """(ledger, places, number of the next segment) as of the last whole record; leases are taken back.

    An empty folder gives an empty ledger. `config` holds from here on. Raises JournalError if the journal is damaged.
    """
    numbers = segments(folder)
    if not numbers:
        return Ledger(config), {}, 1
    records = read_segment(folder, numbers[-1], last=True)
    first, _ = next(records, ({}, None))
    if first.get("kind") != "snapshot":
        raise JournalError(f"{folder}: segment {numbers[-1]} does not start with a snapshot")
    try:
        ledger = Ledger.from_snapshot(LedgerConfig(**first["state"]["config"]), first["state"]["ledger"])
    except (KeyError, TypeError) as error:
        raise JournalError(f"{folder}: segment {numbers[-1]} comes from another version of molt_hpc; go on with that: {error!r}") from error
    places = {(group, sample): Place(segment, offset, tuple(lengths)) for group, sample, segment, offset, lengths in first["state"]["rollouts"]}
    for record, place in records:
        try:
            ledger.apply(record)
        except (AssertionError, KeyError, TypeError) as error:
            raise JournalError(f"{folder}: segment {numbers[-1]}: {record} does not follow from what came before: {error}") from error
        if record["kind"] == "finish":
            places[record["group"], record["sample"]] = place
    forget_ended(ledger, places)
    ledger.config = config  # only now: what is in the journal was decided within the bounds of its time
    ledger.recover(now)
    ledger.events()  # the new segment's snapshot holds it
    return ledger, places, numbers[-1] + 1


def forget_ended(ledger: Ledger, places: Places) -> None:
    """Drop the places of groups that have ended."""
    for key in [k for k in places if k[0] not in ledger.groups]:
        del places[key]


def next_segment(journal: Journal, ledger: Ledger, places: Places) -> None:
    """Begin a new segment and delete those that no live rollout lies in."""
    forget_ended(ledger, places)
    journal.start_segment(journal.number + 1, snapshot(ledger, places))
    journal.drop_before(min((place.segment for place in places.values()), default=journal.number))
