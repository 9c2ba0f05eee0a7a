"""Tokens/s through agent processes and the chat server, beside vLLM's own benchmark client on the same server and prompts.

Ours: the OpenAI SDK, or aiohttp as in vLLM's client, in an agent process -> chat server (token tree) -> /inference/v1/generate. The other:
vllm.benchmarks' streaming request function -> vLLM's /v1/chat/completions, its replies sent back as history in the same way. All take
turns on one server, in an order that reverses with each repetition, with the same prompts, lengths and seeds, and with an empty prefix cache.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from molt_hpc.config import RunConfig
from molt_hpc.records import Lease, Prompt
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.isolation import AgentPool
from molt_hpc.rollout.reply_parsing import ReplyParser

NEXT = "And what else is there to say about it?"
AGENT = f'''
import aiohttp
from openai import AsyncOpenAI
from molt_hpc.agents import ChatAgent, Result

class Talk(ChatAgent):
    sdk = http = None

    async def run(self, ctx):
        turns, client = ctx.label
        messages, tokens = list(ctx.messages), 0
        for _ in range(turns):
            fields = {{"model": "policy", "messages": messages, "max_tokens": ctx.sampling_params.max_tokens}}
            text, count = await (self.by_sdk if client == "openai" else self.by_http)(ctx, fields)
            tokens += count
            messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": {NEXT!r}}}]
        return Result(info={{"tokens": tokens}})

    async def by_sdk(self, ctx, fields):
        Talk.sdk = Talk.sdk or AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=None, max_retries=0)
        answer = await Talk.sdk.with_options(base_url=ctx.base_url, api_key=ctx.api_key).chat.completions.create(**fields)
        return answer.choices[0].message.content, answer.usage.completion_tokens

    async def by_http(self, ctx, fields):
        Talk.http = Talk.http or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {{"Authorization": f"Bearer {{ctx.api_key}}"}}
        async with Talk.http.post(f"{{ctx.base_url}}/chat/completions", json=fields, headers=headers, raise_for_status=True) as reply:
            answer = await reply.json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
'''


def _messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about the number {number}."}]


async def _ours(parts: tuple[Any, ...], agents: AgentPool, server: ChatServer, client: str, sessions: range, concurrency: int,
                turns: int) -> float:
    async def one(number: int) -> float:
        prompt = Prompt(number, str(number), _messages(number), label=[turns, client])
        lease = Lease(f"{number}.{turns}.{client}", number, 0, 1, prompt, 1000 * number, 0, 3600.0)
        rollout = await ChatEpisode(lease, *parts, agents.pick(), server=server).run()
        return rollout.info["tokens"]

    return await _in_turn(one, sessions, concurrency)


async def _in_turn(one: Callable[[int], Awaitable[float]], sessions: range, concurrency: int) -> float:
    """Tokens of all sessions, `concurrency` of them at a time."""
    async def lane(first: int) -> float:
        return sum([await one(number) for number in sessions[first::concurrency]])

    return sum(await asyncio.gather(*(lane(i) for i in range(concurrency))))


async def _vllms(engine: Engine, max_tokens: int, sessions: range, concurrency: int, turns: int) -> float:
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_chat_completions

    async def one(number: int) -> float:
        messages, tokens = _messages(number), 0
        for turn in range(1, turns + 1):
            fields = {"temperature": 1.0, "top_k": 0, "seed": 1000 * number + turn, "skip_special_tokens": False}
            asked = RequestFuncInput("", "http://engine/v1/chat/completions", 0, max_tokens, "policy", chat_messages=messages, extra_body=fields)
            answer = await async_request_openai_chat_completions(asked, http)
            if not answer.success:
                raise RuntimeError(f"vLLM's client failed: {answer.error}")
            tokens += answer.output_tokens
            messages = [*messages, {"role": "assistant", "content": answer.generated_text}, {"role": "user", "content": NEXT}]
        return tokens

    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(engine.socket), limit=0)) as http:
        return await _in_turn(one, sessions, concurrency)


async def _timed(talk: Awaitable[float], replies: int) -> tuple[float, float, float]:
    """(tokens/s, tokens a reply, milliseconds of this process's CPU a reply)"""
    started, cpu = time.perf_counter(), time.process_time()
    tokens = await talk
    return tokens / (time.perf_counter() - started), tokens / replies, 1000 * (time.process_time() - cpu) / replies


def _row(runs: dict[str, list[tuple[float, float, float]]]) -> dict[str, Any]:
    """Medians over the repetitions; ratios to vLLM's client are taken within each repetition."""
    row: dict[str, Any] = {}
    for name, measured in runs.items():
        ratios = [ours[0] / vllm[0] for ours, vllm in zip(measured, runs["vllm"])]
        row |= {f"{name}_ratio": median(ratios), f"{name}_ratios": [round(r, 3) for r in ratios]} if name != "vllm" else {}
        speed, length, cpu = map(median, zip(*measured))
        row |= {f"{name}_tokens_s": speed, f"{name}_tokens_a_reply": length, f"{name}_cpu_ms_a_reply": cpu}
    return row


async def _measure(config: RunConfig, folder: Path, concurrencies: list[int], turns: list[int], per_lane: int,
                   repeats: int) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    dialect = Dialect(AutoTokenizer.from_pretrained(config.actor.model_name_or_path))
    engine = Engine("bench", config, 0, 0, folder / "engine.log")
    agents = AgentPool(config.train.agent_path, config.agent, max(concurrencies), folder, "bench")
    server = ChatServer(dialect, ReplyParser(dialect.tokenizer))
    rows, number = [], 0
    try:
        await asyncio.gather(agents.wait_ready(), engine.wait_healthy(), server.start())
        await engine.post("/update_weight_version", {"new_version": "0"})
        ours = partial(_ours, (config, dialect, engine), agents, server)
        talks = {"openai": partial(ours, "openai"), "aiohttp": partial(ours, "aiohttp"),
                 "vllm": partial(_vllms, engine, config.rollout.max_new_tokens)}
        await asyncio.gather(*(talk(range(4), 4, 1) for talk in talks.values()))  # warm both paths
        for concurrency in concurrencies:
            for count in turns:
                runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in talks}
                for repeat in range(repeats):
                    sessions = range(number := number + 1000, number + concurrency * per_lane)
                    for name in sorted(talks, reverse=repeat % 2 == 1):
                        await engine.post("/reset_prefix_cache")
                        runs[name].append(await _timed(talks[name](sessions, concurrency, count), len(sessions) * count))
                rows.append({"concurrency": concurrency, "turns": count} | _row(runs))
    finally:
        await asyncio.gather(engine.close(), agents.close(), server.close())
    return rows


def measure(model: Path | None = None, concurrency: list[int] = [1, 8, 64], turns: list[int] = [1, 8, 64], max_tokens: int = 32,
            per_lane: int = 3, repeats: int = 3, kv_mib: int = 512) -> dict[str, Any]:
    """One row for each concurrency and number of turns; `model`: a Hugging Face folder with a chat template.

    openai_ and aiohttp_: ours, by the agent's client; their cpu_ms is the chat server's and the engine client's, vllm_cpu_ms the benchmark's.
    """
    if model is None:
        raise SystemExit("bench agents: --model names no Hugging Face folder with a chat template")
    with tempfile.TemporaryDirectory(prefix="molt_hpc_bench_") as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        config = RunConfig(output_dir=name)
        config.actor.model_name_or_path, config.train.agent_path = str(model), str(folder / "agent.py")
        config.data.max_len = 64 + max(turns) * (max_tokens + 64)
        config.rollout.max_new_tokens, config.weights.backend, config.vllm.dtype = max_tokens, "gloo", "float32"
        config.vllm.kv_cache_memory_bytes = kv_mib << 20
        return {"rows": asyncio.run(_measure(config, folder, concurrency, turns, per_lane, repeats))}
