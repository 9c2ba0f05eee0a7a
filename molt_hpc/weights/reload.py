"""One weight update of a vLLM model: its layer-wise reload, repeatable after a failure and with an account of what was loaded.

vLLM's loaders skip some names without a word (biases, rotary tables, aliases of tied weights), and a layer of which
a part never came keeps whatever was there. So each tensor's way through `load_weights` is recorded when it first comes, by watching
the loaders of the parameters, and every layer's elements are counted before the update may be finished.
"""

import contextlib
import ctypes
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

PARAMETER, TENSOR = object(), object()
"""Stand for the layer's parameter and for the tensor that came in the arguments of a recorded call."""


@dataclass(frozen=True)
class Call:
    """One call of a parameter's loader that filled something, its arguments by position and by name."""

    path: str
    layer: nn.Module
    parameter: str
    arguments: tuple
    keywords: dict[str, Any]

    @property
    def repeatable(self) -> bool:
        """Whether it was given the tensor that came, not a part or a copy."""
        return any(value is TENSOR for value in (*self.arguments, *self.keywords.values()))

    def repeat(self, tensor: torch.Tensor) -> None:
        parameter = getattr(self.layer, self.parameter)

        def put(value: Any) -> Any:
            return parameter if value is PARAMETER else tensor if value is TENSOR else value

        parameter.weight_loader(*map(put, self.arguments), **{key: put(value) for key, value in self.keywords.items()})


