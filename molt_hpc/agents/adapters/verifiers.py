"""Environments of verifiers (0.4, its v1 interface): `prompt_rows` writes the prompt file, `VerifiersAgent` plays a row's task.

    from molt_hpc.agents.adapters.verifiers import VerifiersAgent

    class Agent(VerifiersAgent):
        taskset = "my_taskset"     # an installed taskset, or a module beside this file

verifiers' own harness talks to the model; its requests go through this rollout's chat server and are recorded like all others.
verifiers needs openai < 3.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

from molt_hpc.agents.base import ChatAgent, ChatContext, Result

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""A plain chat loop on this machine."""


def make_environment(taskset: str, config: dict[str, Any]) -> vf.Env:
    """The taskset's own environment, or the single-agent one; `config`: further fields of its configuration."""
    kind = environment_class(taskset)
    fields = {"taskset": {"id": taskset}} | ({"agent": AGENT} if kind is vf.SingleAgentEnv else {}) | config
    return load_environment((concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig)(**fields))


def prompt_rows(taskset: str, count: int, **config: Any) -> Iterator[str]:
    """JSON lines for a prompt file, one for each of the first `count` tasks; the label is the task's number."""
    for task in make_environment(taskset, config).taskset.take(count):
        yield json.dumps({"prompt": task.data.prompt_text or taskset, "label": task.data.idx, "source": taskset})


class VerifiersAgent(ChatAgent):
    """One episode of the task that the label numbers; the reward is the sum of its traces' rewards, metrics become info."""

    taskset = ""
    config: dict[str, Any] = {}
    _serving: asyncio.Task | None = None

    @classmethod
    async def _environment(cls) -> vf.Env:
        """The environment with its shared servers, once for a process; they end with it."""
        env = make_environment(cls.taskset, cls.config)
        await AsyncExitStack().enter_async_context(env.serving())
        return env

    async def run(self, ctx: ChatContext) -> Result:
        cls = type(self)
        cls._serving = cls._serving or asyncio.ensure_future(cls._environment())
        env = await asyncio.shield(cls._serving)
        task = next(iter(env.taskset.skip(int(ctx.label)).take(1)))
        variable = f"MOLT_HPC_KEY_{ctx.session_id}"  # verifiers takes keys from the environment only
        os.environ[variable] = ctx.api_key
        try:
            client = vf.EvalClientConfig(base_url=ctx.base_url, api_key_var=variable)
            episode = await env.run_episode(task, vf.ModelContext(model=ctx.model_name, client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            raise RuntimeError(f"the episode failed: {[*episode.errors, *(e for t in episode.traces for e in t.errors)]}")
        metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
        return Result(sum(trace.reward for trace in episode.traces), info=metrics)
