"""Building the model with NeMo AutoModel: FSDP2 with tensor and expert parallelism.

AutoModel's builders ask for the current CUDA device by name. On a machine without CUDA exactly those
modules get a stand-in for `torch` that answers with the CPU, so that the same code path trains
tiny models in tests.
"""

import contextlib
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from molt_hpc.config import FsdpConfig

CPU = torch.device("cpu")


class _CpuInsteadOfCuda:
    """torch.cuda whose current device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return CPU


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceType):
    """torch.device that understands the two ways in which the builders name the current device."""

    def __new__(cls, *arguments: Any, **options: Any) -> torch.device:
        if arguments[-1:] == (CPU,) or arguments == ("cuda:cpu",):
            return CPU
        return torch.device(*arguments, **options)


class _TorchOnCpu:
    cuda = _CpuInsteadOfCuda()
    device = _Device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def allow_cpu(model_type: str) -> None:
    """Let AutoModel's builders and the custom files of one model type run without CUDA; does nothing with CUDA."""
    if torch.cuda.is_available():
        return
    names = ["nemo_automodel._transformers.auto_model", "nemo_automodel._transformers.model_init"]
    package = f"nemo_automodel.components.models.{model_type}"
    with contextlib.suppress(ModuleNotFoundError):  # it has no files of its own for this type
        folder = importlib.import_module(package).__path__
        names += [f"{package}.{module.name}" for module in pkgutil.iter_modules(folder)]
    for name in names:
        importlib.import_module(name).torch = _TorchOnCpu()


def build(folder: Path, fsdp: FsdpConfig, policy: MixedPrecisionPolicy, offload: OffloadPolicy, gradient_checkpoint: str,
          master_dtype: torch.dtype) -> tuple[nn.Module, DeviceMesh, bool]:
    """Returns the sharded module, the device mesh, and whether it is AutoModel's own implementation of the architecture."""
    from nemo_automodel import NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config, MoEParallelizerConfig
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from transformers import AutoConfig, PreTrainedModel

    config = AutoConfig.from_pretrained(folder)
    allow_cpu(config.model_type)
    experts, recompute = fsdp.ep_size > 1, gradient_checkpoint != "none" and gradient_checkpoint
    offload_policy = offload if isinstance(offload, CPUOffloadPolicy) else None
    setup = DistributedSetup.build(
        FSDP2Config(mp_policy=policy, offload_policy=offload_policy, activation_checkpointing=recompute),
        ParallelismSizes(tp_size=fsdp.tp_size, ep_size=fsdp.ep_size),
        moe_parallel_config=MoEParallelizerConfig(mp_policy=policy) if experts else None,
        activation_checkpointing=recompute)
    options: dict[str, Any] = {}
    if getattr(config, "router_aux_loss_coef", None):
        # The load-balancing loss would be added to gradients behind the back of the policy loss.
        options["router_aux_loss_coef"] = 0.0
    kind = NeMoAutoModelForImageTextToText if hasattr(config, "vision_config") else NeMoAutoModelForCausalLM
    module = kind.from_pretrained(
        str(folder), distributed_setup=setup, dtype=str(master_dtype).removeprefix("torch."),
        attn_implementation=fsdp.attn_implementation, use_liger_kernel=False, **options)
    module.config.use_cache = False
    module.train()
    return module, setup.mesh_context.device_mesh, not isinstance(module, PreTrainedModel)
