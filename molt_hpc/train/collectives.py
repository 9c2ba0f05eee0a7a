"""The few collectives of the trainer that are not FSDP's own: bytes from rank 0, and packed sums.

All ranks call them in the same order. Data travels as uint8 and float64 tensors; torch's object
collectives would pickle.
"""

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from molt_hpc.train.optim import BadStep

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest that a rank may wait for the others, which includes rank 0 writing a model."""
ERRORS = (ValueError, BadStep)
"""What may happen on one rank and is raised on all that need its result."""


def announce(number: int, device: torch.device) -> int:
    """Rank 0 tells every rank a number, mostly what comes next; returns rank 0's on all ranks."""
    value = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(value, 0)
    return int(value.item())


def broadcast_bytes(data: bytes | None, device: torch.device) -> bytes:
    """Every rank returns the bytes that rank 0 gave; the other ranks' argument is ignored."""
    mine = dist.get_rank() == 0
    assert not mine or data is not None, "rank 0 has no bytes to give"
    if dist.get_world_size() == 1:
        return data
    size = announce(len(data) if mine else 0, device)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device) if mine and size else torch.empty(size, dtype=torch.uint8, device=device)
    if size:
        dist.broadcast(buffer, 0)
    return data if mine else buffer.cpu().numpy().tobytes()


def outcome_of(work: Callable[[], bytes]) -> bytes:
    """What `work` gives, or the error that it raised, if it is one of ERRORS, as bytes for value_of."""
    try:
        return b"\0" + work()
    except ERRORS as error:
        kind = next(number for number, each in enumerate(ERRORS) if isinstance(error, each))
        return bytes([1 + kind]) + str(error).encode()


def value_of(outcome: bytes) -> bytes:
    if outcome[0]:
        raise ERRORS[outcome[0] - 1](outcome[1:].decode())
    return outcome[1:]


def share(work: Callable[[], bytes], device: torch.device) -> bytes:
    """Every rank returns what `work` gives on rank 0; one of ERRORS is raised on every rank, so that none waits for the others."""
    return value_of(broadcast_bytes(outcome_of(work) if dist.get_rank() == 0 else None, device))


def reduce_packed(sums: dict[str, float], maxima: dict[str, float], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Sum `sums` and take the largest of `maxima` over all ranks, in one collective; same keys on all ranks.

    A gather in rank order and a local reduction, so that the result is bit-equal on every rank.
    """
    mine = torch.tensor([*sums.values(), *maxima.values()], dtype=torch.float64, device=device)
    gathered = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    rows = gathered.cpu().numpy().reshape(dist.get_world_size(), -1)
    totals, largest = rows[:, :len(sums)].sum(0), rows[:, len(sums):].max(0) if maxima else np.zeros(0)
    return dict(zip(sums, totals.tolist(), strict=True)), dict(zip(maxima, largest.tolist(), strict=True))
