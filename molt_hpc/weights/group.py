"""The transfer group of trainer and engines over gloo, with no global state of torch.distributed.

Both ends build it the same way: a TCP store on the trainer's rank 0, a prefix with the epoch's number, a process
group with a timeout. When either end dies the broadcast raises on the other instead of waiting for ever.
"""

from __future__ import annotations

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist


def open_store(address: str, port: int, world_size: int, master: bool, timeout: float) -> dist.TCPStore:
    """Connect to the rendezvous store; the master passes port 0 and reads the real one from `store.port`."""
    return dist.TCPStore(address, port, world_size, is_master=master, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def join(store: dist.Store, epoch: int, rank: int, world_size: int, timeout: float) -> dist.ProcessGroupGloo:
    """Join the group of this epoch; returns when every rank has come. Raises RuntimeError after `timeout` seconds."""
    return dist.ProcessGroupGloo(dist.PrefixStore(f"weights/{epoch}", store), rank, world_size, timedelta(seconds=timeout))


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    """Broadcast uint8 [N] from rank 0, in place; returns when the bytes are here."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()


def checksum(buffer: torch.Tensor, previous: int = 0) -> int:
    """CRC-32 of a uint8 buffer, continuing `previous`."""
    return zlib.crc32(buffer.cpu().numpy(), previous)
