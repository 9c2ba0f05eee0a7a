"""The rollout worker of one node: its vLLM servers, its agent processes, and the broker's other end.

It asks for leases with credits, runs each as an `Episode` on an engine that serves, and sends back the rollout or the
fault. A server that dies or hangs is started again by its `Keeper` while the others go on; when the last one is given up, or
the broker is lost, the worker ends with the reason.
"""

import asyncio
import contextlib
import logging
import signal
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from molt_hpc import wire
from molt_hpc.broker.client import AsyncBrokerClient, cancel_all
from molt_hpc.config import RunConfig, load
from molt_hpc.data.media import image_reader
from molt_hpc.data.references import Producer
from molt_hpc.records import Lease, Rollout
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer, chat_server
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.rollout.episode import DataFault, EnvEpisode, Episode
from molt_hpc.rollout.isolation import AgentLate, AgentPool, AgentProcessGone
from molt_hpc.rollout.keeper import Keeper

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
        self.keepers: dict[str, Keeper] = {}
        self.agents: AgentPool | None = None
        self.chat: ChatServer | None = None
        self.leases: dict[str, tuple[asyncio.Task, Episode]] = {}
        self.tasks: set[asyncio.Task] = set()
        self.tokens = 0
        self.draining = False
        self.silence = 0.0
        """Seconds that the broker has said nothing for, as this process counts them: its own standstill is none of the broker's."""
        self.window, self.producer = Window(), Producer(run, self.name)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def main(self) -> int:
        """Run until the broker says stop (0) or a part is lost (1)."""
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._drain)
            welcome = await self.client.hello("rollout", self.name, self.attempt)
            self.window.limit = welcome["window_bytes"]
            for part in (self._receive(), self._heartbeat(), self._serve()):
                self._watch(part)
            reason = await self.ended
            log.info("the worker ends: %s", reason)
            return 0
        except (EngineError, RuntimeError, TimeoutError, ValueError) as error:
            log.error("the worker fails: %s", error)
            return 1
        finally:
            await cancel_all([*self.tasks])
            await asyncio.gather(*(k.close() for k in self.keepers.values()), *(part.close() for part in (self.agents, self.chat) if part))
            self.client.close()

    async def _serve(self) -> None:
        """Start every part, report, and keep the servers alive; ends by an error only."""
        config, per_node = self.config, self.config.vllm.num_engines // self.config.rollout.num_nodes
        for index in range(per_node):
            name = f"{self.name}_e{index}"
            seed = config.train.seed + self.node_rank * per_node + index
            make = partial(Engine, name, config, index, seed, self.logs / f"engine_{self.name}_{index}.log")
            self.keepers[name] = Keeper(name, config, make, self.client.send)
        self.agents = AgentPool(config.train.agent_path, config.agent, config.rollout.concurrency, self.logs, self.name)
        self.dialect = Dialect(await asyncio.to_thread(_load_tokenizer, config),
                               await asyncio.to_thread(image_reader, config.actor.model_name_or_path, config.output_dir))
        await self.agents.wait_ready()
        self.chat = await chat_server(config, self.dialect, self.agents.kind)
        engines = [keeper.engine for keeper in self.keepers.values()]
        seconds = await asyncio.gather(*(e.wait_healthy() for e in engines))
        log.info("%d engines are healthy after %.1f s", len(seconds), max(seconds))
        await self.client.send("ready", {"engines": {e.name: e.world_size for e in engines}})
        await self.client.send("credits", {"credits": config.rollout.concurrency})
        await asyncio.gather(*(keeper.run() for keeper in self.keepers.values()))
        raise RuntimeError(f"every engine was given up after {config.vllm.max_restarts} restarts within an hour (vllm.max_restarts); see {self.logs}")

    def _watch(self, coroutine: Any) -> asyncio.Task:
        """A background task whose error ends the worker."""
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)

        def ended(task: asyncio.Task) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and task.exception() and not self.ended.done():
                self.ended.set_exception(RuntimeError(str(task.exception())))

        task.add_done_callback(ended)
        return task

    async def _receive(self) -> None:
        while True:
            message = await self.client.receive()
            fields, self.silence = message.fields, 0.0
            if message.kind == "leases":
                for lease in fields["accepted"]:
                    self.window.release(lease)
                for lease in fields["leases"]:
                    self._start_lease(Lease.from_header(lease))
            elif message.kind == "cancel":
                if fields["lease"] in self.leases:
                    self.leases[fields["lease"]][0].cancel()
            elif message.kind in ("pause", "transfer", "resume", "abort", "drop"):
                self.keepers[fields["engine"]].command(message.kind, fields, message)
            elif message.kind == "stop":
                self._end(fields["reason"])
                return
            elif message.kind == "refused":
                raise RuntimeError(f"the broker refuses: {fields['reason']}")

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def _start_lease(self, lease: Lease) -> None:
        serving = [keeper.engine for keeper in self.keepers.values() if keeper.version is not None]
        if not serving:  # it was lost while the lease was on its way
            self._watch(self._fault(lease, "infrastructure", f"no engine of {self.name} serves", engine_lost=True))
            return
        engine = min(serving, key=lambda e: e.running)
        agent = self.agents.pick()
        agent.load += 1
        parts = (lease, self.config, self.dialect, engine, agent)
        episode = ChatEpisode(*parts, server=self.chat) if self.chat else EnvEpisode(*parts)
        self.leases[lease.id] = (self._watch(self._run_lease(episode)), episode)

    def _drain(self) -> None:
        """SIGUSR1: take nothing new, finish what is under way, say goodbye."""
        if not self.draining:
            self.draining = True
            self._watch(self._leave())

    async def _leave(self) -> None:
        log.info("draining: %d rollouts are under way", len(self.leases))
        await self.client.send("drain")
        while self.leases:
            await asyncio.wait([task for task, _ in self.leases.values()], timeout=HEARTBEAT)
        await self.window.empty(self.config.broker.heartbeat_timeout)
        await self.client.send("goodbye")
        self._end("drained")

    async def _heartbeat(self) -> None:
        """Report to the broker; a broker that has not said anything for a while is asked to, and has to."""
        patience = self.config.broker.heartbeat_timeout
        while self.silence <= patience:
            running = [episode.lease for _, episode in self.leases.values() if episode.progressed(time.monotonic() - HEARTBEAT)]
            alive = [[lease.group_id, lease.sample, lease.attempt] for lease in running]
            await self.client.send("heartbeat", {"running": sum(k.engine.running for k in self.keepers.values()), "rollouts": len(self.leases),
                                                 "sampled_tokens": self.tokens, "progress": alive, "request": int(self.silence > patience / 3)})
            await asyncio.sleep(HEARTBEAT)
            self.silence += HEARTBEAT
        raise RuntimeError(f"the broker has been silent for {patience:.0f} s (broker.heartbeat_timeout)")

    async def _run_lease(self, episode: Episode) -> None:
        """Run a lease to its end; whatever that is, the broker hears of it and gets the credit back."""
        lease = episode.lease
        try:
            await self._send_rollout(lease, await episode.run())
            self.tokens += episode.tokens
        except DataFault as fault:
            await self._fault(lease, "data", str(fault), fault.traceback)
        except AgentProcessGone as error:
            await self._fault(lease, "infrastructure", str(error))
        except EngineError as error:
            await self.keepers[episode.engine.name].check(episode.engine, str(error))
            await self._fault(lease, "infrastructure", str(error), engine_lost=bool(episode.engine.lost))
        except TimeoutError as error:
            late = isinstance(error, AgentLate)  # a slow engine is not the agent's fault
            await self._fault(lease, "data" if late else "infrastructure", f"no result within {lease.timeout:.0f} s (agent.timeout): {error}")
        except ValueError as error:
            await self._fault(lease, "data", str(error), traceback.format_exc())
        except asyncio.CancelledError:
            await self.client.send("credits", self._credit())
            raise
        finally:
            if episode.hung:
                self.agents.replace(episode.agent)
            episode.agent.load -= 1
            self.leases.pop(lease.id, None)

    def _credit(self) -> dict[str, int]:
        """What the end of a lease asks for: another one, unless this worker drains."""
        return {"credits": 0 if self.draining else 1}

    async def _send_rollout(self, lease: Lease, rollout: Rollout) -> None:
        """Send a rollout, by reference if it is large, and not before the window has room for it."""
        fields, arrays = rollout.to_wire()
        frames = wire.encode("rollout", fields | self._credit(), arrays)
        if wire.size_of(frames) > self.config.broker.inline_bytes:
            (frames,) = await asyncio.to_thread(self.producer.put, [frames])
        await self.window.take(lease.id, wire.size_of(frames))
        await self.client.send_frames(frames)

    async def _fault(self, lease: Lease, kind: str, reason: str, trace: str = "", engine_lost: bool = False) -> None:
        """engine_lost: the engine has died or hung, which is not held against this worker."""
        await self.client.send("fault", {"group_id": lease.group_id, "sample": lease.sample, "attempt": lease.attempt, "fault": kind,
                                         **self._credit(), "reason": reason, "traceback": trace, "prompt": lease.prompt.to_header(),
                                         "engine_lost": engine_lost})


