"""A real vLLM server that returns sampling masks and routed experts: what training computes with them is what the engine computed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_hpc.config import FsdpConfig
from molt_hpc.data.shards import Batch, build_batch
from molt_hpc.records import Prompt, Rollout
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.reply_parsing import ReplyParser
from molt_hpc.train.micro import TokenTable, build_micro_batch
from molt_hpc.train.model import build_model
from molt_hpc.train.routing import replayed_routers
from tests.process_run import small_config
from tests.scripted_model import lease_of

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix) / "triton"
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
USER = [{"role": "user", "content": "What is 2 + 2?"}]
LONG = [{"role": "user", "content": " ".join(f"{i} + {i} - 3?" for i in range(30))}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}


class InterpretedEngine(Engine):
    def command(self, seed: int) -> list[str]:
        command = super().command(seed)
        return [sys.executable, "-m", "tests.interpreted_vllm", *command[command.index("serve"):]]


async def talk(client: openai.AsyncOpenAI, judge: openai.AsyncOpenAI) -> None:
    async def ask(messages, who=client, **options):
        return await who.chat.completions.create(model="policy", messages=messages, **{"max_tokens": 8, **options})

    messages = list(USER)
    for options in ({}, {"top_p": 0.5, "temperature": 0.7}, {"extra_body": {"min_p": 0.05, "top_k": 20, "min_tokens": 4}}):
        answer = await ask(messages, **options)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
    async for _ in await ask(messages, stream=True):
        pass
    for _ in range(2):  # the second one finds the prompt in the prefix cache
        await ask(LONG, max_tokens=3, n=2)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = await ask(USER, max_tokens=60, response_format=schema)
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)
    answer = await ask(USER, max_tokens=300, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="the model server refused"):
        await ask(USER, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}})
    greedy = [await ask(USER, judge, temperature=0) for _ in range(2)]
    assert greedy[0].choices[0].message.content == greedy[1].choices[0].message.content


@pytest.mark.skipif(not TRITON.exists(), reason="vLLM's second model runner on a CPU needs the package triton; tests/run.sh installs it")
def test_training_gives_the_engines_log_probs_over_the_same_tokens_by_the_same_experts(tmp_path, tiny_models, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TRITON}:{ROOT}")
    folder = tiny_models("qwen3_moe")
    config = small_config(tmp_path, folder)
    config.data.max_len, config.rollout.max_new_tokens = 512, None
    config.rollout.top_p, config.rollout.top_k, config.train.routing_replay = 0.9, 300, True
    config.check()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dialect = Dialect(tokenizer)

    async def main():
        engine, server = InterpretedEngine("test", config, 0, 0, tmp_path / "engine.log"), ChatServer(dialect, ReplyParser(tokenizer, "hermes"))
        try:
            await asyncio.gather(engine.wait_healthy(), server.start())
            await engine.post("/update_weight_version", {"new_version": "7"})
            episode = ChatEpisode(lease_of(), config, dialect, engine, None, server=server)
            url = server.open(episode)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key, max_retries=0) as client:
                await talk(client, client.with_options(base_url=f"{url}/judge/v1"))
            return episode
        finally:
            await asyncio.gather(engine.close(), server.close())

    segments = asyncio.run(main()).session.segments()
    rollout = Rollout(0, 0, 0, Prompt(0, "p"), segments, 1.0, 1.0, "terminated", True, False, 1, 1.0)
    rollout.check()
    batch = Batch.from_bytes(build_batch(1, 7, [Rollout.from_wire(*rollout.to_wire())]).to_bytes())
    assert sum("routed_experts" in s.extras and "kept_ids" in s.extras for s in segments) == len(segments) >= 8
    natural = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for segment in segments:  # each token is at its own position and each layer in its own place: transformers chooses the same
        with torch.no_grad():
            found = natural(torch.tensor(segment.token_ids[None, :-1].astype(np.int64)), output_router_logits=True).router_logits
        own = np.stack([layer.topk(2, -1).indices.sort(-1).values.numpy() for layer in found], 1)
        assert (own == np.sort(segment.extras["routed_experts"], -1)).mean() > 0.995
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32"))
        model.routers = replayed_routers(model.module)
        micro = build_micro_batch(TokenTable(batch), list(range(len(segments))), model.device)
        with torch.no_grad():
            scores, _ = model.score(micro.packed)
            micro.packed.kept = None
            over_all, _ = model.score(micro.packed)
        ratios = (scores - micro["rollout"]).exp()
        assert (ratios - 1).abs().max() < 1e-5
        assert (over_all - micro["rollout"]).abs().mean() > 0.1  # which they are not over the whole vocabulary
        model = build_model(folder, "transformers", FsdpConfig(param_dtype="bfloat16"))
        gaps = []
        for routers in ([], replayed_routers(model.module)):
            model.routers = routers
            micro = build_micro_batch(TokenTable(batch), list(range(len(segments))), model.device)
            with torch.no_grad():
                gaps.append((model.score(micro.packed)[0] - micro["rollout"]).abs())
        assert gaps[1].max() < 0.5 * gaps[0].max() and gaps[1].mean() < gaps[0].mean()  # rounding moves tokens to other experts
    finally:
        dist.destroy_process_group()
