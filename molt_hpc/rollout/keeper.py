"""One engine's place on a node: its server, what weight updates ask of it, and its restart when it dies or hangs.

The broker hears of everything that happens here: `engine_answer` for a command, `engine_gone` when the server is
lost or given up, `engine_ready` when it is up again, without weights. A server serves only between a `resume` that it has
proved and the next `pause`; the worker gives it no lease at any other time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from molt_hpc.broker.client import cancel_all
from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.rollout.update import abort_update, apply_command

log = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two looks at a server's process."""
HEALTH_TIMEOUT = 10.0
"""Seconds for a server to say that it is well after a request to it has failed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a server is started again: the first, doubled from one time to the next, at most the second."""
RESTART_WINDOW = 3600.0
"""vllm.max_restarts are counted over so many seconds."""


class Keeper:
    """Keeps one server alive. `version` is what it serves, None while it serves nothing.

    make() starts a server; send(kind, fields) reaches the broker.
    """

    def __init__(self, name: str, config: RunConfig, make: Callable[[], Engine], send: Callable[[str, dict[str, Any]], Awaitable[None]]):
        self.name, self._config, self._make, self._send = name, config, make, send
        self.engine = make()
        self.version: int | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarts: list[float] = []
        self._aborted, self._up = -1, True
        self._commands: set[asyncio.Task] = set()
        self._transfer: asyncio.Task | None = None

    async def run(self) -> None:
        """Watch the server (which is healthy) and start it again; returns when it is given up."""
        while True:
            reason = await self._until_lost()
            starting = self._may_restart()
            log.error("%s is lost%s: %s", self.name, "" if starting else " and given up", reason)
            self._up = False
            await self._tell_gone(reason, starting)
            await cancel_all([*self._commands])
            await self.engine.close(hard=True)
            if not starting or not await self._start_again():
                return

    def lose(self, reason: str) -> None:
        """Give the server up: it is killed and started anew. Nothing happens while that is being done."""
        if self._up and not self._lost.done():
            self.version, self.engine.lost = None, reason
            self._lost.set_result(reason)

    async def check(self, engine: Engine, failure: str) -> None:
        """A request to this server has failed: give it up now if it is not well, rather than when its process has ended."""
        try:
            await engine.get("/health", timeout=HEALTH_TIMEOUT)
        except EngineError as error:
            if engine is self.engine:
                self.lose(f"{failure}, and then: {error}")

    async def close(self) -> None:
        await cancel_all([*self._commands])
        await self.engine.close()

    # its life ------------------------------------------------------------------------------

    async def _until_lost(self) -> str:
        watching = [asyncio.create_task(self._watch_process()), asyncio.create_task(self._watch_progress())]
        try:
            return await self._lost
        finally:
            await cancel_all(watching)

    async def _watch_process(self) -> None:
        while self.engine.process.poll() is None:
            await asyncio.sleep(LOOK)
        self.lose(f"exited with {self.engine.process.returncode}; the end of {self.engine.log_path}:\n{self.engine.log_tail()}")

    async def _watch_progress(self) -> None:
        try:
            await self.engine.watch_progress()
        except EngineError as error:
            self.lose(str(error))

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW]
        return len(self._restarts) < self._config.vllm.max_restarts

    async def _tell_gone(self, reason: str, starting: bool) -> None:
        await self._send("engine_gone", {"engine": self.name, "reason": reason, "starting": starting})

    async def _start_again(self) -> bool:
        """Start the server until it is healthy; False if it cannot be started often enough."""
        while True:
            pause = min(FIRST_PAUSE * 2 ** len(self._restarts), LONGEST_PAUSE)
            self._restarts.append(time.monotonic())
            log.info("%s is started again in %.0f s, time %d of at most %d an hour", self.name, pause, len(self._restarts),
                     self._config.vllm.max_restarts)
            await asyncio.sleep(pause)
            self.engine, self._lost = self._make(), asyncio.get_running_loop().create_future()
            try:
                seconds = await self.engine.wait_healthy()
            except EngineError as error:
                log.error("%s did not start: %s", self.name, error)
                await self.engine.close(hard=True)
                if not self._may_restart():
                    await self._tell_gone(str(error), False)
                    return False
                continue
            log.info("%s is healthy again after %.1f s", self.name, seconds)
            self._up = True
            await self._send("engine_ready", {"engine": self.name, "world_size": self.engine.world_size})
            return True

    # weight updates ------------------------------------------------------------------------

    def command(self, kind: str, fields: dict[str, Any], message: Any) -> None:
        """The broker asks for `pause`, `transfer`, `resume`, `abort` or `drop`; the answer is sent when it is done."""
        if kind == "drop":
            self.lose(f"the broker dropped it from the update to version {fields['version']}: {fields['reason']}")
            return
        work = self._abort(fields, self._transfer) if kind == "abort" else self._carry_out(kind, fields, message)
        task = asyncio.create_task(work)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        if kind == "transfer":
            self._transfer = task

    async def _carry_out(self, kind: str, fields: dict[str, Any], message: Any) -> None:
        engine, started = self.engine, time.monotonic()
        self.version = None
        try:
            answer = await apply_command(engine, self._config, kind, fields, message)
        except (EngineError, LookupError, TypeError, ValueError) as error:  # of any other form than vLLM answers, too
            answer = {"answer": "failed", "reason": f"{kind}: {error}"}
            await self.check(engine, answer["reason"])
        if engine.lost or self._aborted >= fields["epoch"]:
            return  # who was told to stop owes no answer, and whose server is gone has another one to give
        if answer["answer"] == "failed":
            log.error("%s of version %d failed on %s: %s", kind, fields["version"], self.name, answer["reason"])
        elif kind == "resume":
            self.version = fields["version"]
        await self._answer(fields, {"seconds": {kind: time.monotonic() - started}} | answer)

    async def _abort(self, fields: dict[str, Any], transfer: asyncio.Task | None) -> None:
        """Come free of a transfer: its calls return by themselves once the trainer has given it up; a server that stays in it is hung."""
        self._aborted = fields["epoch"]
        timeout = self._config.weights.timeout
        patience = min(timeout / 3, max(timeout / 10, 5.0))
        started = time.monotonic()
        if transfer is not None and not (await asyncio.wait([transfer], timeout=patience))[0]:
            self.lose(f"did not come free of the transfer of version {fields['version']} within {patience:.0f} s")
            return
        try:
            await abort_update(self.engine, patience)
        except EngineError as error:
            self.lose(f"cannot begin the transfer of version {fields['version']} anew: {error}")
            return
        await self._answer(fields, {"answer": "aborted", "seconds": {"abort": time.monotonic() - started}})

    async def _answer(self, fields: dict[str, Any], answer: dict[str, Any]) -> None:
        await self._send("engine_answer", {"engine": self.name, "version": fields["version"], "epoch": fields["epoch"]} | answer)
