"""Rollouts that are too large for a socket travel by reference: a file in the run folder and where to look in it.

The worker that produced the rollout writes its frames to <run>/rollouts/<lease>.bin; the header names the file, the
rank that needs the arrays reads it, and the broker, which never opens it, deletes it when the group has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from molt_hpc import wire

FOLDER = "rollouts"


def size_of(frames: list[Any]) -> int:
    """Bytes of encoded frames."""
    return sum(f.nbytes if hasattr(f, "nbytes") else len(f) for f in frames)


def by_reference(run: Path, lease: str, message: list[Any]) -> list[Any]:
    """Write the payload frames of an encoded message to a file; returns the message that refers to them."""
    decoded = wire.decode(message)
    path = run / FOLDER / f"{lease}.bin"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        for frame in message[1:]:
            file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    reference = {"file": path.name, "specs": decoded.specs, "lengths": [size_of([f]) for f in message[1:]]}
    return wire.encode(decoded.kind, decoded.fields | {"reference": reference})


def resolve(run: Path, message: wire.Message) -> wire.Message:
    """The message with its payload read from the file, if it has one. Raises wire.WireError if the file is not whole.

    The arrays' checksums are checked when they are decoded.
    """
    reference = message.fields.get("reference")
    if reference is None:
        return message
    path = _path(run, reference)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise wire.WireError(f"{path}: the rollout that a message refers to is not there") from None
    if len(raw) != sum(reference["lengths"]):
        raise wire.WireError(f"{path}: {len(raw)} bytes, expected {sum(reference['lengths'])}")
    frames, at = [], 0
    for length in reference["lengths"]:
        frames.append(memoryview(raw)[at:at + length])
        at += length
    fields = {k: v for k, v in message.fields.items() if k != "reference"}
    return wire.decode([wire.relay_header(message.kind, fields, reference["specs"]), *frames])


def remove_reference(run: Path, reference: dict[str, Any]) -> None:
    """Delete the file that a reference names; fine if it is gone."""
    _path(run, reference).unlink(missing_ok=True)


def leftover_references(run: Path, groups: set[int]) -> dict[int, list[dict[str, Any]]]:
    """What an earlier attempt left: references of groups that are under way by group; files of others are deleted."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in (run / FOLDER).glob("*"):
        group = int(path.name.split(".")[0])
        if path.suffix == ".bin" and group in groups:
            found.setdefault(group, []).append({"file": path.name})
        else:
            path.unlink(missing_ok=True)
    return found


def _path(run: Path, reference: dict[str, Any]) -> Path:
    # only the last part of the name counts: a reference must not lead out of the folder
    return run / FOLDER / Path(str(reference["file"])).name
