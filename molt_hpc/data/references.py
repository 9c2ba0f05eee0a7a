"""Rollouts that are too large for a socket travel by reference: where their frames lie in a file of the run folder.

The worker that produced them appends their frames to a file of its own, <run>/rollouts/<producer>_<n>.bin, and makes
them durable before it tells of them; the header names file and offset, the rank that needs the arrays reads them,
and the broker, which never opens a file, deletes it when all that it holds is trained or dropped.
"""

import os
import threading
import uuid
from pathlib import Path
from typing import Any

from molt_hpc import wire

FOLDER = "rollouts"
FILE_BYTES = 256 << 20
"""A producer begins a new file when its present one has grown beyond this."""


class Producer:
    """The files of one process; `put` may be called from several threads at once."""

    def __init__(self, run: Path, name: str, file_bytes: int = FILE_BYTES):
        # a process that starts anew under the same name must not append to what the old one left
        self._folder, self._name, self._file_bytes = run / FOLDER, f"{name}.{uuid.uuid4().hex[:8]}", file_bytes
        self._lock = threading.Lock()
        self._file: Any = None
        self._count = self._size = 0

    def put(self, messages: list[list[Any]]) -> list[list[Any]]:
        """Append the payloads of encoded messages, make them durable, and return the messages that refer to them."""
        with self._lock:
            file = self._open()
            referring = [self._append(file, message) for message in messages]
            file.flush()
        os.fdatasync(file.fileno())
        return referring

    def _open(self) -> Any:
        if self._file is None or self._size > self._file_bytes:
            self._folder.mkdir(exist_ok=True)
            self._file, self._size = open(self._folder / f"{self._name}_{self._count:06d}.bin", "xb"), 0
            self._count += 1
        return self._file

    def _append(self, file: Any, message: list[Any]) -> list[Any]:
        decoded = wire.decode(message)
        lengths = [wire.size_of([frame]) for frame in message[1:]]
        reference = {"file": Path(file.name).name, "offset": self._size, "specs": decoded.specs, "lengths": lengths}
        for frame in message[1:]:
            file.write(frame)
        self._size += sum(lengths)
        return wire.encode(decoded.kind, decoded.fields | {"reference": reference})


def resolve(run: Path, message: wire.Message) -> wire.Message:
    """The message with its payload read from the file, if it has one. Raises wire.WireError if the file is not whole.

    The arrays' checksums are checked when they are decoded.
    """
    reference = message.fields.get("reference")
    if reference is None:
        return message
    path, wanted = path_of(run, reference["file"]), sum(reference["lengths"])
    try:
        with open(path, "rb", buffering=0) as file:
            raw = memoryview(os.pread(file.fileno(), wanted, reference["offset"]))
    except FileNotFoundError:
        raise wire.WireError(f"{path}: the rollout that a message refers to is not there") from None
    if len(raw) != wanted:
        raise wire.WireError(f"{path}: {len(raw)} bytes at {reference['offset']}, expected {wanted}")
    frames, at = [], 0
    for length in reference["lengths"]:
        frames.append(raw[at:at + length])
        at += length
    fields = {k: v for k, v in message.fields.items() if k != "reference"}
    return wire.decode([wire.relay_header(message.kind, fields, reference["specs"]), *frames])


def path_of(run: Path, name: str) -> Path:
    """The file that a reference names; only the last part counts, for a reference must not lead out of the folder."""
    return run / FOLDER / Path(str(name)).name
