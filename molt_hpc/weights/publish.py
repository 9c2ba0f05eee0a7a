"""The sending end on the training ranks: gather a bucket, send it, go on to the next.

Every rank runs `send` and takes part in each gather; rank 0 alone is in the transfer group. The broker
conducts the engines: it has told them to receive before `send` is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from molt_hpc.weights import group
from molt_hpc.weights.plan import Bucket, TensorSpec, plan_buckets


class WeightSource(Protocol):
    """A model's weights under their checkpoint names, in an order that is the same on all ranks."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each step is a collective of all ranks; only rank 0 needs the tensor's content."""
        ...


@dataclass
class SendReport:
    """What was sent: CRC-32 over all buckets, bytes, and seconds by activity."""

    checksum: str = ""
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class GlooSender:
    """Sends over a gloo group that rank 0 opens anew for each epoch."""

    backend = "gloo"

    def __init__(self, source: WeightSource, bucket_bytes: int, rank: int, address: str, timeout: float):
        self._source, self._bucket_bytes, self._rank = source, bucket_bytes, rank
        self._address, self._timeout = address, timeout
        self._store = self._group = None
        self._buckets: list[Bucket] = []

    def plan(self) -> list[Bucket]:
        """The buckets of an update; the same at every update of a model."""
        if not self._buckets:
            specs = [TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in self._source.metadata()]
            self._buckets = plan_buckets(specs, self._bucket_bytes)
        return self._buckets

    def open(self, world_size: int) -> tuple[str, int]:
        """Rank 0: open the store of a new epoch; returns the address that the engines must connect to."""
        self._group = None
        self._store = group.open_store(self._address, 0, world_size, True, self._timeout)
        return self._address, self._store.port

    def address(self) -> tuple[str, int]:
        return self._address, self._store.port

    def join(self, epoch: int, world_size: int) -> None:
        """Rank 0: wait for the engines of this epoch to join."""
        self._group = group.join(self._store, epoch, 0, world_size, self._timeout)

    def send(self) -> SendReport:
        """Gather and send every bucket. On ranks other than 0 only the gathers happen."""
        report, crc, tensors = SendReport(seconds={"gather": 0.0, "pack": 0.0, "send": 0.0}), 0, iter(self._source)
        for bucket in self.plan():
            started = time.perf_counter()
            parts = [next(tensors) for _ in bucket.tensors]
            report.seconds["gather"] += time.perf_counter() - started
            if self._rank == 0:
                crc = self._send_bucket(bucket, parts, crc, report)
        assert next(tensors, None) is None, "the source yields more tensors than its metadata declares"
        report.checksum = f"{crc:08x}"
        return report

    def _send_bucket(self, bucket: Bucket, parts: Iterable[tuple[str, torch.Tensor]], crc: int, report: SendReport) -> int:
        started = time.perf_counter()
        buffer = pack(bucket, parts)
        crc = group.checksum(buffer, crc)
        packed = time.perf_counter()
        group.broadcast(self._group, buffer)
        report.nbytes += bucket.nbytes
        report.seconds["pack"] += packed - started
        report.seconds["send"] += time.perf_counter() - packed
        return crc

    def close(self) -> None:
        self._group = self._store = None


def pack(bucket: Bucket, parts: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Lay tensors out in one uint8 buffer, converted to the dtypes of the plan."""
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for spec, (name, tensor) in zip(bucket.tensors, parts, strict=True):
        if name != spec.name or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"the plan expects {spec.name} {list(spec.shape)}, the source gave {name} {list(tensor.shape)}")
        target = buffer[spec.offset:spec.offset + spec.nbytes]
        target.copy_(tensor.detach().to("cpu", getattr(torch, spec.dtype)).contiguous().view(-1).view(torch.uint8))
    return buffer


class NcclSender:
    """Sends with vLLM's own nccl back end; its control calls are left to the broker.

    Runs only on GPUs. vLLM packs into its own buffers, so the plan is one bucket that lists every tensor.
    """

    backend = "nccl"

    def __init__(self, source: WeightSource, rank: int, address: str):
        self._source, self._rank, self._address, self._port = _as_vllm_source(source), rank, address, 0
        self._engine: Any = None

    def plan(self) -> list[Bucket]:
        specs = [TensorSpec(m.name, str(m.dtype).removeprefix("torch."), tuple(m.shape)) for m in self._source.metadata()]
        return plan_buckets(specs, 1 << 62)

    def open(self, world_size: int) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        self._port = get_open_port()
        return self.address()

    def address(self) -> tuple[str, int]:
        return self._address, self._port

    def join(self, epoch: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(self._address, self._port, world_size, rank=self._rank)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=ConductedByBroker(), source=self._source)

    def send(self) -> SendReport:
        started = time.perf_counter()
        if self._engine is None:  # ranks other than 0 only take part in the gathers
            for _ in self._source:
                pass
        else:
            self._engine.send_weights()
        nbytes = sum(bucket.nbytes for bucket in self.plan())
        return SendReport("unattested", nbytes, {"send": time.perf_counter() - started})

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


class ConductedByBroker:
    """vLLM's trainer side asks its client to call the engines; here the rollout workers have been told to."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Called on the engines by their worker."""

    def start_weight_update(self) -> None:
        """Called on the engines by their worker."""

    def update_weights(self, update_info: Any) -> None:
        """Called on the engines by their worker."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Called on the engines by their worker."""


def _as_vllm_source(source: WeightSource) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.base import WeightSource as VllmSource

    class Adapted(VllmSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in source.metadata()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source)

    return Adapted()


def make_sender(backend: str, source: WeightSource, rank: int, address: str, bucket_bytes: int, timeout: float) -> GlooSender | NcclSender:
    """The sender of config.weights.backend."""
    if backend == "gloo":
        return GlooSender(source, bucket_bytes, rank, address, timeout)
    return NcclSender(source, rank, address)
