"""The sending end on the training ranks: gather and pack on one thread, send on another.

Every rank runs `stage` and `send` and takes part in each gather; rank 0 alone holds buffers and is in the transfer group. While
a bucket travels the next ones are gathered and packed into the free buffers. A transfer that fails does not end the
gathers: the ranks would lose step with each other.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from molt_hpc.config import WeightsConfig
from molt_hpc.weights import group
from molt_hpc.weights.plan import Bucket, TensorSpec, plan_buckets
from molt_hpc.weights.threads import ahead, aside

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """A model's weights under their checkpoint names, in an order that is the same on all ranks."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each step is a collective of all ranks; only rank 0 needs the tensor's content."""
        ...


@dataclass
class SendReport:
    """What was sent: checksum over everything, bytes, and seconds by activity (they overlap)."""

    checksum: str = ""
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"gather": 0.0, "pack": 0.0, "send": 0.0})


class Sender(Protocol):
    """A back end's sending end. All ranks call `stage` and `send`, as often and in the same order; the rest is rank 0's.

    `join`, `abort` and `stage` do nothing in a back end that has no use for them.
    """

    backend: str

    def stage(self) -> None:
        """Do what can be done before the engines are paused; optional, and void if another `stage` follows."""

    def plan(self) -> dict[str, Any]:
        """{"updates": bodies of the engines' /update_weights calls, in order}; complete once `stage` was called."""

    def open(self, world_size: int) -> tuple[str, int]:
        """Open the rendezvous of a new epoch; returns the address and port that the engines must connect to."""

    def address(self) -> tuple[str, int]: ...

    def join(self, epoch: int, world_size: int) -> None:
        """Wait for the engines of this epoch. Raises RuntimeError when they do not come."""

    def send(self) -> SendReport:
        """Send everything. Raises RuntimeError if the transfer failed or was aborted, after the gathers are over."""

    def abort(self) -> None:
        """Make a running `join` or `send` end soon; from any thread. `open` and `join` come next."""

    def close(self) -> None: ...


class Walk:
    """One walk over the source: gathers bucket after bucket and packs each into the buffer it is given."""

    def __init__(self, source: WeightSource, buckets: list[Bucket], report: SendReport):
        self._tensors, self._buckets, self.report = iter(source), iter(buckets), report
        self.checksum = group.Checksum()
        self.ready: list[tuple[Bucket, torch.Tensor | None]] = []

    def fill(self, buffer: torch.Tensor | None) -> Bucket | None:
        """Gather the next bucket and lay it out in `buffer` (uint8, None on ranks that do not send); None when there is none left."""
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        for spec in bucket.tensors:
            started = time.perf_counter()
            name, tensor = next(self._tensors)
            gathered = time.perf_counter()
            if buffer is not None:
                _place(buffer, spec, name, tensor)
            self.report.seconds["gather"] += gathered - started
            self.report.seconds["pack"] += time.perf_counter() - gathered
        if buffer is not None:
            started = time.perf_counter()
            self.checksum.add(buffer[:bucket.nbytes])
            self.report.nbytes += bucket.nbytes
            self.report.seconds["pack"] += time.perf_counter() - started
        return bucket

    def finish(self) -> None:
        """Take part in the gathers that are left."""
        while self.fill(None) is not None:
            pass
        assert next(self._tensors, None) is None, "the source yields more tensors than its metadata declares"
        self.report.checksum = self.checksum.hex()


def _place(buffer: torch.Tensor, spec: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    if name != spec.name or tuple(tensor.shape) != spec.shape:
        raise ValueError(f"the plan expects {spec.name} {list(spec.shape)}, the source gave {name} {list(tensor.shape)}")
    # one pass: device, dtype and layout change while the bytes are copied
    view(buffer, spec.dtype, spec.shape, spec.offset).copy_(tensor.detach())


def view(buffer: torch.Tensor, dtype: str, shape: tuple[int, ...] | list[int], offset: int) -> torch.Tensor:
    """The tensor that lies at `offset` in a uint8 buffer."""
    kind = getattr(torch, dtype)
    nbytes = torch.Size(shape).numel() * kind.itemsize
    return buffer[offset:offset + nbytes].view(kind).view(shape)


class BucketSender(Sender):
    """What all back ends share that send buckets: the plan, the buffers, and the two threads.

    A subclass delivers a full buffer and says what it announces.
    """

    def __init__(self, source: WeightSource, config: WeightsConfig, rank: int):
        self._source, self._config, self._rank = source, config, rank
        self._buckets: list[Bucket] = []
        self._buffers: list[torch.Tensor] = []
        self._walk: Walk | None = None
        self._aborted = threading.Event()

    def buckets(self) -> list[Bucket]:
        """The buckets of an update; the same at every update of a model."""
        if not self._buckets:
            specs = [TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in self._source.metadata()]
            self._buckets = plan_buckets(specs, self._config.bucket_bytes)
        return self._buckets

    def stage(self) -> None:
        """Gather and pack as many buckets as there are buffers: two, or for as many as weights.stage_bytes has room."""
        if self._walk is not None:
            self._walk.finish()
        walk = self._walk = Walk(self._source, self.buckets(), SendReport())
        largest = max(bucket.nbytes for bucket in self.buckets())
        depth = min(max(2, self._config.stage_bytes // largest), len(self.buckets()))
        if self._rank == 0 and not self._buffers:
            self._buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for _ in range(depth)]
        for index in range(depth):
            buffer = self._buffers[index] if self._rank == 0 else None
            walk.ready.append((walk.fill(buffer), buffer))

    def send(self) -> SendReport:
        if self._walk is None:
            self.stage()
        walk, self._walk = self._walk, None
        if self._rank == 0:
            self._pump(walk)
        else:
            walk.finish()
        return walk.report

    def _pump(self, walk: Walk) -> None:
        """Gather and pack here, deliver on a side thread; raises the transfer's error once everything is gathered."""
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for item in walk.ready:
            outgoing.put(item)
        delivered, failure = ahead(self._transmit(outgoing, walk.report), self._look), None

        def freed() -> torch.Tensor | None:
            nonlocal failure
            try:
                return next(delivered, None)
            except Exception as error:  # whatever it is, the other ranks gather on
                failure = error

        try:
            while (buffer := freed()) is not None:
                bucket = walk.fill(buffer)
                outgoing.put((bucket, buffer) if bucket else None)
            walk.finish()
        finally:
            outgoing.put(None)
        if failure is not None:
            self._buffers = []  # the side thread may still sit in a collective and read them
            raise RuntimeError(f"the transfer failed: {failure}") from failure

    def _transmit(self, outgoing: queue.SimpleQueue, report: SendReport) -> Iterator[torch.Tensor]:
        while (item := outgoing.get()) is not None:
            started = time.perf_counter()
            self._deliver(*item)
            report.seconds["send"] += time.perf_counter() - started
            yield item[1]

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        raise NotImplementedError

    def _look(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("aborted")

    def close(self) -> None:
        self._buffers = []


class GlooSender(BucketSender):
    """Broadcasts over a gloo group that rank 0 opens anew for each epoch."""

    backend = "gloo"

    def __init__(self, source: WeightSource, config: WeightsConfig, rank: int, address: str):
        super().__init__(source, config, rank)
        self._address = address
        self._store = self._group = None

    def plan(self) -> dict[str, Any]:
        # one call for all buckets: between two calls the engine would wait for HTTP and its own queues
        return {"updates": [{"buckets": [bucket.describe() for bucket in self.buckets()]}]}

    def open(self, world_size: int) -> tuple[str, int]:
        self._group = None
        self._aborted.clear()
        self._store = group.open_store(self._address, 0, world_size, True, self._config.timeout)
        return self.address()

    def address(self) -> tuple[str, int]:
        return self._address, self._store.port

    def join(self, epoch: int, world_size: int) -> None:
        group.await_ranks(self._store, epoch, world_size, self._config.timeout, self._look)
        self._group = aside(partial(group.join, self._store, epoch, 0, world_size, self._config.timeout), self._look)

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        group.broadcast(self._group, buffer[:bucket.nbytes])

    def abort(self) -> None:
        self._aborted.set()
        self._group = None
        group.abort(*self.address())

    def close(self) -> None:
        super().close()
        self._group = self._store = None


def make_sender(config: WeightsConfig, source: WeightSource, rank: int, address: str, folder: Path) -> Sender:
    """The sender of weights.backend.

    address: of rank 0, as the engines reach it; folder: on a file system that the engines share, for back ends that write.
    """
    if config.backend == "gloo":
        return GlooSender(source, config, rank, address)
    if config.backend == "files":
        from molt_hpc.weights.files import FilesSender

        return FilesSender(source, config, rank, folder)
    from molt_hpc.weights.nccl import NcclSender, SparseSender

    if config.backend == "sparse_nccl":
        return SparseSender(source, rank, address, config.bucket_bytes)
    return NcclSender(source, rank, address)
