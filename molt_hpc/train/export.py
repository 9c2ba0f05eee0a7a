"""The trained model as a Hugging Face folder that `from_pretrained` and `vllm serve` open."""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from molt_hpc.train.actor import Actor
from molt_hpc.train.gather import FullWeights
from molt_hpc.train.model import TrainModel

COMPANIONS = ("config.json", "generation_config.json", "*preprocessor_config.json", "processor_config.json", "tokenizer*", "special_tokens_map.json",
              "added_tokens.json", "vocab*", "merges.txt", "*.jinja", "*.model", "*.py")
"""What belongs to a model besides the weights; copied from the folder that it was loaded from."""


def export_hf(actor: Actor, folder: Path) -> None:
    """Write the actor's model to `folder`, whole or not at all. All ranks call it; rank 0 writes, all return when it is done."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    write_model(actor.model, temporary)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    dist.barrier()


def write_model(model: TrainModel, folder: Path) -> None:
    """Write weights (each in its dtype of the original checkpoint), configuration and tokenizer into `folder`. All ranks call it together."""
    from huggingface_hub import save_torch_state_dict

    state: dict[str, torch.Tensor] = {}
    for name, tensor in FullWeights(model):
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
        # the library writes weights for the owner alone; whoever may read the configuration may read them
        for path in folder.glob("*.safetensors"):
            path.chmod((folder / "config.json").stat().st_mode)
    dist.barrier()
