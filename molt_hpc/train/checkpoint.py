"""Checkpoints: weights and optimizer of actor and critic, KL coefficient, random state and step as one commit that resumes bit for bit.

    <run>/checkpoints/step_000100/state/     torch.distributed.checkpoint files, one or more a rank
                                  critic/    the same of a critic on ranks of its own
                                  state.json step, ranks, and what the caller added (the version)
                                  DONE       written last; a folder without it does not count
                                  hf/        the exported model, where one was made

A checkpoint is written under a temporary name and renamed, so a run that dies while it saves leaves
the earlier ones as they were. The schedule needs no state: it is a function of the step. All state
is tensors by name; torch writes its own index of them (`state/.metadata`).
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from molt_hpc.data.shards import write_whole
from molt_hpc.train.model import TrainModel
from molt_hpc.train.optim import Optimizers

if TYPE_CHECKING:
    from molt_hpc.train.actor import Actor

Learners = list[tuple[str, TrainModel, Optimizers]]
"""(prefix of its names, model, optimizer) of everything that learns."""

log = logging.getLogger(__name__)

NAME = re.compile(r"step_(\d{6,})")


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every finished checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in (run / "checkpoints").glob("step_*")
             if (match := NAME.fullmatch(path.name)) and (path / "DONE").is_file()]
    return sorted(found)


def nearest(run: Path, step: int | None = None) -> Path | None:
    """The newest finished checkpoint of at most `step` trained batches (None: of all), or None."""
    return max(((s, path) for s, path in checkpoints(run) if step is None or s <= step), default=(0, None))[1]


def prune(run: Path, keep: int) -> None:
    """Delete all but the `keep` (at least 1) newest checkpoints; rank 0 does it.

    DONE goes first, so that a deletion that is cut short leaves no half checkpoint that counts.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for _, path in checkpoints(run)[:-max(1, keep)]:
        (path / "DONE").unlink()
        shutil.rmtree(path)
        log.info("checkpoint %s is deleted: the newest %d are kept (ckpt.max_num)", path.name, keep)


def save_checkpoint(actor: "Actor", run: Path, step: int, extra: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint of `step`; all ranks call it and return the folder when it is finished.

    extra: values that JSON can hold and that `load_checkpoint` gives back, such as the version.
    """
    final = checkpoint_folder(run, step)
    temporary = final.with_name(f".{final.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    save_state(actor.learners(), temporary / "state")
    for part in actor.apart():
        part.save(temporary)
    dist.barrier()
    if dist.get_rank() == 0:
        described = {"step": step, "trained": actor.step, "ranks": dist.get_world_size(), "kl_coef": actor.kl_coef,
                     "bad_steps": actor.bad_steps, "extra": extra or {}}
        write_whole(temporary / "state.json", json.dumps(described).encode())
        write_whole(temporary / "DONE", b"")
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        log.info("checkpoint %s is saved", final)
    dist.barrier()
    return final


def save_state(learners: Learners, folder: Path) -> None:
    """Write weights, optimizers and random state; all ranks of this world call it."""
    for _, model, _ in learners:
        model.reshard()
    dcp.save(_state(learners), checkpoint_id=folder)


def load_checkpoint(actor: "Actor", folder: Path) -> dict[str, Any]:
    """Restore weights, optimizer, random state and `actor.step`; all ranks call it. Returns {step, version ... of extra}.

    Raises ValueError if the folder is no finished checkpoint. Another number of ranks than it was
    saved by is fine: then the random state starts anew.
    """
    if not (folder / "DONE").is_file():
        raise ValueError(f"{folder}: not a finished checkpoint (no file DONE)")
    if (folder / "critic").is_dir() != bool(actor.apart()):
        raise ValueError(f"{folder}: was written with {'a' if (folder / 'critic').is_dir() else 'no'} critic on ranks of its own: "
                         "keep critic.num_procs as it was")
    described = json.loads((folder / "state.json").read_text())
    load_state(actor.learners(), folder / "state", described["ranks"] == dist.get_world_size())
    for part in actor.apart():
        part.load(folder)
    actor.step, actor.kl_coef, actor.bad_steps = described["trained"], described["kl_coef"], described["bad_steps"]
    return {"step": described["step"], **described["extra"]}


def load_state(learners: Learners, folder: Path, same_ranks: bool = True) -> None:
    """Restore what save_state wrote; the random state where the number of ranks is the same."""
    for _, model, _ in learners:
        model.reshard()
    state = _state(learners, random_state=same_ranks)
    dcp.load(state, checkpoint_id=folder)  # in place
    if same_ranks:
        torch.set_rng_state(state[_random_key("cpu")])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state[_random_key("cuda")])


def _random_key(device: str) -> str:
    return f"random.{device}.{dist.get_rank()}"


def _state(learners: Learners, random_state: bool = True) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name."""
    state: dict[str, torch.Tensor] = {}
    for prefix, model, optimizer in learners:
        for name, parameter in model.named_parameters():
            state[f"{prefix}model.{name}"] = parameter.detach()
            state |= {f"{prefix}optimizer.{name}.{slot}": tensor for slot, tensor in optimizer.state_of(parameter).items()}
        state |= {f"{prefix}buffer.{name}": buffer for name, buffer in model.named_buffers()}
    if random_state:
        state[_random_key("cpu")] = torch.get_rng_state()
        if torch.cuda.is_available():
            state[_random_key("cuda")] = torch.cuda.get_rng_state()
    return state
