"""The chat server in front of a real vLLM server, with the real SDKs: what is recorded is what the model gives these tokens."""

from __future__ import annotations

import asyncio
import json

import anthropic
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.reply_parsing import ReplyParser
from tests.process_run import small_config
from tests.scripted_model import lease_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
USER = [{"role": "user", "content": "What is 2 + 2?"}]


async def talk(episode, url):
    """Conversations on both wires, streamed and not, with branches, stop strings and temperatures; returns what was judged."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key, max_retries=0)
    claude = anthropic.AsyncAnthropic(base_url=url, api_key=episode.key, max_retries=0)
    judge = client.with_options(base_url=f"{url}/judge/v1")
    messages = list(USER)
    for _ in range(4):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
    several = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8, n=3, logprobs=True, temperature=0.7)
    assert len({json.dumps([t.token for t in c.logprobs.content]) for c in several.choices}) > 1
    same = [await client.chat.completions.create(model="policy", messages=USER, max_tokens=8, seed=5) for _ in range(2)]
    assert same[0].choices[0].message.content == same[1].choices[0].message.content
    streamed = await client.chat.completions.create(model="policy", messages=USER, max_tokens=8, seed=5, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in streamed])
    assert text == same[0].choices[0].message.content
    stop = next(c for c in text[1:] if c.isascii())
    stopped = await client.chat.completions.create(model="policy", messages=USER, max_tokens=8, seed=5, stop=[stop])
    assert stopped.choices[0].message.content == text.split(stop)[0] and stopped.choices[0].finish_reason == "stop"
    first = await claude.messages.create(model="policy", max_tokens=9, messages=USER)
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "so?"}]
    async with claude.messages.stream(model="policy", max_tokens=9, messages=history) as stream:
        second = await stream.get_final_message()
    counted = await claude.messages.count_tokens(model="policy", messages=history)
    assert counted.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as overflow:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1 " * 1000}])
    assert overflow.value.code == "context_length_exceeded"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    judged = await judge.chat.completions.create(model="policy", messages=USER, max_tokens=60, temperature=0.5, response_format=schema)
    await asyncio.gather(client.close(), claude.close())
    return judged.choices[0].message.content


def test_what_both_sdks_had_sampled_has_the_log_probs_of_the_model(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3)
    config.data.max_len, config.rollout.max_new_tokens = 512, None
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    dialect = Dialect(tokenizer)

    async def main():
        engine, server = Engine("test", config, 0, 0, tmp_path / "engine.log"), ChatServer(dialect, ReplyParser(tokenizer))
        try:
            await asyncio.gather(engine.wait_healthy(), server.start())
            await engine.post("/update_weight_version", {"new_version": "7"})
            episode = ChatEpisode(lease_of(), config, dialect, engine, None, server=server)
            return episode, await talk(episode, server.open(episode))
        finally:
            await asyncio.gather(engine.close(), server.close())

    episode, judged = asyncio.run(main())
    assert json.loads(judged)["a"] in (1, 2)
    segments, sampled = episode.session.segments(), sum(len(n.turn.token_ids) for n in episode.session.nodes)
    assert sum(int(s.action_mask().sum()) for s in segments) == sampled and len(episode.session.nodes) == 13
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    for segment in segments:
        segment.check()
        mask = segment.action_mask()
        with torch.no_grad():
            logits = model(torch.tensor(segment.token_ids[None].astype(np.int64))).logits[0, :-1]
        ids = torch.tensor(segment.token_ids[1:, None].astype(np.int64))
        given = torch.log_softmax(logits / segment.temperature, -1).gather(1, ids)[:, 0].numpy()
        assert np.abs(given - segment.logprobs[1:])[mask[1:]].max() < 1e-4
        assert (segment.versions()[mask] == 7).all()
