"""Whole weights under their Hugging Face names, gathered one parameter at a time.

Both readers of the weights, the engines and the exported folder, know the names of the published
checkpoint. AutoModel's and transformers' own modules fuse experts; what they hold is converted back
after the gather, because a rank's shard may hold only its own experts.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from molt_hpc.train.model import TrainModel, whole
from molt_hpc.weights.adapters import BASE, DOWN, UP, checkpoint_tensors, digest
from molt_hpc.weights.group import checksum
from molt_hpc.weights.publish import WeightSource

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point dtypes as safetensors headers name them."""


def checkpoint_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Hugging Face name -> dtype of every floating-point tensor in a folder's safetensors files (headers only)."""
    found: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: DTYPES[spec["dtype"]] for name, spec in header.items() if name != "__metadata__" and spec["dtype"] in DTYPES}
    return found


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same global shape and dtype without data."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class FullWeights:
    """The model's weights as (name, tensor) pairs; an iteration is a sequence of collectives, in the same order on all ranks.

    dtype: of all floating-point tensors, or None for that of the checkpoint which the model was
    loaded from, tensor by tensor. Tied weights come once. Every rank receives every tensor and may
    drop it at once.
    """

    def __init__(self, model: TrainModel, dtype: torch.dtype | None = None):
        self.model, self.dtype = model, dtype
        self._original = checkpoint_dtypes(model.folder)
        self._common = max(self._original.values(), key=list(self._original.values()).count, default=torch.float32)
        self._kept: set[str] = set()
        # transformers' conversion is slow to set up: tensors that it leaves as they are do not go through it again
        self._kept = {name for name, tensor in self._native() if self._keeps(name, _empty(tensor))}

    def as_in_checkpoint(self, name: str) -> bool:
        """Whether a parameter is the checkpoint's tensor of the same name."""
        return name in self._kept and name in self._original

    def _native(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.model.base_parameters(), *self.model.named_buffers()]

    def _keeps(self, name: str, empty: torch.Tensor) -> bool:
        converted = self._convert(name, empty)
        return len(converted) == 1 and converted[0][0] == name and converted[0][1] is empty

    def _convert(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """One of the module's tensors as the checkpoint's; works on meta tensors too."""
        if name in self._kept:
            return [(name, tensor)]
        module = self.model.module
        adapter = getattr(module, "state_dict_adapter", None)
        if adapter is not None:
            return list(adapter.convert_single_tensor_to_hf(name, tensor, exclude_key_regex=None, quantization=False))
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(module, {name: tensor}).items())

    def _served(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return dtype
        return self.dtype or self._original.get(name, self._common)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in the order of iteration; gathers nothing."""
        rows = []
        for name, tensor in self._native():
            rows += [(hf, self._served(hf, part.dtype), tuple(part.shape)) for hf, part in self._convert(name, _empty(tensor))]
        return rows

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.model.reshard()
        with torch.no_grad():
            for name, tensor in self._native():
                full = self.model.merged(name, whole(tensor))
                for hf, part in self._convert(name, full):
                    yield hf, part.to(self._served(hf, part.dtype)).contiguous()
                del full


class AdapterWeights:
    """The adapters alone, for engines that hold the checkpoint which they adapt (see weights/adapters.py). A source as FullWeights is."""

    def __init__(self, model: TrainModel):
        self._model = model
        self._base = torch.zeros(8, dtype=torch.uint8)
        if dist.get_rank() == 0:
            self._base = digest({name: checksum(tensor.contiguous()) for name, tensor in checkpoint_tensors(model.folder)})

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in the order of iteration."""
        rows = [(name + end, factor.dtype, tuple(factor.shape))
                for name, pair in self._model.adapters.items() for end, factor in zip((DOWN, UP), pair)]
        return [*rows, (BASE, torch.uint8, (8,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._model.reshard()
        for name, (down, up) in self._model.adapters.items():
            yield name + DOWN, whole(down)
            yield name + UP, whole(up) * self._model.lora_scale
        yield BASE, self._base.to(self._model.device)


def published(model: TrainModel, backend: str, dtype: torch.dtype | None) -> WeightSource:
    """What the engines are sent over a back end: the adapters alone where they are all that learns, or whole weights in `dtype`.

    Adapters of weights that the checkpoint holds under other names or fused, and sparse_nccl, need whole weights.
    """
    weights = FullWeights(model, dtype)
    alone = model.adapters and backend != "sparse_nccl" and all(map(weights.as_in_checkpoint, model.adapters))
    return AdapterWeights(model) if alone else weights
