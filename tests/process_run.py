"""Helpers of tests that run a real broker in a thread of the test's process."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from molt_hpc.broker.client import create_keys
from molt_hpc.broker.server import Broker
from molt_hpc.config import RunConfig, dump

ECHO_AGENT = '''
from molt_hpc.agents import Env, Result

class Agent(Env):
    def step(self, state):
        return Result(reward=float(len(state["action_text"]) % 2), info={"turn": state["turn"]})
'''


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"id": f"p{i}", "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}], "label": str(2 * i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_config(folder: Path, model: Path | str = "unused", prompts: int = 8, agent: str = ECHO_AGENT) -> RunConfig:
    """A configuration that a CPU can run: gloo, float32, one small engine."""
    config = RunConfig(output_dir=str(folder / "run"))
    config.actor.model_name_or_path = str(model)
    config.data.prompt_dataset = str(write_prompts(folder / "prompts.jsonl", prompts))
    config.data.max_len = 128
    config.train.agent_path = str(folder / "agent.py")
    (folder / "agent.py").write_text(agent)
    config.train.max_lag = 0
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 4, 2, 16
    config.weights.backend, config.weights.timeout = "gloo", 60.0
    config.fsdp.param_dtype = config.vllm.dtype = "float32"
    config.vllm.enforce_eager, config.vllm.kv_cache_memory_bytes = True, 64 << 20
    config.check()
    return config


class BrokerThread:
    """A real broker on a thread; `records` collects what it hands to the step sink."""

    def __init__(self, config: RunConfig, attempt: int = 1):
        self.run = Path(config.output_dir)
        (self.run / "logs" / f"attempt_{attempt}").mkdir(parents=True, exist_ok=True)
        (self.run / "config.toml").write_text(dump(config))
        create_keys(self.run)
        self.records: list[dict] = []
        self.broker = Broker(self.run, config, attempt, self._sink)
        self.address, self.exit_code = self.broker.address, None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _sink(self, record: dict) -> str:
        self.records.append(record)
        return f"step {record['step']}"

    def _serve(self) -> None:
        self.exit_code = self.broker.serve()

    def join(self, timeout: float = 30.0) -> int | None:
        self._thread.join(timeout)
        return self.exit_code
