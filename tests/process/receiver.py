"""A receiver without an engine: `python -m tests.process.receiver HOST PORT RANK WORLD EPOCH`; says what it joined and got, one line each."""

from __future__ import annotations

import sys
from functools import partial

import torch

from molt_hpc.weights import group
from molt_hpc.weights.threads import aside


def main(host: str, port: int, rank: int, world: int, epoch: int) -> None:
    store, look = group.open_store(host, port, world, False, 60.0), group.watch(host, port, 60.0)
    print("here", flush=True)
    joined = aside(partial(group.join, store, epoch, rank, world, 60.0), look)
    print("joined", flush=True)
    for size in map(int, sys.stdin):
        buffer = torch.empty(size, dtype=torch.uint8)
        aside(partial(group.broadcast, joined, buffer), look)
        print(group.checksum(buffer), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], *map(int, sys.argv[2:]))
    except RuntimeError as error:
        print(f"failed: {error}", flush=True)
