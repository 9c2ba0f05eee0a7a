"""A training rank without a model: joins the gloo group that torchrun arranged, then does as the scripted actor."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from scripted_roles import serve_role


def main(run: Path, address: str, attempt: int) -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    record = {"rank": rank, "world": dist.get_world_size(), "sum": total.item(), "host": socket.gethostname()}
    (run / f"rank_{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()
    return serve_role("actor", run, attempt, address, rank, {})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3], int(sys.argv[5])))
