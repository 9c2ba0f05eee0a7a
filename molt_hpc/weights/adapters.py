"""Low-rank adapters that travel without the weights which they adapt.

The trainer sends the two factors of every adapted tensor, the second one times alpha / rank, and a digest of the checkpoint that it has
loaded. An engine reads its own model folder: everything once, to prove that it holds the same checkpoint, later the layers that are adapted. It adds
the products and loads the sums like any other weights. The folder is never written to.
"""

import json
from collections.abc import Container, Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from molt_hpc.weights.group import checksum

DOWN, UP = ".lora_A", ".lora_B"
"""Ends of the names by which the factors [rank, in] and [out, rank] of a checkpoint's tensor travel."""
BASE = "lora_base"
"""Name of the checkpoint's digest, uint8 [8]."""


def checkpoint_tensors(folder: Path, wanted: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder's safetensors files, one at a time; RuntimeError if it has none."""
    index = folder / "model.safetensors.index.json"  # a folder may hold the weights once more in another format
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else folder.glob("*.safetensors")
    paths = sorted(folder / name for name in names)
    if not paths:
        raise RuntimeError(f"{folder}: no safetensors files; adapters travel alone, and the weights that they adapt are read there")
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)


def digest(checksums: dict[str, str]) -> torch.Tensor:
    """uint8 [8] that stands for tensors by name and checksum, whatever their order."""
    rows = "\n".join(f"{name} {value}" for name, value in sorted(checksums.items()))
    return torch.tensor(list(xxhash.xxh3_64_digest(rows.encode())), dtype=torch.uint8)


class Adapters:
    """What an engine knows of the adapters, and the weights that they make."""

    def __init__(self) -> None:
        self._factors: dict[str, torch.Tensor] = {}
        self.proved = False
        """Whether all of the checkpoint has been loaded once and was the trainer's."""

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Keep copies of what belongs to adapters; returns the rest."""
        rest = [(name, tensor) for name, tensor in tensors if name != BASE and not name.endswith((DOWN, UP))]
        if len(rest) < len(tensors):
            ordinary = {name for name, _ in rest}
            self._factors |= {name: tensor.clone() for name, tensor in tensors if name not in ordinary}
        return rest

    @property
    def names(self) -> list[str]:
        """The adapted tensors."""
        return [name.removesuffix(DOWN) for name in self._factors if name.endswith(DOWN)]

    def weights(self, folder: Path, wanted: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors with the adapters' products added: all of them the first time, then those that are wanted.

        Raises RuntimeError, at the end of the first time, if the folder does not hold the checkpoint that the trainer has loaded.
        """
        checksums: dict[str, str] = {}
        for name, tensor in checkpoint_tensors(folder, wanted if self.proved else None):
            if not self.proved:
                checksums[name] = checksum(tensor.contiguous())
            down, up = self._factors.get(name + DOWN), self._factors.get(name + UP)
            yield name, tensor if down is None else tensor.to(down.device, down.dtype) + up @ down
        if not self.proved and not torch.equal(digest(checksums), self._factors[BASE].cpu()):
            raise RuntimeError(f"{folder} does not hold the checkpoint that the trainer has loaded")
        self.proved = True
