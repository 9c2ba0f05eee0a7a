"""A chat server with a scripted engine in one process, its clients in another: for the scale test and for measuring its cost.

Prints one JSON line: errors, replies, segments, open descriptors, and milliseconds of the server's CPU a turn for each turn number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time

import aiohttp

from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.reply_parsing import ReplyParser
from tests.chat_templates import make_tokenizer
from tests.scripted_model import ScriptedEngine, chat_config, lease_of


async def client(args: argparse.Namespace) -> None:
    """One turn of every session at a time; standard output says when a round is over."""
    urls = json.loads(sys.stdin.readline())
    errors = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        chats = [[{"role": "user", "content": "hello"}] for _ in urls]

        async def turn(url: str, key: str, messages: list) -> int:
            body = {"model": "policy", "messages": messages, "max_tokens": 64}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                if answer.status != 200:
                    return 1
                messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "and then " * 8}]
                return 0

        for _ in range(args.turns):
            errors += sum(await asyncio.gather(*(turn(url, key, m) for (url, key), m in zip(urls, chats))))
            print(errors, flush=True)
            await asyncio.to_thread(sys.stdin.readline)


class ConstantEngine(ScriptedEngine):
    """Always the same reply, without a look at the prompt: what is measured is the server."""

    async def post(self, path: str, body: bytes) -> dict:
        await asyncio.sleep(self.latency)
        ids = self.end
        return {"choices": [{"token_ids": ids, "finish_reason": "stop", "stop_reason": None,
                             "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
                             "weight_versions": [{"start": 0, "end": len(ids), "version": "1"}]}]}


async def serve(args: argparse.Namespace) -> None:
    dialect = Dialect(make_tokenizer("qwen3"))
    engine = ConstantEngine(dialect, None, args.latency, "a reply of some words<|im_end|>")
    server = ChatServer(dialect, ReplyParser(dialect.tokenizer))
    await server.start()
    leases = [lease_of(number=i, timeout=600.0) for i in range(args.sessions)]
    episodes = [ChatEpisode(lease, chat_config(1 << 20), dialect, engine, None, server=server) for lease in leases]
    urls = [(server.open(e), e.key) for e in episodes]
    words = [sys.executable, __file__, "--client", "--turns", str(args.turns)]
    process = await asyncio.create_subprocess_exec(*words, stdin=-1, stdout=-1, limit=1 << 24)
    process.stdin.write(json.dumps(urls).encode() + b"\n")
    errors, during, costs = 0, 0, []
    for _ in range(args.turns):
        before = time.process_time()
        line = await process.stdout.readline()
        costs.append(1000 * (time.process_time() - before) / args.sessions)
        errors, during = int(line), max(during, len(os.listdir("/proc/self/fd")))
        process.stdin.write(b"\n")
    await process.wait()
    await asyncio.sleep(0.5)
    after = len(os.listdir("/proc/self/fd"))
    segments = sum(len(e.session.segments()) for e in episodes)
    replies = sum(len(e.session.nodes) for e in episodes)
    for episode in episodes:
        server.shut(episode)
    await server.close()
    print(json.dumps({"errors": errors, "replies": replies, "segments": segments, "descriptors_during": during, "descriptors_after": after,
                      "cpu_ms_a_turn": [round(c, 3) for c in costs]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    given = parser.parse_args()
    asyncio.run(client(given) if given.client else serve(given))
