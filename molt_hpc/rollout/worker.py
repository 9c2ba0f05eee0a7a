"""The rollout worker of one node: its vLLM servers, its agent processes, and the broker's other end.

It asks for leases with credits, runs each as an `Episode`, sends back the rollout or the fault, and does
what the broker's weight updates ask of its engines. If a server or the broker is lost the worker ends with
the reason; it never goes on with half of its parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import time
import traceback
from pathlib import Path
from typing import Any

from molt_hpc.broker.client import AsyncBrokerClient, cancel_all
from molt_hpc.config import RunConfig, load
from molt_hpc.records import Lease
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.rollout.episode import DataFault, Episode
from molt_hpc.rollout.isolation import AgentPool, AgentProcessGone
from molt_hpc.rollout.update import apply_command

log = logging.getLogger(__name__)

HEARTBEAT = 2.0
"""Seconds between two heartbeats."""


class Worker:
    """Everything of one rollout node."""

    def __init__(self, run: Path, config: RunConfig, address: str, attempt: int, node_rank: int):
        self.run, self.config, self.attempt, self.node_rank = run, config, attempt, node_rank
        self.name = f"rollout_n{node_rank}"
        self.logs = run / "logs" / f"attempt_{attempt}"
        self.client = AsyncBrokerClient(run, address, config.broker.max_message_bytes)
        self.engines: dict[str, Engine] = {}
        self.agents: AgentPool | None = None
        self.tasks: set[asyncio.Task] = set()
        self.tokens = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def main(self) -> int:
        """Run until the broker says stop (0) or a part is lost (1)."""
        background: list[asyncio.Task] = []
        try:
            await self.client.hello("rollout", self.name, self.attempt)
            background = [self._watch(self._receive()), self._watch(self._heartbeat())]
            starting = asyncio.create_task(self._start())
            await asyncio.wait([starting, self.ended], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await cancel_all([starting])
            elif starting.exception():
                raise starting.exception()
            else:
                background.append(self._watch(self._watch_engines()))
            reason = await self.ended
            log.info("the worker ends: %s", reason)
            return 0
        except (EngineError, RuntimeError, TimeoutError, ValueError) as error:
            log.error("the worker fails: %s", error)
            return 1
        finally:
            await cancel_all([*background, *self.tasks])
            await asyncio.gather(*(e.close() for e in self.engines.values()), *([self.agents.close()] if self.agents else []))
            self.client.close()

    async def _start(self) -> None:
        config, per_node = self.config, self.config.vllm.num_engines // self.config.rollout.num_nodes
        for index in range(per_node):
            name = f"{self.name}_e{index}"
            seed = config.train.seed + self.node_rank * per_node + index
            self.engines[name] = Engine(name, config, index, seed, self.logs / f"engine_{self.name}_{index}.log")
        self.agents = AgentPool(config.train.agent_path, config.agent.processes, config.rollout.concurrency, self.logs, self.name)
        self.tokenizer = await asyncio.to_thread(_load_tokenizer, config)
        await self.agents.wait_ready()
        seconds = await asyncio.gather(*(e.wait_healthy() for e in self.engines.values()))
        log.info("%d engines are healthy after %.1f s", len(seconds), max(seconds))
        await self.client.send("ready", {"engines": {e.name: e.world_size for e in self.engines.values()}})
        await self.client.send("credits", {"count": config.rollout.concurrency})

    def _watch(self, coroutine: Any) -> asyncio.Task:
        """A background task whose error ends the worker."""
        task = asyncio.create_task(coroutine)

        def ended(task: asyncio.Task) -> None:
            if not task.cancelled() and task.exception() and not self.ended.done():
                self.ended.set_exception(RuntimeError(str(task.exception())))

        task.add_done_callback(ended)
        return task

    async def _receive(self) -> None:
        while True:
            message = await self.client.receive()
            if message.kind == "lease":
                self._spawn(self._run_lease(Lease.from_header(message.fields)))
            elif message.kind in ("pause", "transfer", "resume"):
                self._spawn(self._update(message.kind, message.fields, message))
            elif message.kind == "stop":
                if not self.ended.done():
                    self.ended.set_result(message.fields["reason"])
                return
            elif message.kind == "refused":
                raise RuntimeError(f"the broker refuses: {message.fields['reason']}")

    def _spawn(self, coroutine: Any) -> None:
        task = self._watch(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _heartbeat(self) -> None:
        while True:
            running = sum(e.running for e in self.engines.values())
            await self.client.send("heartbeat", {"running": running, "rollouts": len(self.tasks), "sampled_tokens": self.tokens})
            await asyncio.sleep(HEARTBEAT)

    async def _watch_engines(self) -> None:
        while True:
            for engine in self.engines.values():
                if engine.process.poll() is not None:
                    raise RuntimeError(f"{engine.name} exited with {engine.process.returncode}; the end of {engine.log_path}:\n{engine.log_tail()}")
            await asyncio.sleep(0.5)

    async def _update(self, command: str, fields: dict[str, Any], message: Any) -> None:
        engine = self.engines[fields["engine"]]
        base = {"engine": engine.name, "version": fields["version"], "epoch": fields["epoch"]}
        started = time.monotonic()
        try:
            answer = await apply_command(engine, self.config, command, fields, message)
        except (EngineError, ValueError) as error:
            log.error("%s of version %d failed on %s: %s", command, fields["version"], engine.name, error)
            answer = {"answer": "failed", "reason": f"{command}: {error}"}
        answer.setdefault("seconds", {command: time.monotonic() - started})
        await self.client.send("engine_answer", base | answer)

    async def _run_lease(self, lease: Lease) -> None:
        engine = min(self.engines.values(), key=lambda e: e.running)
        agent = self.agents.pick()
        agent.load += 1
        episode = Episode(lease, self.config, self.tokenizer, engine, agent)
        try:
            rollout = await episode.run()
            self.tokens += episode.tokens
            await self.client.send("rollout", *rollout.to_wire())
        except DataFault as fault:
            await self._fault(lease, "data", str(fault), fault.traceback)
        except (AgentProcessGone, EngineError) as error:
            await self._fault(lease, "infrastructure", str(error))
        except TimeoutError as error:
            # a call that hangs in user code blocks its process: replace it; a slow engine is not the agent's fault
            hung = "did not return" in str(error)
            if hung:
                self.agents.replace(agent)
            await self._fault(lease, "data" if hung else "infrastructure",
                              f"no result within {lease.timeout:.0f} s (agent.timeout): {error or 'the engine was still generating'}")
        except ValueError as error:
            await self._fault(lease, "data", str(error), traceback.format_exc())
        finally:
            agent.load -= 1
        await self.client.send("credits", {"count": 1})

    async def _fault(self, lease: Lease, kind: str, reason: str, trace: str = "") -> None:
        await self.client.send("fault", {"group_id": lease.group_id, "sample": lease.sample, "attempt": lease.attempt, "fault": kind,
                                         "reason": reason, "traceback": trace, "prompt": lease.prompt.to_header()})


def _load_tokenizer(config: RunConfig) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.actor.model_name_or_path)
    if config.data.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(f"{config.actor.model_name_or_path}: the tokenizer has no chat template: add one, or set data.apply_chat_template to false")
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m molt_hpc rollout")
    parser.add_argument("run", type=Path)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node-rank", type=int, default=0)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = load(RunConfig, args.run / "config.toml")

    async def run() -> int:
        return await Worker(args.run, config, args.broker, args.attempt, args.node_rank).main()

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run())
    return 130
