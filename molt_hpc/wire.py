"""Frames on a socket: one small msgpack header, then raw little-endian buffers.

A message is a list of frames. Frame 0 is the header: schema number, kind, fields, and for every
array its name, dtype, shape and XXH3-64 checksum. The frames after it are the arrays' bytes; whoever only
relays a message never looks into them. Nothing on a socket is ever unpickled.
"""

import math
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash

SCHEMA = 2
HEADER_LIMIT = 8 << 20
"""Bytes of the largest header. Prompts travel in headers; bulk data does not."""

DTYPES = {"<i2": 2, "<i4": 4, "<i8": 8, "<f4": 4, "<f8": 8, "|u1": 1, "|b1": 1}
"""Bytes of one element of every dtype that travels."""


class WireError(ValueError):
    """A frame that must not be used: cut, too large, of another schema, or damaged."""


@dataclass
class Message:
    """A decoded header and the frames behind it, still undecoded."""

    kind: str
    fields: dict[str, Any]
    frames: list[Any]
    specs: list[dict[str, Any]]

    def arrays(self) -> dict[str, np.ndarray]:
        """Decode the payload (read-only views of the frames), checking sizes and checksums."""
        found = {}
        for spec, frame in zip(self.specs, self.frames, strict=True):
            if xxhash.xxh3_64_intdigest(frame) != spec["xxh3"]:
                raise WireError(f"{self.kind}: array {spec['name']} is damaged (checksum)")
            found[spec["name"]] = np.frombuffer(frame, spec["dtype"]).reshape(spec["shape"])
        return found


def encode(kind: str, fields: dict[str, Any] | None = None, arrays: dict[str, np.ndarray] | None = None) -> list[Any]:
    """A message as frames. Fields hold msgpack's types only; lists of numbers belong into arrays."""
    specs, frames = [], []
    for name, value in (arrays or {}).items():
        value = np.ascontiguousarray(value)
        dtype = value.dtype.newbyteorder("<").str if value.dtype.itemsize > 1 else value.dtype.str
        if dtype not in DTYPES:
            raise WireError(f"{kind}: array {name} has dtype {value.dtype}, which does not travel")
        buffer = value.reshape(-1).view(np.uint8)
        specs.append({"name": name, "dtype": dtype, "shape": list(value.shape), "xxh3": xxhash.xxh3_64_intdigest(buffer)})
        frames.append(buffer)
    try:
        header = msgpack.packb({"schema": SCHEMA, "kind": kind, "fields": fields or {}, "arrays": specs})
    except (TypeError, OverflowError) as error:
        raise WireError(f"{kind}: a field cannot travel: {error}") from None
    if len(header) > HEADER_LIMIT:
        raise WireError(f"{kind}: the header has {len(header)} bytes, the limit is {HEADER_LIMIT}")
    return [header, *frames]


def decode(frames: list[Any], max_bytes: int = 1 << 30) -> Message:
    """Read the header and check the frames' number and total size; payload bytes stay untouched."""
    if not frames:
        raise WireError("an empty message")
    total = size_of(frames)
    if total > max_bytes:
        raise WireError(f"a message of {total} bytes, the limit is {max_bytes} (broker.max_message_bytes)")
    header = decode_header(frames[0])
    specs = header["arrays"]
    if len(specs) != len(frames) - 1:
        raise WireError(f"{header['kind']}: the header names {len(specs)} arrays, {len(frames) - 1} frames came")
    for spec, frame in zip(specs, frames[1:]):
        expected = math.prod(spec["shape"]) * DTYPES[spec["dtype"]]
        if expected != _size(frame):
            raise WireError(f"{header['kind']}: array {spec['name']} should have {expected} bytes, {_size(frame)} came")
    return Message(header["kind"], header["fields"], list(frames[1:]), specs)


def relay_header(kind: str, fields: dict[str, Any], specs: list[dict[str, Any]]) -> bytes:
    """A header for payload frames that somebody else encoded; `specs` are theirs."""
    return msgpack.packb({"schema": SCHEMA, "kind": kind, "fields": fields, "arrays": list(specs)})


def relay_frames(message: Message) -> list[Any]:
    """A received message as frames again, its payload untouched."""
    return [relay_header(message.kind, message.fields, message.specs), *message.frames]


def _size(frame: Any) -> int:
    return frame.nbytes if isinstance(frame, np.ndarray) else len(frame)


def size_of(frames: list[Any]) -> int:
    """Bytes of encoded frames."""
    return sum(map(_size, frames))


def decode_header(frame: Any) -> dict[str, Any]:
    """{kind, fields, arrays} of a message's first frame. Raises WireError if it is none."""
    if _size(frame) > HEADER_LIMIT:
        raise WireError(f"a header of {_size(frame)} bytes, the limit is {HEADER_LIMIT}")
    try:
        header = msgpack.unpackb(bytes(frame))
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header that is not msgpack: {type(error).__name__}") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        came = header.get("schema") if isinstance(header, dict) else type(header).__name__
        raise WireError(f"a header of schema {came!r}, expected {SCHEMA}")
    if not (isinstance(header.get("kind"), str) and isinstance(header.get("fields"), dict)
            and isinstance(header.get("arrays"), list) and all(_spec_ok(s) for s in header["arrays"])):
        raise WireError("a header without kind, fields and arrays of the right types")
    return header


def _spec_ok(spec: Any) -> bool:
    return (isinstance(spec, dict) and isinstance(spec.get("name"), str) and isinstance(spec.get("dtype"), str) and spec["dtype"] in DTYPES
            and isinstance(spec.get("xxh3"), int) and isinstance(spec.get("shape"), list)
            and all(isinstance(n, int) and n >= 0 for n in spec["shape"]))
