"""The transfer group of trainer and engines over gloo, with no global state of torch.distributed, and its checksums.

Both ends build it the same way: a TCP store on the trainer's rank 0, a prefix with the epoch's number, a process
group with a timeout. A gloo send notices neither that its peer is dead or stopped nor that its group is aborted: it waits for
that timeout. So both ends make every blocking call on a side thread (threads.py) and leave it behind when the trainer gives the group up.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash

ABORTED = "aborted"
"""The trainer sets this key in the store of a group that it gives up."""


def abort(address: str, port: int) -> None:
    """On the rank that owns the store: tell everybody in its group that it is given up."""
    # over a connection of its own: a call that waits keeps the other one busy
    open_store(address, port, 1, False, 10.0).set(ABORTED, "")


def watch(address: str, port: int, timeout: float) -> Callable[[], None]:
    """A function that raises RuntimeError in a receiver once the trainer has given the group up, or is gone."""
    store = open_store(address, port, 1, False, timeout)

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            if not store.check([ABORTED]):
                return
        raise RuntimeError("aborted")

    return look


def open_store(address: str, port: int, world_size: int, master: bool, timeout: float) -> dist.TCPStore:
    """Connect to the rendezvous store; the master passes port 0 and reads the real one from `store.port`."""
    return dist.TCPStore(address, port, world_size, is_master=master, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def await_ranks(store: dist.Store, epoch: int, world_size: int, timeout: float, look: Callable[[], None]) -> None:
    """Rank 0, before it joins: wait until all others are about to. Raises RuntimeError with the ranks that do not come, or what `look` raises.

    Joining itself can neither be aborted nor say for whom it waits.
    """
    deadline = time.monotonic() + timeout
    absent = set(range(1, world_size))
    while absent := {rank for rank in absent if not store.check([f"here/{epoch}/{rank}"])}:
        look()
        if time.monotonic() > deadline:
            raise RuntimeError(f"transfer ranks {sorted(absent)} of 1..{world_size - 1} did not join epoch {epoch} within {timeout:.0f} s")
        time.sleep(0.005)


def join(store: dist.Store, epoch: int, rank: int, world_size: int, timeout: float) -> dist.ProcessGroupGloo:
    """Join the group of this epoch; returns when every rank has come. Raises RuntimeError after `timeout` seconds."""
    store.set(f"here/{epoch}/{rank}", "")
    return dist.ProcessGroupGloo(dist.PrefixStore(f"weights/{epoch}", store), rank, world_size, timedelta(seconds=timeout))


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    """Broadcast uint8 [N] from rank 0, in place; returns when the bytes are here."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()


class Checksum:
    """XXH3-64 over host tensors, in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, tensor: torch.Tensor) -> None:
        """Add a contiguous tensor in host memory, of any dtype."""
        self._hash.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())

    def hex(self) -> str:
        return self._hash.hexdigest()


def checksum(tensor: torch.Tensor) -> str:
    """XXH3-64 of one contiguous tensor in host memory."""
    result = Checksum()
    result.add(tensor)
    return result.hex()


def fingerprint(tensor: torch.Tensor, chunk: int = 1 << 24) -> torch.Tensor:
    """sum over i of (2i + 1) * w_i modulo 2^64, w being the tensor's bytes as 64-bit words (zero-padded); int64 [] on its device.

    The odd factors make every single changed word show. It runs where the tensor is, so a GPU's weights need not
    come to the host to be attested.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(data), 8 * chunk):
        part = data[start:start + 8 * chunk]
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64) if len(part) % 8 else part.clone().view(torch.int64)
        factors = torch.arange(start // 8, start // 8 + len(words), dtype=torch.int64, device=tensor.device) * 2 + 1
        total += (words * factors).sum()
    return total


class Fingerprints:
    """Fingerprints of tensors wherever they are, as one checksum over names, dtypes, shapes and values, whatever their order."""

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self.nbytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._rows[f"{name} {tensor.dtype} {tuple(tensor.shape)}"] = fingerprint(tensor)
        self.nbytes += tensor.nbytes

    def hex(self) -> str:
        return xxhash.xxh3_64_hexdigest("\n".join(f"{key} {int(value)}" for key, value in sorted(self._rows.items())).encode())
