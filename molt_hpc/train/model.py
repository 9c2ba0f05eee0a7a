"""The model under training: built by NeMo AutoModel or plain transformers, used through one class.

Masters are float32 and sharded by FSDP2; the forward pass runs in `fsdp.param_dtype`; gradients
are reduced in float32 and summed over the ranks, not averaged: the loss is already divided by the
global number of tokens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from molt_hpc.config import FsdpConfig
from molt_hpc.train.attention import CustomAttention, use_segment_attention
from molt_hpc.train.logprob import Packed, ScoringHead, pack_segments, read_scores

log = logging.getLogger(__name__)

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which an architecture changes its logits after the output layer, where the chunked head ends."""

PACKING_BOUND, PACKING_BOUND_16_BIT = 1e-3, 0.3
"""Mean change of a log-prob that rounding may cause when a segment is packed behind another one."""


@dataclass
class TrainModel:
    """A sharded model and where this rank stands in it.

    data_rank of data_size: which share of the segments this rank computes. Ranks of one
    tensor-parallel group have the same one. `custom`: AutoModel's own implementation, which does not
    notice packed segments by their positions. `attentions`: what use_segment_attention returned.
    """

    module: nn.Module
    folder: Path
    config: PretrainedConfig
    head: ScoringHead
    device: torch.device
    data_rank: int
    data_size: int
    tensor_rank: int = 0
    mesh: DeviceMesh | None = None
    custom: bool = False
    compute_dtype: torch.dtype = torch.float32
    attentions: list[CustomAttention] | None = None

    def score(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs (differentiable) and entropies (not) of the packed tokens, float32 [N] each."""
        self.head.ask(packed)
        inputs = {"input_ids": packed.token_ids, "position_ids": packed.position_ids}
        if self.custom:
            inputs["padding_mask"] = torch.zeros_like(packed.token_ids, dtype=torch.bool)
            if self.attentions is None:
                inputs["attention_mask"] = packed.block_mask()
            for attention in self.attentions or ():
                attention.layout = packed.layout
        else:
            if self.attentions is not None:
                inputs["segment_layout"] = packed.layout
            # With a cache transformers does not recognise packed segments and lets them see each other.
            inputs["use_cache"] = False
        return read_scores(self.module(**inputs).logits, self.tensor_rank)

    def reshard(self) -> None:
        """Give up gathered parameters. A forward pass without a backward pass leaves some, seen as plain tensors."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters once each (tied ones under their first name), names without wrappers' parts."""
        return [(clean_name(name), parameter) for name, parameter in self.module.named_parameters()]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that belong to the state dict."""
        found = []
        for prefix, module in self.module.named_modules():
            found += [(clean_name(f"{prefix}.{name}" if prefix else name), buffer) for name, buffer in module._buffers.items()
                      if buffer is not None and name not in module._non_persistent_buffers_set]
        return found

    def finish_gradients(self) -> None:
        """Sum what tensor-parallel replicas computed in parts; call once after the last micro-batch."""
        if self.mesh is not None and "tp" in self.mesh.mesh_dim_names and self.mesh["tp"].size() > 1:
            from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients

            synchronize_tp_replica_gradients([self.module], self.mesh)


def clean_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def training_device() -> torch.device:
    """This rank's GPU, or the CPU on a machine without."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_model(folder: str | Path, backend: str, fsdp: FsdpConfig, gradient_checkpoint: bool,
                master_dtype: torch.dtype = torch.float32) -> TrainModel:
    """Load a Hugging Face folder and shard it over all ranks; torch.distributed must be initialised.

    Raises ValueError if the folder holds no causal language model or one that cannot be trained here.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    config = AutoConfig.from_pretrained(folder)
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{folder}: {config.model_type} changes its logits by {name}, which the trainer does not reproduce")
    transformers_logging.disable_progress_bar()
    device = training_device()
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=master_dtype)
    if backend == "automodel":
        from molt_hpc.train.automodel import build

        module, mesh, custom = build(folder, fsdp, policy, gradient_checkpoint, master_dtype)
    else:
        module, mesh, custom = _build_transformers(folder, fsdp, gradient_checkpoint, master_dtype), None, False
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        # AutoModel leaves a single rank unsharded; without FSDP param_dtype would have no effect.
        _shard(module, policy, device)
    _silence_randomness(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # gloo and NCCL both sum; a factor of 1 alone would ask for a scaled sum, which gloo has not
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
    rank, tensor = dist.get_rank(), fsdp.tp_size
    model = TrainModel(module, folder, config, ScoringHead(module.get_output_embeddings()), device, rank // tensor,
                       dist.get_world_size() // tensor, rank % tensor, mesh, custom, policy.param_dtype,
                       use_segment_attention(module))
    check_packing(model)
    log.info("%s: %.1f M parameters, %s, %d data ranks x %d tensor ranks on %s", folder.name,
             sum(p.numel() for _, p in model.named_parameters()) / 1e6, backend, model.data_size, tensor, device)
    return model


def check_packing(model: TrainModel) -> None:
    """Score a segment alone and behind another one; ValueError if the other one is noticed.

    Architectures with state beyond attention (state-space, linear attention) may let packed segments
    see each other without an error, and training would be quietly wrong.
    """
    rng = np.random.default_rng(0)
    vocabulary = model.head.layer.weight.shape[0]
    segments = [rng.integers(0, vocabulary, length) for length in (24, 40)]
    masks = [np.arange(len(ids)) > 0 for ids in segments]
    with torch.no_grad():
        together, _ = model.score(pack_segments(segments, masks, [1.0, 1.0], model.device))
        alone, _ = model.score(pack_segments(segments[1:], masks[1:], [1.0], model.device))
    model.reshard()
    difference = (together[-len(alone):] - alone).abs().mean().item()
    bound = PACKING_BOUND if model.compute_dtype.itemsize >= 4 else PACKING_BOUND_16_BIT
    if not difference <= bound:
        raise ValueError(f"{model.folder}: {model.config.model_type} does not keep packed segments apart: the log-probs of one change by "
                         f"{difference:.2g} behind another one (at most {bound:g} expected); it cannot be trained here")


def _build_transformers(folder: Path, fsdp: FsdpConfig, gradient_checkpoint: bool, master_dtype: torch.dtype) -> nn.Module:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=master_dtype, attn_implementation=fsdp.attn_implementation)
    module.config.use_cache = False
    module.train()
    if gradient_checkpoint:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def _shard(module: nn.Module, policy: MixedPrecisionPolicy, device: torch.device) -> None:
    """FSDP2 over all ranks: one unit for each decoder layer, and the root with the embeddings and the output layer."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    blocks = set(getattr(module, "_no_split_modules", None) or ())
    for layer in [part for part in module.modules() if type(part).__name__ in blocks]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _silence_randomness(module: nn.Module) -> None:
    """Dropout would make the ratio of two passes over the same weights differ from 1."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0
