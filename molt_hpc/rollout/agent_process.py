"""The process in which user code runs: one agent file, many environments.

It is handed one end of a socket pair and does what the worker says: reset, step, close an environment. It can be killed at any time; nothing of value lives here.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import inspect
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from molt_hpc.agents.base import Env, Result
from molt_hpc.agents.loader import load_agent

FRAME_LIMIT = 256 << 20


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """One length-prefixed msgpack value. Raises IncompleteReadError at the end of the stream."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > FRAME_LIMIT:
        raise ValueError(f"a frame of {size} bytes, the limit is {FRAME_LIMIT}")
    return msgpack.unpackb(await reader.readexactly(size))


def frame(value: Any) -> bytes:
    raw = msgpack.packb(value)
    return len(raw).to_bytes(4, "little") + raw


class Host:
    """All environments of this process; blocking methods run on threads."""

    def __init__(self, agent: type[Env], threads: int):
        self._agent = agent
        self._envs: dict[str, Env] = {}
        self._threads = ThreadPoolExecutor(threads)

    async def _run(self, method: Any, *args: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, method, *args)

    async def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do one thing; whatever the user's code raises comes back as text."""
        try:
            value = await self._do(message["op"], message["rollout"], message.get("state"))
            return {"call": message["call"], "value": value}
        except Exception as error:
            return {"call": message["call"], "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    async def _do(self, op: str, rollout: str, state: Any) -> Any:
        if op == "reset":
            self._envs[rollout] = await self._run(self._agent)
            text = await self._run(self._envs[rollout].reset, state)
            if not isinstance(text, str):
                raise TypeError(f"{self._agent.__name__}.reset must return the prompt's text, it returned {type(text).__name__}")
            return text
        if op == "close":
            env = self._envs.pop(rollout, None)
            return await self._run(env.close) if env is not None else None
        result = await self._run(self._envs[rollout].step, state)
        if not isinstance(result, Result):
            raise TypeError(f"{self._agent.__name__}.step must return a Result, it returned {type(result).__name__}")
        return _plain(result)


def _plain(result: Result) -> dict[str, Any]:
    """A Result as msgpack types; numbers may come as numpy or torch scalars."""
    value = dataclasses.asdict(result)
    value |= {"reward": float(result.reward), "score": None if result.score is None else float(result.score)}
    value["info"] = {str(k): float(v) for k, v in result.info.items() if isinstance(v, (bool, int, float)) or hasattr(v, "__float__")}
    return value


async def serve(descriptor: int, agent_path: str, threads: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    host = Host(load_agent(agent_path), threads)
    writer.write(frame({"ready": True}))
    tasks: set[asyncio.Task] = set()

    async def answer(message: dict[str, Any]) -> None:
        writer.write(frame(await host.handle(message)))
        await writer.drain()

    while True:
        try:
            message = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return  # the worker has gone or wants this process to end
        task = asyncio.create_task(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m molt_hpc.rollout.agent_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the socket pair")
    parser.add_argument("--agent", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    asyncio.run(serve(args.fd, args.agent, args.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
