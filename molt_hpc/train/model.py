"""The model under training: built by NeMo AutoModel or plain transformers, used through one class.

Masters are float32 and sharded by FSDP2; the forward pass runs in `fsdp.param_dtype`; gradients
are reduced in float32 and summed over the ranks, not averaged: the loss is already divided by the
global number of tokens.
"""

import logging
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.utils import logging as transformers_logging

from molt_hpc.config import FsdpConfig, LoraConfig, comma_list
from molt_hpc.data.media import image_reader
from molt_hpc.train.attention import CustomAttention, use_segment_attention
from molt_hpc.train.logprob import Packed, ScoringHead, ValueHead, pack_segments, read_scores
from molt_hpc.train.routing import Router, follow
from molt_hpc.train.vision import Vision

log = logging.getLogger(__name__)

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which an architecture changes its logits after the output layer, where the chunked head ends."""

KEPT_OPERATIONS = ("aten.mm.", "aten.addmm.", "aten._scaled_dot_product", "aten._grouped_mm", "flash_attn")
"""Starts of the operators whose results selective recomputation keeps; what lies between them is cheap to compute again."""

PACKING_BOUND, PACKING_BOUND_16_BIT = 1e-3, 0.3
"""Mean change of a log-prob that rounding may cause when a segment is packed behind another one."""


@dataclass
class TrainModel:
    """A sharded model and where this rank stands in it.

    data_rank of data_size: which share of the segments this rank computes. Ranks of one
    tensor-parallel group have the same one. `custom`: AutoModel's own implementation, which does not
    notice packed segments by their positions. `attentions`: what use_segment_attention returned. `routers`: those
    that choose what the engine chose.
    """

    module: nn.Module
    folder: Path
    config: PretrainedConfig
    head: ScoringHead | ValueHead
    device: torch.device
    data_rank: int
    data_size: int
    tensor_rank: int = 0
    mesh: DeviceMesh | None = None
    custom: bool = False
    compute_dtype: torch.dtype = torch.float32
    attentions: list[CustomAttention] | None = None
    defer_grad_sync: bool = False
    lora_scale: float = 0.0
    vision: Vision | None = None
    routers: list[Router] = field(default_factory=list)

    @property
    def score_dtype(self) -> torch.dtype:
        return torch.promote_types(self.compute_dtype, torch.float32)

    def score(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies (differentiable if the head is told so) of the packed tokens, float32 [N]; of a critic values, and 0."""
        if packed.images and self.vision is None:
            raise ValueError(f"{self.folder}: the batch has images, which {self.config.model_type} does not see here (Qwen-VL's kind does)")
        packed = self.vision.complete(packed) if self.vision else packed
        self.head.ask(packed)
        follow(self.routers, packed.routed, packed.token_ids.shape[1])
        inputs = {"input_ids": packed.token_ids, "position_ids": packed.position_ids} | (self.vision.inputs(packed) if self.vision else {})
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
        for part in fsdp_parts(self.module):
            part.reshard()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters once each (tied ones under their first name), names without wrappers' parts."""
        found = [(clean_name(name), parameter) for name, parameter in self.module.named_parameters()]
        return found + ([(f"value_head.{name}", p) for name, p in self.head.named_parameters()] if isinstance(self.head, ValueHead) else [])

    def base_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the model as it was loaded, without adapters; `merged` adds what these have learned."""
        return [(name.replace(".base_layer.", "."), p) for name, p in self.named_parameters() if ".lora_" not in name]

    @cached_property
    def adapters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Base parameter -> the factors [rank, in] and [out, rank] of its adapter, whose product is added lora_scale times."""
        every = dict(self.named_parameters()) if self.lora_scale else {}
        return {name.replace("lora_A.default.", ""): (down, every[name.replace(".lora_A.", ".lora_B.")])
                for name, down in every.items() if ".lora_A." in name}

    def merged(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """A whole base parameter with its adapter's product added; a collective for those that have one."""
        if name not in self.adapters:
            return full
        down, up = map(whole, self.adapters[name])
        return full + self.lora_scale * (up @ down)

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that belong to the state dict."""
        found = []
        for prefix, module in self.module.named_modules():
            found += [(clean_name(f"{prefix}.{name}" if prefix else name), buffer) for name, buffer in module._buffers.items()
                      if buffer is not None and name not in module._non_persistent_buffers_set]
        return found

    def reduce_gradients(self, last: bool) -> None:
        """Say before a micro-batch whether it is the step's last: with deferred reduction the others only add up on this rank."""
        if self.defer_grad_sync:
            for part in fsdp_parts(self.module):
                part.set_requires_gradient_sync(last, recurse=False)

    def finish_gradients(self) -> None:
        """Sum what replicas computed in parts; call once after the last micro-batch."""
        for parameter in self.head.parameters() if isinstance(self.head, ValueHead) else ():
            dist.all_reduce(parameter.grad)
            parameter.grad *= self.data_size / dist.get_world_size()  # tensor-parallel ranks have computed the same
        if self.mesh is not None and "tp" in self.mesh.mesh_dim_names and self.mesh["tp"].size() > 1:
            from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients

            synchronize_tp_replica_gradients([self.module], self.mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's value on every rank; a collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fsdp_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def clean_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def training_device() -> torch.device:
    """This rank's GPU, or the CPU on a machine without."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_model(folder: str | Path, backend: str, fsdp: FsdpConfig, gradient_checkpoint: str = "none",
                master_dtype: torch.dtype | None = None, value_seed: int | None = None, frozen: str | None = None,
                lora: LoraConfig | None = None, run: str | Path = "") -> TrainModel:
    """Load a Hugging Face folder and shard it over all ranks; torch.distributed must be initialised.

    master_dtype: of the sharded weights, None for float32. value_seed: build a critic, with a head from this seed.
    frozen: pattern of the names of parameters that keep their values (".*": a reference). lora: adapters to train instead
    of the weights (backend transformers). run: the folder that has the batches' images. Raises ValueError if the folder holds no
    causal language model or one that cannot be trained here.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    config, reader = AutoConfig.from_pretrained(folder), image_reader(folder, run)
    for name in LOGIT_CHANGES:
        if getattr(config.get_text_config(), name, None) not in (None, 1, 1.0):
            raise ValueError(f"{folder}: {config.model_type} changes its logits by {name}, which the trainer does not reproduce")
    transformers_logging.disable_progress_bar()
    device, compute_dtype = training_device(), getattr(torch, fsdp.param_dtype)
    master_dtype = master_dtype or torch.promote_types(compute_dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    # pinned memory needs CUDA; without it the policy only names where the shards already are
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if fsdp.offload == "full" else OffloadPolicy()
    if backend == "automodel":
        from molt_hpc.train.automodel import build

        module, mesh, custom = build(folder, fsdp, policy, offload, gradient_checkpoint, master_dtype)
    else:
        module, mesh, custom = _build_transformers(folder, fsdp, gradient_checkpoint, master_dtype), None, False
    if lora and lora.rank:
        _add_adapters(module, lora)
    if frozen:
        _freeze(module, frozen, folder)
    if value_seed is not None and module.get_output_embeddings().weight is not module.get_input_embeddings().weight:
        module.get_output_embeddings().weight.requires_grad_(False)  # nothing will use it
    if not fsdp_parts(module):
        # AutoModel leaves a single rank unsharded; without FSDP param_dtype would have no effect.
        _shard(module, policy, offload, device)
    _silence_randomness(module)
    for part in fsdp_parts(module):
        # gloo and NCCL both sum; a factor of 1 alone would ask for a scaled sum, which gloo has not
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    rank, tensor, output = dist.get_rank(), fsdp.tp_size, module.get_output_embeddings()
    head = ScoringHead(output) if value_seed is None else ValueHead(
        output, config.get_text_config().hidden_size, getattr(config, "initializer_range", 0.02), value_seed, master_dtype, device)
    vision = Vision(module, reader) if reader and hasattr(module.model, "get_rope_index") else None
    model = TrainModel(module, folder, config, head, device, rank // tensor, dist.get_world_size() // tensor, rank % tensor, mesh, custom,
                       compute_dtype, use_segment_attention(module), fsdp.defer_grad_sync,
                       lora.alpha / lora.rank if lora and lora.rank else 0.0, vision)
    check_packing(model)
    log.info("%s: %.1f M parameters, %s, %d data ranks x %d tensor ranks on %s", folder.name,
             sum(p.numel() for _, p in model.named_parameters()) / 1e6, backend, model.data_size, tensor, device)
    return model


def _add_adapters(module: nn.Module, lora: LoraConfig) -> None:
    """Put peft's adapters around linear layers; every rank draws the same ones, and they are all that has a gradient."""
    try:
        import peft
    except ImportError:
        raise ValueError("actor.lora: the package peft is not installed: pip install peft") from None
    names = comma_list(lora.target_modules)
    peft.inject_adapter_in_model(peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha,
                                                 target_modules=names[0] if names == ["all-linear"] else names), module)


def _freeze(module: nn.Module, pattern: str, folder: Path) -> None:
    """Take the parameters whose names match out of the training; ValueError if none does."""
    chosen = [parameter for name, parameter in module.named_parameters() if re.search(pattern, clean_name(name))]
    if not chosen:
        raise ValueError(f"{folder}: no parameter matches {pattern!r}; is actor.freeze_moe_router set for a model without routers?")
    for parameter in chosen:
        parameter.requires_grad_(False)


def check_packing(model: TrainModel) -> None:
    """Score a segment alone and behind another one; ValueError if the other one is noticed.

    Architectures with state beyond attention (state-space, linear attention) may let packed segments
    see each other without an error, and training would be quietly wrong.
    """
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    segments = [rng.integers(0, vocabulary, length) for length in (24, 40)]
    if model.vision:
        segments = [np.where(ids == model.vision.reader.token_id, 0, ids) for ids in segments]
    masks = [np.arange(len(ids)) > 0 for ids in segments]
    images = [[], []] if model.vision else None  # the stand-in of a vision-language model is then a third segment
    with torch.no_grad():
        together, _ = model.score(pack_segments(segments, masks, [1.0, 1.0], model.device, images))
        alone, _ = model.score(pack_segments(segments[1:], masks[1:], [1.0], model.device))
    model.reshard()
    difference = (together[-len(alone):] - alone).abs().mean().item()
    bound = PACKING_BOUND if model.compute_dtype.itemsize >= 4 else PACKING_BOUND_16_BIT
    if not difference <= bound:
        raise ValueError(f"{model.folder}: {model.config.model_type} does not keep packed segments apart: the log-probs of one change by "
                         f"{difference:.2g} behind another one (at most {bound:g} expected); it cannot be trained here")


def _build_transformers(folder: Path, fsdp: FsdpConfig, gradient_checkpoint: str, master_dtype: torch.dtype) -> nn.Module:
    kind = AutoModelForImageTextToText if hasattr(AutoConfig.from_pretrained(folder), "vision_config") else AutoModelForCausalLM
    module = kind.from_pretrained(folder, dtype=master_dtype, attn_implementation=fsdp.attn_implementation)
    module.config.use_cache = False
    module.train()
    if gradient_checkpoint != "none":
        selective = {"context_fn": _selective_contexts} if gradient_checkpoint == "selective" else {}
        module.gradient_checkpointing_enable({"use_reentrant": False, **selective})
    return module


def _selective_contexts() -> tuple[Any, Any]:
    def decide(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        keep = str(operation).startswith(KEPT_OPERATIONS)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _shard(module: nn.Module, policy: MixedPrecisionPolicy, offload: OffloadPolicy, device: torch.device) -> None:
    """FSDP2 over all ranks: one unit for each decoder layer, and the root with the embeddings and the output layer."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    blocks = set(getattr(module, "_no_split_modules", None) or ())
    for layer in [part for part in module.modules() if type(part).__name__ in blocks]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _silence_randomness(module: nn.Module) -> None:
    """Dropout would make the ratio of two passes over the same weights differ from 1."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0
