"""The trained model as a Hugging Face folder that `from_pretrained` and `vllm serve` open."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from molt_hpc.train.gather import FullWeights
from molt_hpc.train.model import TrainModel

if TYPE_CHECKING:
    from molt_hpc.train.actor import Actor

COMPANIONS = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer*", "special_tokens_map.json",
              "added_tokens.json", "vocab*", "merges.txt", "*.jinja", "*.model", "*.py")
"""What belongs to a model besides config.json and the weights; copied from the folder that it was loaded from."""


def export_hf(actor: Actor, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the actor's model to `folder`, whole or not at all. All ranks call it; rank 0 writes, all return when it is done.

    dtype: of the weights; None keeps each tensor's dtype of the original checkpoint.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    write_model(actor.model, temporary, dtype)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    dist.barrier()


def write_model(model: TrainModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write weights, configuration and tokenizer into `folder`. All ranks call it together."""
    from huggingface_hub import save_torch_state_dict

    state: dict[str, torch.Tensor] = {}
    for name, tensor in FullWeights(model, dtype):
        if dist.get_rank() == 0:
            # experts are slices of one fused tensor, which safetensors would refuse to write in part
            state[name] = tensor.to("cpu", copy=True)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, folder, metadata={"format": "pt"})
        for pattern in COMPANIONS:
            for path in model.folder.glob(pattern):
                if path.is_file() and not (folder / path.name).exists():
                    shutil.copyfile(path, folder / path.name)
        config = json.loads((model.folder / "config.json").read_text())
        if dtype is not None:
            _set_dtype(config, str(dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        # the library writes weights for the owner alone; whoever may read the configuration may read them
        for path in folder.glob("*.safetensors"):
            path.chmod((folder / "config.json").stat().st_mode)
    dist.barrier()


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Correct the dtype wherever the configuration names one, the parts of multi-part models included."""
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    if "dtype" not in config and "torch_dtype" not in config and "architectures" in config:
        config["dtype"] = dtype
    for value in config.values():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
