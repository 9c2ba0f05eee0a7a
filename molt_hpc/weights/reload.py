"""One weight update of a vLLM model: its layer-wise reload, repeatable after a failure and with an account of what was loaded.

vLLM's loaders skip some names without a word (biases, rotary tables, aliases of tied weights), and a layer of which
a part never came keeps whatever was there. So every tensor's way is learned once, from what the model's `load_weights` says
it filled, and every layer's elements are counted before the update may be finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


class Reload:
    """The updates of one model; `start`, `load` any number of times, `missing`, `finish`."""

    def __init__(self) -> None:
        self.fills: dict[str, frozenset[str]] = {}
        """Tensor name -> the model's parameters that it fills on this rank, as learned when it first came."""
        self._aliases: set[str] = set()
        self._touched: set[str] = set()

    def start(self, model: nn.Module) -> None:
        """Begin an update. What an update that failed had begun is undone first, as far as the layer-wise reload holds it."""
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        self._aliases = set(_names(model, remove_duplicate=False)) - set(_names(model, remove_duplicate=True))
        self._touched = set()
        initialize_layerwise_reload(model)

    def load(self, model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the model's loaders; the ones that never came before one by one, to learn what each fills."""
        with disable_mtp_completeness_check():
            known = []
            for name, tensor in tensors:
                if name in self.fills:
                    known.append((name, tensor))
                else:
                    self.fills[name] = frozenset(model.load_weights([(name, tensor)]) or ())
            if known:
                model.load_weights(known)
        self._touched |= {layer_of(parameter) for name, _ in tensors for parameter in self.fills[name]}

    def skipped(self, names: Iterable[str]) -> list[str]:
        """Tensors that fill nothing on this rank."""
        return [name for name in names if not self.fills.get(name)]

    def missing(self, model: nn.Module, unchanged_allowed: bool = False) -> list[str]:
        """Parameters that the update has not filled, or not all of; call before `finish`.

        unchanged_allowed: layers of which nothing came are meant to stay as they are.
        """
        found = []
        for path, layer in model.named_modules():
            info = get_layerwise_info(layer)
            parameters = {name: p for name, p in layer.named_parameters(recurse=False) if f"{path}.{name}" not in self._aliases}
            if not info.can_load() or not parameters or is_deferred_attention_layer(layer) or (unchanged_allowed and not info.load_numel):
                continue
            wanted = sum(get_tensor_load_numel(p) for p in parameters.values()) - _padding(layer)
            if info.load_numel < wanted:
                found.append(f"{path}.{{{','.join(parameters)}}} ({info.load_numel} of {wanted} elements)")
        return found

    def finish(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        finalize_layerwise_reload(model, model_config)
        if device.type == "cpu":
            repack_for_cpu(model, self._touched, self._aliases)

    def keep_pending(self, model: nn.Module, buffer: torch.Tensor) -> None:
        """Copy what layers that are not complete yet still hold of `buffer`, so that it can be reused."""
        storage = buffer.untyped_storage().data_ptr()
        for layer in model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == storage:
                        bound.arguments[key] = value.clone()


def _names(model: nn.Module, remove_duplicate: bool) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=remove_duplicate)]


def _padding(layer: nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint fills."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices.num_org_elements
    return max(0, layer.num_embeddings_per_partition - rows) * layer.embedding_dim


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def repack_for_cpu(model: nn.Module, touched: set[str], aliases: set[str]) -> None:
    """Redo what vLLM 0.32's CPU build leaves out of a reload.

    It repacks MoE experts only on the first load, and the packed weights of a tied lm_head are never made
    again; both would go on serving old weights without an error. touched: layers that the update has loaded.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and path in touched:
            kernel.fused_experts.process_weights_after_loading(module)
        if isinstance(module, ParallelLMHead) and method is not None and f"{path}.weight" in aliases:
            method.process_weights_after_loading(module)
