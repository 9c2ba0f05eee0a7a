"""The process in which user code runs: one agent file, many rollouts.

It is handed one end of a socket pair and does what the worker says: reset, step and close an environment, or run and close a
chat agent. It can be killed at any time; nothing of value lives here.
"""

import argparse
import asyncio
import inspect
import resource
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from molt_hpc.agents.base import ChatAgent, ChatContext, Env, Result, SamplingParams
from molt_hpc.agents.loader import load_agent
from molt_hpc.data.media import map_images, parts_of, portable

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
    """All agents of this process; blocking methods run on threads."""

    def __init__(self, agent: type[Env | ChatAgent], threads: int):
        self._agent = agent
        self._live: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(threads)

    async def _run(self, method: Any, *args: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        running = asyncio.get_running_loop().run_in_executor(self._threads, method, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await running  # a thread cannot be cancelled: the answer must not say that it has ended before it has
            raise

    async def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do one thing; whatever the user's code raises comes back as text."""
        try:
            value = await self._do(message["op"], message["rollout"], message.get("state"))
            return {"call": message["call"], "value": value}
        except asyncio.CancelledError:
            return {"call": message["call"], "error": "cancelled", "traceback": ""}
        except (Exception, SystemExit) as error:
            return {"call": message["call"], "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    async def _do(self, op: str, rollout: str, state: Any) -> Any:
        if op == "close":
            agent = self._live.pop(rollout, None)
            return await self._run(agent.close) if agent is not None else None
        if op in ("reset", "run"):
            self._live[rollout] = await self._run(self._agent)
        agent = self._live[rollout]
        if op == "reset":
            return _prompt(await self._run(agent.reset, state), f"{self._agent.__name__}.reset")
        if "sampling_params" in state:
            state["sampling_params"] = SamplingParams(**state["sampling_params"])
        if op == "run":
            return _plain(await self._run(agent.run, ChatContext(**state)), f"{self._agent.__name__}.run")
        return _plain(await self._run(agent.step, state), f"{self._agent.__name__}.step")


def _prompt(value: Any, where: str) -> Any:
    value = value[0] if isinstance(value, tuple) and value else value
    value = value.get("observation") if isinstance(value, dict) else value
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)):
        return _portable(value)
    raise TypeError(f"{where} must return the prompt's text or a list of messages, it returned {type(value).__name__}")


def _portable(observation: Any) -> Any:
    """An observation whose messages, if it has any, hold images as bytes or data URIs."""
    if not (isinstance(observation, list) and any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in observation)):
        return observation
    return map_images([m | {"content": parts_of(m.get("content"))} for m in observation], lambda i: {"type": "image", "image": portable(i)})


def _plain(result: Any, where: str) -> dict[str, Any]:
    """A Result as msgpack types; numbers may come as numpy or torch scalars."""
    if not isinstance(result, Result):
        raise TypeError(f"{where} must return a Result, it returned {type(result).__name__}")
    if result.images and where.endswith(".run"):
        raise TypeError(f"{where}: a ChatAgent sends images in its messages, its Result has none")
    info = {str(k): float(v) for k, v in result.info.items() if isinstance(v, (bool, int, float)) or hasattr(v, "__float__")}
    asked = vars(result.sampling_params) if isinstance(result.sampling_params, SamplingParams) else result.sampling_params
    rewards = None if result.turn_rewards is None else [float(r) for r in result.turn_rewards]
    return {"reward": float(result.reward), "score": None if result.score is None else float(result.score), "info": info,
            "observation": _portable(result.observation), "images": [portable(image) for image in result.images or ()],
            "terminated": bool(result.terminated), "truncated": bool(result.truncated), "sampling_params": asked, "turn_rewards": rewards}


async def serve(descriptor: int, agent_path: str, threads: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    agent = load_agent(agent_path)
    host = Host(agent, threads)
    writer.write(frame({"ready": True, "kind": "chat" if issubclass(agent, ChatAgent) else "env"}))
    tasks: dict[int, asyncio.Task] = {}

    async def answer(message: dict[str, Any]) -> None:
        writer.write(_answer_frame(await host.handle(message), message["call"]))
        await writer.drain()
        tasks.pop(message["call"], None)

    while True:
        try:
            message = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return  # the worker has gone or wants this process to end
        if message["op"] == "cancel":
            if message["call"] in tasks:
                tasks[message["call"]].cancel()
        else:
            tasks[message["call"]] = asyncio.create_task(answer(message))


def _answer_frame(value: dict[str, Any], call: int) -> bytes:
    try:
        return frame(value)
    except (TypeError, ValueError, OverflowError) as error:
        return frame({"call": call, "error": f"the result holds what cannot be sent: {error}", "traceback": ""})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m molt_hpc.rollout.agent_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the socket pair")
    parser.add_argument("--agent", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--memory-mb", type=int, default=0, help="limit of this process's address space; 0: none")
    args = parser.parse_args(argv)
    if args.memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (args.memory_mb << 20, args.memory_mb << 20))
    asyncio.run(serve(args.fd, args.agent, args.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
