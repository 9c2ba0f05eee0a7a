"""From a journal back to the state of the broker that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from molt_hpc.broker.journal import Journal, JournalError, Place, read_segment, segments
from molt_hpc.broker.ledger import Ledger, LedgerConfig

Places = dict[tuple[int, int], Place]
"""(group, sample) -> where the frames of its finished rollout lie."""


def snapshot(ledger: Ledger, places: Places) -> dict[str, Any]:
    """What a segment starts with; every event before it has been journalled."""
    assert not ledger.events(), "a snapshot was taken before the last events were journalled"
    rows = [[*key, place.segment, place.offset, list(place.lengths)] for key, place in places.items()]
    return {"ledger": ledger.snapshot(), "rollouts": rows}


def recover(folder: Path, config: LedgerConfig, now: float) -> tuple[Ledger, Places, int]:
    """(ledger, places, number of the next segment) as of the last whole record; leases are taken back.

    An empty folder gives an empty ledger. Raises JournalError if the journal is damaged or does not fit the configuration.
    """
    numbers = segments(folder)
    if not numbers:
        return Ledger(config), {}, 1
    records = read_segment(folder, numbers[-1], last=True)
    first, _ = next(records, ({}, None))
    if first.get("kind") != "snapshot":
        raise JournalError(f"{folder}: segment {numbers[-1]} does not start with a snapshot")
    ledger, places = restore(config, first["state"])
    for record, place in records:
        try:
            ledger.apply(record)
        except (AssertionError, KeyError, TypeError) as error:
            raise JournalError(f"{folder}: segment {numbers[-1]}: {record} does not follow from what came before: {error}") from error
        if record["kind"] == "finish":
            places[record["group"], record["sample"]] = place
    forget_ended(ledger, places)
    ledger.recover(now)
    ledger.events()  # the new segment's snapshot holds it
    return ledger, places, numbers[-1] + 1


def restore(config: LedgerConfig, state: dict[str, Any]) -> tuple[Ledger, Places]:
    """The inverse of `snapshot`."""
    places = {(group, sample): Place(segment, offset, tuple(lengths)) for group, sample, segment, offset, lengths in state["rollouts"]}
    return Ledger.from_snapshot(config, state["ledger"]), places


def forget_ended(ledger: Ledger, places: Places) -> None:
    """Drop the places of groups that have ended."""
    for key in [k for k in places if k[0] not in ledger.groups]:
        del places[key]


def next_segment(journal: Journal, ledger: Ledger, places: Places) -> None:
    """Begin a new segment and delete those that no live rollout lies in."""
    forget_ended(ledger, places)
    journal.start_segment(journal.number + 1, snapshot(ledger, places))
    journal.drop_before(min((place.segment for place in places.values()), default=journal.number))