class Window:
    """Bytes of rollouts that the broker has not acknowledged yet; bounded, so that its memory is."""

    def __init__(self) -> None:
        self.limit = 1 << 62
        self._sizes: dict[str, int] = {}
        self._released = asyncio.Event()

    async def take(self, lease: str, size: int) -> None:
        """Wait until `size` bytes may be sent; a message larger than the whole window goes alone."""
        while self._sizes and sum(self._sizes.values()) + size > self.limit:
            await self._next_release()
        self._sizes[lease] = size

    def release(self, lease: str) -> None:
        self._sizes.pop(lease, None)
        self._released.set()

    async def empty(self, timeout: float) -> None:
        """Wait until everything is acknowledged, or for `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._sizes:
                    await self._next_release()

    async def _next_release(self) -> None:
        self._released.clear()
        await self._released.wait()


def _load_tokenizer(config: RunConfig) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.actor.model_name_or_path)
    if config.data.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(f"{config.actor.model_name_or_path}: the tokenizer has no chat template: add one, or set data.apply_chat_template to false")
    return tokenizer


def serve(run: Path, broker: str, attempt: int, node_rank: int) -> int:
    """Be the worker of a node to the end; returns the exit code."""
    async def main() -> int:
        return await Worker(run, load(RunConfig, run / "config.toml"), broker, attempt, node_rank).main()

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(main())
    return 130
