"""The main job with a ChatAgent: several turns, branches, segments of two temperatures, all trained with the log-probs of their engine."""

import numpy as np
import pytest

from molt_hpc.data.shards import read_shard
from molt_hpc.observe.metrics import read_metrics
from tests.e2e.test_main_job import start
from tests.process_run import small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = '''
from openai import AsyncOpenAI
from molt_hpc.agents import ChatAgent, Result

class Talk(ChatAgent):
    async def run(self, ctx):
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            async def ask(messages, **fields):
                return (await client.chat.completions.create(model=ctx.model_name, messages=messages, max_tokens=8, **fields)).choices

            first = (await ask(ctx.messages))[0].message
            second = await ask([*ctx.messages, first, {"role": "user", "content": "and then?"}], n=2)
            other = (await ask([{"role": "user", "content": "sum up"}], temperature=0.6))[0].message
            verdict = await ctx.judge(f"good? {other.content}", temperature=0, max_tokens=4)
        return Result(reward=float(len(first.content) % 2), turn_rewards=[1.0, 2.0, 3.0, 4.0], info={"judged": len(verdict)})
'''


def test_a_chat_agents_rollouts_train_with_their_own_temperatures(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3, prompts=8, agent=AGENT)
    config.data.max_len, config.agent.processes = 256, 2
    config.launch.socket_dir = str(tmp_path / "sockets")
    (tmp_path / "sockets").mkdir()
    process = start(config, tmp_path)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records] == [1, 2] and all(r["ledger_balance"] == 0 for r in records)
    assert all(r["logprob_gap_mean"] < 1e-5 and r["logprob_gap_max"] < 1e-4 for r in records)
    for step in (1, 2):
        batch = read_shard(tmp_path / "run", step)
        rollouts = len(batch.rollouts)
        assert np.bincount(batch.segment_rollout).tolist() == [3] * rollouts
        assert set(batch.segment_temperature.tolist()) == {float(np.float32(0.6)), 1.0}
        assert all(r["turns"] == 4 for r in batch.rollouts)
        assert sorted(batch.extras["extra.turn_rewards"][:, 1].tolist()) == sorted([1.0, 2.0, 3.0, 4.0] * len(batch.rollouts))
        assert set(batch.versions[batch.action_mask.astype(bool)].tolist()) == {step - 1}
