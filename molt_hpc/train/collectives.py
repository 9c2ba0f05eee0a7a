"""The few collectives of the trainer that are not FSDP's own: bytes from rank 0, and packed sums.

All ranks call them in the same order. Data travels as uint8 and float64 tensors; torch's object
collectives would pickle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

OK, REFUSED = b"\0", b"\1"


def announce(code: int, device: torch.device) -> int:
    """Rank 0 tells every rank what comes next; returns rank 0's code on all ranks."""
    value = torch.tensor([code], dtype=torch.int64, device=device)
    dist.broadcast(value, 0)
    return int(value.item())


def broadcast_bytes(data: bytes | None, device: torch.device, source: int = 0) -> bytes:
    """Every rank returns the bytes that rank `source` gave; the other ranks' argument is ignored."""
    if dist.get_world_size() == 1:
        return _given(data)
    mine = dist.get_rank() == source
    size = torch.tensor([len(_given(data)) if mine else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    if mine:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if len(buffer):
        dist.broadcast(buffer, source)
    return data if mine else buffer.cpu().numpy().tobytes()


def share(work: Callable[[], bytes], device: torch.device) -> bytes:
    """Every rank returns what `work` gives on rank 0; a ValueError there is raised on every rank, so that none waits for the others."""
    outcome = None
    if dist.get_rank() == 0:
        try:
            outcome = OK + work()
        except ValueError as error:
            outcome = REFUSED + str(error).encode()
    outcome = broadcast_bytes(outcome, device)
    if outcome[:1] == REFUSED:
        raise ValueError(outcome[1:].decode())
    return outcome[1:]


def _given(data: bytes | None) -> bytes:
    if data is None:
        raise ValueError("broadcast: the sending rank has no bytes; pass the shard on rank 0")
    return data


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
