"""The broker's memory on disk: every change of the ledger and every finished rollout, appended before it is acknowledged.

<run>/journal/segment_000001.log and so on. A segment starts with a snapshot of the ledger; records follow:

    length u32, CRC-32 of the length u32, CRC-32 of the body u32, body

A body is a msgpack value {kind, ...}, for a finished rollout followed by its frames as they came from the wire. A
record that is cut at the end of the last segment is what a crash leaves behind: it is dropped with a warning.
Damage anywhere else is an error. Writing is not enough against a power cut: `sync` makes what was written durable.
"""

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

log = logging.getLogger(__name__)

HEAD = struct.Struct("<III")
BUFFER_BYTES = 1 << 20
"""Records are gathered up to this size; larger frames are written as they are."""


class JournalError(RuntimeError):
    """The journal is damaged in a place where no crash could have damaged it."""


@dataclass(frozen=True)
class Place:
    """Where the frames of a rollout lie: segment number, offset, and the length of each frame."""

    segment: int
    offset: int
    lengths: tuple[int, ...]


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment_{number:06d}.log"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in a folder, oldest first."""
    return sorted(int(path.stem.removeprefix("segment_")) for path in folder.glob("segment_*.log"))


class Journal:
    """Appends records to the newest segment; one writer, one thread (except for `sync`)."""

    def __init__(self, folder: Path, number: int, snapshot: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file: Any = None
        self._lock = threading.Lock()
        self.start_segment(number, snapshot)

    def start_segment(self, number: int, snapshot: dict[str, Any]) -> None:
        """Begin a segment with a snapshot; the one before is complete and never written again."""
        temporary = segment_path(self.folder, number).with_suffix(".tmp")
        file = open(temporary, "wb", BUFFER_BYTES, opener=lambda path, flags: os.open(path, flags, 0o600))
        self.number, self.size = number, 0
        with self._lock:
            previous, self._file = self._file, file
        self.append({"kind": "snapshot", "state": snapshot})
        self.flush()
        self.sync()
        os.replace(temporary, segment_path(self.folder, number))
        if previous is not None:
            previous.close()

    def append(self, record: dict[str, Any], frames: list[Any] = ()) -> Place:
        """Add one record, with the frames of a rollout behind it; `flush` writes it. Returns where the frames lie."""
        lengths = tuple(len(f) for f in frames)
        body = msgpack.packb(record | {"frames": lengths} if frames else record)
        # the CRC covers the record; a rollout's frames carry their own checksums in its header
        length = len(body) + sum(lengths) + 4
        head = HEAD.pack(length, zlib.crc32(length.to_bytes(4, "little")), zlib.crc32(body)) + len(body).to_bytes(4, "little")
        for part in (head, body, *frames):
            self._file.write(part)
        place = Place(self.number, self.size + len(head) + len(body), lengths)
        self.size += HEAD.size + length
        return place

    def flush(self) -> None:
        """Hand what was appended since the last time to the system: nothing may be acknowledged before."""
        self._file.flush()

    def sync(self) -> None:
        """Make everything that was flushed so far durable; may be called from another thread."""
        with self._lock:
            descriptor = os.dup(self._file.fileno())
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, place: Place, count: int | None = None) -> list[bytes]:
        """The first `count` frames (None: all) of a rollout that was flushed."""
        with open(segment_path(self.folder, place.segment), "rb") as file:
            file.seek(place.offset)
            frames = [file.read(length) for length in place.lengths[:count]]
        if [len(f) for f in frames] != list(place.lengths[:count]):
            raise JournalError(f"{segment_path(self.folder, place.segment)}: a rollout at {place.offset} is cut")
        return frames

    def drop_before(self, number: int) -> None:
        """Delete segments older than `number`; nothing may refer to them any more."""
        for old in segments(self.folder):
            if old < min(number, self.number):
                segment_path(self.folder, old).unlink()

    def close(self) -> None:
        self.flush()
        self.sync()
        self._file.close()


def read_segment(folder: Path, number: int, last: bool) -> Iterator[tuple[dict[str, Any], Place]]:
    """The records of a segment. In the last one a cut tail is dropped with a warning.

    Raises JournalError with file and offset for damage that a crash cannot explain.
    """
    path = segment_path(folder, number)
    size, at = path.stat().st_size, 0
    with open(path, "rb") as file:
        while at < size:
            record, place, end = _read_record(file, path, number, at, size)
            if record is None:
                if not last:
                    raise JournalError(f"{path}: cut at byte {at}, but it is not the last segment")
                log.warning("%s: the last record at byte %d is cut (%d bytes): a crash came between; it is dropped", path, at, size - at)
                return
            yield record, place
            at = end


def _read_record(file: Any, path: Path, number: int, at: int, size: int) -> tuple[dict[str, Any] | None, Place | None, int]:
    """(record, place of its frames, end); record None if the file ends within it."""
    file.seek(at)
    raw = file.read(HEAD.size + 4)
    if len(raw) < HEAD.size + 4 or not any(raw):
        if any(file.read()):
            raise JournalError(f"{path}: damaged at byte {at}: zeros instead of a record, with data behind them")
        return None, None, size
    length, length_crc, body_crc = HEAD.unpack(raw[:HEAD.size])
    if zlib.crc32(length.to_bytes(4, "little")) != length_crc:
        raise JournalError(f"{path}: damaged at byte {at}: the length of a record fails its checksum; restore the file or start a new run")
    end, body_length = at + HEAD.size + length, int.from_bytes(raw[HEAD.size:], "little")
    if end > size:
        return None, None, size
    body = file.read(body_length)
    if zlib.crc32(body) != body_crc:
        if end == size:
            return None, None, size
        raise JournalError(f"{path}: damaged at byte {at}: a record fails its checksum; restore the file or start a new run")
    record = msgpack.unpackb(body)
    return record, Place(number, at + HEAD.size + 4 + body_length, tuple(record.pop("frames", ()))), end
