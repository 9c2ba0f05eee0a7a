"""The sending ends over NCCL: vLLM's own transfers, dense and sparse, whose control calls are left to the broker. GPUs only.

The dense one packs into vLLM's buffers and overlaps them with the broadcast. The sparse one sends the elements that differ from what the
engines hold: after a step with a small learning rate few values of 16 bits do. What arrives is attested by fingerprints that
both ends compute on their devices.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from molt_hpc.weights.group import Fingerprints
from molt_hpc.weights.publish import Sender, SendReport, WeightSource


class ConductedByBroker:
    """vLLM's trainer side asks its client to call the engines; here the rollout workers have been told to."""

    def nothing(self, *_: Any, **__: Any) -> None:
        """Called on the engines by their worker."""

    init_weight_transfer_engine = start_weight_update = update_weights = finish_weight_update = nothing


class Rendezvous(Sender):
    """Rank 0's port, and vLLM's trainer-side engine, which joins the group of an epoch when it is made."""

    def __init__(self, source: WeightSource, rank: int, address: str):
        self._source, self._rank, self._address, self._port = source, rank, address, 0
        self._engine: Any = None

    def open(self, world_size: int) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        self._port = get_open_port()
        return self.address()

    def address(self) -> tuple[str, int]:
        return self._address, self._port

    def abort(self) -> None:
        """Destroy the communicator under a stuck transfer."""
        self.close()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


class NcclSender(Rendezvous):
    """Sends all weights with vLLM's nccl back end."""

    backend = "nccl"

    def __init__(self, source: WeightSource, rank: int, address: str):
        super().__init__(source, rank, address)
        self._fingerprints = Fingerprints()
        self._walk: Iterator[tuple[str, torch.Tensor]] = iter(())

    def plan(self) -> dict[str, Any]:
        rows = self._source.metadata()
        return {"updates": [{"names": [name for name, _, _ in rows], "dtype_names": [str(d).removeprefix("torch.") for _, d, _ in rows],
                             "shapes": [list(shape) for _, _, shape in rows]}]}

    def join(self, epoch: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self.close()
        info = NCCLTrainerInitInfo(self._address, self._port, world_size, rank=self._rank)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=ConductedByBroker(), source=self)

    def send(self) -> SendReport:
        started = time.perf_counter()
        self._fingerprints, self._walk = Fingerprints(), self._attested()
        if self._rank != 0:
            for _ in self._source:
                pass
            return SendReport()
        try:
            if self._engine is None:
                raise RuntimeError("aborted")
            self._engine.send_weights()
        except RuntimeError as error:
            for _ in self._walk:  # the other ranks gather on
                pass
            raise RuntimeError(f"the transfer failed: {error}") from error
        return SendReport(self._fingerprints.hex(), self._fingerprints.nbytes, {"send": time.perf_counter() - started})

    def _attested(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            self._fingerprints.add(name, tensor)
            yield name, tensor

    def metadata(self) -> list[Any]:
        """What vLLM's sender asks of its source of weights, as which it takes this one; and `__iter__`."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._walk


class SparseSender(Rendezvous):
    """Sends with vLLM's sparse_nccl back end; to engines that have just joined, whose weights nobody knows, all elements.

    Rank 0 holds a copy of the weights in host memory, in the dtypes that are served.
    """

    backend = "sparse_nccl"

    def __init__(self, source: WeightSource, rank: int, address: str, chunk_bytes: int):
        super().__init__(source, rank, address)
        self._chunk_bytes = chunk_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._changed: dict[str, torch.Tensor | None] = {}
        self._staged = False

    def stage(self) -> None:
        """Gather everything, and find the elements that differ from what was sent last (indices; None: all)."""
        for name, tensor in self._source:
            if self._rank != 0:
                continue
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {name} has dtype {tensor.dtype}: weights.backend sparse_nccl carries floating-point tensors only")
            now, before = tensor.detach().to("cpu", copy=True), self._held.get(name)
            if before is not None:
                # an earlier stage may have been for nothing: what it found has not been sent
                fresh = (_bits(now) != _bits(before)).nonzero().flatten().int()
                earlier = self._changed.get(name, fresh[:0])
                self._changed[name] = None if earlier is None else torch.cat([earlier, fresh]).unique()
            else:
                self._changed[name] = None
            self._held[name] = now
        self._staged = True

    def chunks(self) -> list[list[tuple[str, int]]]:
        """(name, number of elements) of all patches, in chunks that carry about chunk_bytes."""
        chunks: list[list[tuple[str, int]]] = []
        size = self._chunk_bytes
        for name, indices in self._changed.items():
            count = self._held[name].numel() if indices is None else len(indices)
            if not count:
                continue
            nbytes = count * (4 + self._held[name].itemsize)
            if size + nbytes > self._chunk_bytes:
                chunks.append([])
                size = 0
            chunks[-1].append((name, count))
            size += nbytes
        return chunks

    def patch(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int32 [N]) into the flat tensor and the values that belong there."""
        indices = self._changed[name]
        flat = self._held[name].flatten()
        return (torch.arange(len(flat), dtype=torch.int32), flat) if indices is None else (indices, flat[indices])

    def plan(self) -> dict[str, Any]:
        return {"updates": [{"names": [name for name, _ in chunk],
                             "dtype_names": [str(self._held[name].dtype).removeprefix("torch.") for name, _ in chunk],
                             "shapes": [list(self._held[name].shape) for name, _ in chunk],
                             "num_updates_list": [count for _, count in chunk]} for chunk in self.chunks()]}

    def open(self, world_size: int) -> tuple[str, int]:
        self._changed = dict.fromkeys(self._held)
        return super().open(world_size)

    def join(self, epoch: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo, SparseNCCLTrainerWeightTransferEngine

        self.close()
        info = SparseNCCLTrainerInitInfo(self._address, self._port, world_size, rank=self._rank)
        self._engine = SparseNCCLTrainerWeightTransferEngine.trainer_init(info, client=ConductedByBroker())

    def send(self) -> SendReport:
        if not self._staged:
            self.stage()
        self._staged = False
        if self._rank != 0:
            return SendReport()
        started, fingerprints = time.perf_counter(), Fingerprints()
        try:
            self._send(fingerprints)
        except RuntimeError as error:
            raise RuntimeError(f"the transfer failed: {error}") from error
        self._changed = {name: tensor.new_empty(0, dtype=torch.int32) for name, tensor in self._held.items()}
        return SendReport(fingerprints.hex(), fingerprints.nbytes, {"send": time.perf_counter() - started})

    def _send(self, fingerprints: Fingerprints) -> None:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        if self._engine is None:
            raise RuntimeError("aborted")
        for chunk in self.chunks():
            patches = []
            for name, _ in chunk:
                indices, values = (part.cuda() for part in self.patch(name))
                fingerprints.add(f"{name} indices", indices)
                fingerprints.add(f"{name} values", values)
                patches.append(SparseWeightPatch(name, indices, values, tuple(self._held[name].shape)))
            self._engine.send_weight_chunk(patches)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as integers: two zeros or two NaNs differ if their bits do."""
    return tensor.flatten().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
