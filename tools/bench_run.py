"""What the benchmarks share: a small run folder with a real broker process, and how to end it."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from molt_hpc.broker.client import BrokerClient, create_keys, wait_for_endpoint
from molt_hpc.config import RunConfig, dump
from molt_hpc.guard import guarded

AGENT = "from molt_hpc.agents import Env, Result\n\n\nclass Agent(Env):\n    def step(self, state):\n        return Result()\n"


def base_config(folder: Path, prompts: int) -> RunConfig:
    """A valid configuration in `folder` with `prompts` prompts and an agent that does nothing."""
    config = RunConfig(output_dir=str(folder / "run"))
    rows = (json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(prompts))
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "agent.py").write_text(AGENT)
    config.data.prompt_dataset, config.train.agent_path = str(folder / "prompts.jsonl"), str(folder / "agent.py")
    config.actor.model_name_or_path = "unused"
    config.weights.backend, config.logger.tensorboard = "gloo", False
    config.vllm.dtype = config.fsdp.param_dtype = "float32"
    return config


def start_role(run: Path, words: list[str]) -> subprocess.Popen:
    """A role of the run under a guard, its log in the run folder."""
    with open(run / "logs" / "attempt_1" / f"{words[0]}.log", "ab") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return subprocess.Popen(guarded([sys.executable, "-m", "molt_hpc", *words], owner=os.getpid()), stdout=log, stderr=log, env=env)


@contextmanager
def running_broker(config: RunConfig) -> Iterator[tuple[Path, str]]:
    """(run folder, address) of a real broker process; ended with the block."""
    run = Path(config.output_dir)
    (run / "logs" / "attempt_1").mkdir(parents=True)
    (run / "config.toml").write_text(dump(config))
    create_keys(run)
    broker = start_role(run, ["broker", str(run), "--attempt", "1"])
    try:
        yield run, wait_for_endpoint(run, 1, 60, lambda: broker.poll() is None)
    finally:
        broker.terminate()
        broker.wait(20)


def spawn(target: Callable[..., None], *words: Any) -> multiprocessing.Process:
    """A new process, which does not outlive this one, that runs `target`."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=words, daemon=True)
    process.start()
    return process


def actor_client(run: Path, address: str) -> BrokerClient:
    client = BrokerClient(run, address, "actor", "actor", 1)
    client.request("ready")
    return client


def publish(client: BrokerClient, version: int, timeout: float) -> None:
    """An update without weights, sent as often as the broker says."""
    reply = client.call("update_begin", {"version": version}, timeout=timeout)
    while reply.kind == "send":
        epoch = {"version": version, "epoch": reply.fields["epoch"]}
        group = {"master_address": "", "master_port": 0, "backend": "gloo"}
        reply = client.call("update_transfer", epoch | group, {"plan": np.zeros(1, np.uint8)}, timeout=timeout)
        if reply.kind == "ok":
            reply = client.call("update_sent", epoch | {"checksum": "x"}, timeout=timeout)
