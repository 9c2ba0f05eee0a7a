"""How a model's tensors are laid out in the buckets that travel. Pure.

Sender and receivers must cut the stream of bytes at the same places, so the plan is made once, by the
sender, and shipped. Every tensor starts at a multiple of 16 bytes, so that a received bucket can be
viewed in any dtype without a copy.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGNMENT = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2,
              "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as it travels: checkpoint name, dtype name, shape, first byte in its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one piece of `nbytes` bytes."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    def describe(self) -> dict[str, Any]:
        """{nbytes, tensors: [[name, dtype, shape, offset], ...]}, as the receivers get it."""
        return {"nbytes": self.nbytes, "tensors": [[t.name, t.dtype, list(t.shape), t.offset] for t in self.tensors]}


def plan_buckets(tensors: list[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets in the given order, closing one before it would exceed `bucket_bytes`.

    A tensor larger than that travels alone. Raises ValueError for a dtype that cannot travel or a name that comes twice.
    """
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"tensor {next(n for n in names if names.count(n) > 1)} would be sent twice")
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    end = 0
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {tensor.name} has dtype {tensor.dtype}, which does not travel")
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if current and start + tensor.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(current), end))
            current, start = [], 0
        current.append(TensorSpec(tensor.name, tensor.dtype, tuple(tensor.shape), start))
        end = start + tensor.nbytes
    return [*buckets, Bucket(tuple(current), end)] if current else buckets


def transfer_rank(rank_offset: int, replica: int, replica_size: int, rank: int) -> int:
    """A vLLM worker's rank in the transfer group.

    rank_offset: the rank of its server's first worker; replica: its data-parallel index; replica_size: tensor x pipeline
    ranks of one replica; rank: its rank within the replica.
    """
    return rank_offset + replica * replica_size + rank


def encode_plan(plan: dict[str, Any]) -> np.ndarray:
    """What a sender announces ({"updates": [body of one /update_weights call, ...]}) as uint8 [N], for a message's payload."""
    return np.frombuffer(json.dumps(plan, separators=(",", ":")).encode(), np.uint8)


def decode_plan(raw: np.ndarray) -> dict[str, Any]:
    return json.loads(raw.tobytes())
