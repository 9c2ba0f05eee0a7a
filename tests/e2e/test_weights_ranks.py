"""Four FSDP2 ranks publish to two servers, one of them with two tensor-parallel ranks."""

import asyncio
import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from molt_hpc.config import dump
from tests.process_run import small_config
from tests.weight_fleet import Fleet, running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


class RemoteSender:
    """The sender in the training ranks' processes, seen through the files that they write."""

    backend = "gloo"

    def __init__(self, folder: Path, ranks: subprocess.Popen):
        self.folder, self.ranks, self.version = folder, ranks, 0

    def _wait(self, name: str) -> dict:
        deadline = time.monotonic() + 200
        while not (self.folder / name).exists():
            assert self.ranks.poll() is None or (self.folder / name).exists(), self.ranks.communicate()[0]
            assert time.monotonic() < deadline, f"no {name} within 200 s"
            time.sleep(0.02)
        return json.loads((self.folder / name).read_text())

    def stage(self):
        self.version += 1
        self.offer = self._wait(f"offer_{self.version}.json")

    def plan(self):
        return self.offer["plan"]

    def open(self, world_size):
        return self.address()

    def address(self):
        return self.offer["address"], self.offer["port"]

    def join(self, epoch, world_size):
        assert epoch == 1

    def send(self):
        return SimpleNamespace(**self._wait(f"report_{self.version}.json"))


def test_four_training_ranks_publish_experts_to_one_server_and_one_with_two_ranks(tmp_path, tiny_models):
    config = small_config(tmp_path, tiny_models("qwen3_moe"))
    config.actor.backend, config.actor.adam.lr, config.weights.bucket_bytes = "transformers", 1e-2, 100_000
    config.weights.drift_prompts = 4
    two = copy.deepcopy(config)
    two.vllm.tensor_parallel_size = 2
    (tmp_path / "config.toml").write_text(dump(config))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "tests.e2e.publishing_ranks",
               str(tmp_path / "config.toml"), str(tmp_path), "4", "3"]

    async def main():
        async with running({"one": config, "two": two}, tmp_path) as engines:
            assert {name: engine.world_size for name, engine in engines.items()} == {"one": 1, "two": 2}
            ranks = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            fleet, sender, found = Fleet(config, engines), RemoteSender(tmp_path, ranks), []
            try:
                for version in (1, 2, 3):
                    await fleet.update(sender, version)
                    found.append(await fleet.scores(np.array(sender.offer["tokens"], np.int32)))
                assert await asyncio.to_thread(ranks.wait, 60) == 0
            finally:
                ranks.terminate()  # torchrun takes its ranks along
                ranks.wait(30)
            return found

    found = asyncio.run(main())
    expected = [np.load(tmp_path / f"scores_{version}.npy") for version in (1, 2, 3)]
    for scores, ours in zip(found, expected):
        np.testing.assert_allclose(scores["one"], ours, atol=1e-4)
        np.testing.assert_allclose(scores["two"], ours, atol=1e-4)
    assert np.abs(expected[0] - expected[2]).max() > 1e-3
