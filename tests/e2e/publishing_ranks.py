"""Training ranks that publish: `torchrun -m tests.e2e.publishing_ranks CONFIG OUT WORLD_SIZE UPDATES`; they talk to the test by files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from molt_hpc.config import RunConfig, load
from molt_hpc.train.actor import Actor
from molt_hpc.train.drift import DriftProbe, probe_tokens
from molt_hpc.weights.publish import make_sender
from tests.batches import random_batch


def write(path: Path, content: dict) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(content))
    os.replace(path.with_suffix(".tmp"), path)


def main(config_path: str, out: str, world_size: str, updates: str) -> None:
    config, folder, rank = load(RunConfig, config_path, check=False), Path(out), dist.get_rank()
    actor = Actor(config, 10)
    sender = make_sender(config.weights, actor.weights(), rank, "127.0.0.1", folder / "weights")
    probe = DriftProbe(actor.model, config.weights, probe_tokens(actor.model.folder, 4))
    for version in range(1, int(updates) + 1):
        actor.train_batch(random_batch(version, step=version, version=version - 1).to_bytes() if rank == 0 else None)
        sender.stage()
        if rank == 0:
            address, port = sender.open(int(world_size)) if version == 1 else sender.address()
            offer = {"plan": sender.plan(), "address": address, "port": port, "tokens": probe.tokens.tolist()}
            write(folder / f"offer_{version}.json", offer)
            if version == 1:
                sender.join(1, int(world_size))
        report = sender.send()
        scores = probe.score()
        if rank == 0:
            np.save(folder / f"scores_{version}.npy", scores)
            write(folder / f"report_{version}.json", {"checksum": report.checksum, "nbytes": report.nbytes})
    dist.barrier()
    sender.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