class Scratch(TorchFunctionMode):
    """Host memory for the tensors of one layer at a time; vLLM enters it in place of a layer's device, to make them anew.

    It packs or copies them into what stays, and drops them. The allocator would take, between packed weights, memory many
    times their size for that. What something still refers to by then is left to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit([])

    def fit(self, layers: Iterable[nn.Module]) -> None:
        """Make room for the largest of these layers, whose tensors are on the meta device; without any, give the memory back."""
        sizes = [sum(_room(tensor) for tensor in get_layer_tensors(layer).values()) for layer in layers]
        self._block, self._used = torch.empty(max(sizes, default=0), dtype=torch.uint8), 0
        self._alone = self._references()

    def _references(self) -> int:
        return torch._C._storage_Use_Count(self._block.untyped_storage()._cdata)

    def __enter__(self) -> "Scratch":
        if self._references() > self._alone:
            self._block = torch.empty_like(self._block)
        self._used = 0
        return super().__enter__()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty_strided:
            like = function(*args, **kwargs, device="meta")
            start, self._used = self._used, self._used + _room(like)
            if self._used <= len(self._block):
                part = self._block[start:start + like.untyped_storage().nbytes()]
                return part.view(like.dtype).as_strided(like.shape, like.stride())
        return function(*args, **kwargs)


def _room(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes up, to a multiple of what vector instructions like to see."""
    return -(-tensor.untyped_storage().nbytes() // 64) * 64


class Reload:
    """The updates of one model; `start`, `load` any number of times, `missing`, `finish`."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        """Tensor name -> the loader calls by which it fills the model on this rank, as recorded when it first came."""
        self._plain: set[str] = set()
        self._coming: dict[int, tuple[str, torch.Tensor]] = {}
        self._found: dict[str, list[Call]] = {}
        self._aliases: set[str] = set()
        self._touched: dict[str, nn.Module] = {}
        self._scratch = Scratch()

    def start(self, model: nn.Module) -> None:
        """Begin an update. What an update that failed had begun is undone first, as far as the layer-wise reload holds it."""
        give_back_freed()
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
            if info.restore_device == torch.device("cpu"):
                info.restore_device = self._scratch
        self._aliases = set(_names(model, remove_duplicate=False)) - set(_names(model, remove_duplicate=True))
        self._touched = {}
        initialize_layerwise_reload(model)
        self._scratch.fit(layer for layer in model.modules() if get_layerwise_info(layer).restore_device is self._scratch)
        for path, layer in model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                tensor.weight_loader = self._watched(path, layer, name, tensor)

    def _watched(self, path: str, layer: nn.Module, name: str, tensor: torch.Tensor) -> Callable[..., Any]:
        info, direct = get_layerwise_info(layer), name in SKIP_LOAD_TENSORS
        # a tensor that outlives an update still has the wrapper of the last one
        loader = _get_original_loader(tensor) if direct else getattr(tensor.weight_loader, "watches", tensor.weight_loader)

        @wraps(loader)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            before, parameter = info.load_numel, getattr(layer, name)
            result = loader(*arguments, **keywords)
            if direct or not info.can_load() or info.load_numel > before:
                self._touched[path] = layer
                if self._coming:
                    self._record(path, layer, name, parameter, arguments, keywords)
            return result

        watched.watches, watched.__name__ = loader, "online_process_loader"  # the name by which vLLM tells a wrapper from a loader
        return watched

    def _record(self, path: str, layer: nn.Module, name: str, parameter: torch.Tensor, arguments: tuple, keywords: dict[str, Any]) -> None:
        # without the tensor itself among the arguments it can only have been the one that came alone
        owner = next(iter(self._coming.values()))[0] if len(self._coming) == 1 else ""

        def slot(value: Any) -> Any:
            nonlocal owner
            if value is parameter or not isinstance(value, torch.Tensor):
                return PARAMETER if value is parameter else value
            came, tensor = self._coming.get(value.data_ptr(), ("", value))
            if not came or value.shape != tensor.shape or value.stride() != tensor.stride() or value.dtype != tensor.dtype:
                return None
            owner = came
            return TENSOR

        call = Call(path, layer, name, tuple(map(slot, arguments)), {key: slot(value) for key, value in keywords.items()})
        self._found.setdefault(owner, []).append(call)

    def load(self, model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Fill the model. A tensor that came before takes the way that was recorded; `load_weights` alone costs a walk over the model."""
        fresh, others = [], []
        with disable_mtp_completeness_check():
            for name, tensor in tensors:
                calls = self.calls.get(name)
                if calls is None:
                    fresh.append((name, tensor))
                elif all(call.repeatable for call in calls):
                    for call in calls:
                        call.repeat(tensor)
                else:
                    others.append((name, tensor))
            self._learn(model, fresh)
            if others:
                model.load_weights(others)

    def _learn(self, model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors that never came before: the first of every kind alone, whatever its loader does; its like together if that was plain."""
        together = []
        for name, tensor in tensors:
            kind = re.sub(r"\d+", "#", name)
            if kind in self._plain:
                together.append((name, tensor))
                continue
            self._watch(model, [(name, tensor)])
            if self.calls[name] and all(call.repeatable for call in self.calls[name]):
                self._plain.add(kind)
        if together:
            self._watch(model, together)

    def _watch(self, model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._coming, self._found = {tensor.data_ptr(): (name, tensor) for name, tensor in tensors}, {}
        try:
            model.load_weights(tensors)
        finally:
            self._coming = {}
        self.calls |= {name: self._found.get(name, []) for name, _ in tensors}

    def layers_of(self, name: str) -> set[str]:
        """Paths of the layers that a tensor fills on this rank, as far as it has come before."""
        return {call.path for call in self.calls.get(name, ())}

    def skipped(self, names: Iterable[str]) -> list[str]:
        """Tensors that fill nothing on this rank."""
        return [name for name in names if not self.calls.get(name)]

    def missing(self, model: nn.Module, unchanged_allowed: bool = False) -> list[str]:
        """Parameters that the update has not filled, or not all of; call before `finish`.

        unchanged_allowed: layers of which nothing came are meant to stay as they are.
        """
        found = []
        for path, layer in model.named_modules():
            info = get_layerwise_info(layer)
            parameters = {name: p for name, p in layer.named_parameters(recurse=False)
                          if f"{path}.{name}" not in self._aliases and name not in SKIP_LOAD_TENSORS}
            if not info.can_load() or not parameters or is_deferred_attention_layer(layer) or (unchanged_allowed and not info.load_numel):
                continue
            wanted = sum(get_tensor_load_numel(p) for p in parameters.values()) - _padding(layer)
            if info.load_numel < wanted:
                found.append(f"{path}.{{{','.join(sorted(parameters))}}} ({info.load_numel} of {wanted} elements)")
        return found

    def finish(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        finalize_layerwise_reload(model, model_config)
        self._scratch.fit([])
        if device.type == "cpu":
            repack_for_cpu(model, self._touched, self._aliases)
        give_back_freed()

    def keep_pending(self, buffer: torch.Tensor | None) -> None:
        """Copy what layers that are not complete yet still hold of `buffer`, so that it can be reused; of no buffer they hold nothing."""
        if buffer is None:
            return
        storage = buffer.untyped_storage().data_ptr()
        for layer in self._touched.values():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == storage:
                        bound.arguments[key] = value.clone()


def give_back_freed() -> None:
    """Return to the system what the allocator keeps of the memory that was freed: the loading of a model leaves much."""
    with contextlib.suppress(AttributeError):  # only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def _names(model: nn.Module, remove_duplicate: bool) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=remove_duplicate)]


def _padding(layer: nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint fills."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices.num_org_elements
    return max(0, layer.num_embeddings_per_partition - rows) * layer.embedding_dim


def repack_for_cpu(model: nn.Module, touched: Container[str], aliases: set[str]) -> None:
    """Redo what vLLM 0.32's CPU build leaves out of a reload.

    It repacks MoE experts only on the first load, and a tied lm_head goes on with the packed weights of its first load
    although those of its embedding were made anew. touched: layers that the update has loaded.
    """
    packed = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and path in touched:
            kernel.fused_experts.process_weights_after_loading(module)
        if isinstance(module, VocabParallelEmbedding):
            weight = id(module.weight)
            if isinstance(module, ParallelLMHead) and f"{path}.weight" in aliases:
                module.cpu_linear = packed[weight].cpu_linear
            packed.setdefault(weight, module)
