"""The receiving end inside vLLM: the `gloo` weight-transfer back end and its report.

vLLM loads this through the `vllm.general_plugins` entry point and, for `WeightReport`, through
--worker-extension-cls; vLLM itself is not changed. The checksum is taken over the bytes as they arrive: on CPU
the loaded parameters are repacked, and vLLM's own weight checker then hashes empty tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from molt_hpc.weights import group


@dataclass(kw_only=True)
class GlooInit(WeightTransferInitInfo):
    """How to join the transfer group of one epoch; `rank_offset` is the rank of this server's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    timeout: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """One bucket: its size in bytes and [name, dtype, shape, offset] of each tensor in it."""

    nbytes: int
    tensors: list[list[Any]] = field(default_factory=list)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Receives buckets by gloo broadcast and loads them as a checkpoint."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store = self.group = None
        self.report: dict[str, Any] = {}

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self.shutdown()
        self.store = group.open_store(init_info.master_address, init_info.master_port, init_info.world_size, False, init_info.timeout)
        self.group = group.join(self.store, init_info.epoch, rank, init_info.world_size, init_info.timeout)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.report = {"checksum": 0, "nbytes": 0, "tensors": 0}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self.group is None:
            raise RuntimeError("the transfer group was never joined: init_weight_transfer_engine comes first")
        buffer = torch.empty(update_info.nbytes, dtype=torch.uint8)
        group.broadcast(self.group, buffer)
        self.report["checksum"] = group.checksum(buffer, self.report["checksum"])
        self.report["nbytes"] += update_info.nbytes
        self.report["tensors"] += len(update_info.tensors)
        self.model.load_weights([(name, _view(buffer, dtype, shape, offset).to(self.device))
                                 for name, dtype, shape, offset in update_info.tensors])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_for_cpu(self.model)

    def shutdown(self) -> None:
        self.group = self.store = None


def _view(buffer: torch.Tensor, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    nbytes = torch.Size(shape).numel() * kind.itemsize
    return buffer[offset:offset + nbytes].view(kind).view(shape)


def _repack_for_cpu(model: torch.nn.Module) -> None:
    """Redo what vLLM 0.32's CPU build leaves out of a reload.

    It repacks MoE experts only on the first load, and the packed weights of a tied lm_head are never made
    again; both would go on serving old weights without an error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
        if isinstance(module, ParallelLMHead) and method is not None:
            method.process_weights_after_loading(module)


class WeightReport:
    """Adds one method to vLLM's workers, called through /collective_rpc."""

    def molt_hpc_weight_report(self) -> dict[str, Any]:
        """{checksum, nbytes, tensors} of the last update; empty if the back end keeps no report."""
        return dict(getattr(self.weight_transfer_engine, "report", {}))


def register() -> None:
    """Entry point: make `gloo` known to vLLM's factory; called once in every vLLM process."""
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
