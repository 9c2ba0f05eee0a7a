"""The pool of agent processes: user code that hangs or dies costs its own rollouts, nothing else.

A call that outlives its rollout's deadline is cancelled. If it does not end then, its process is killed and replaced; the other
rollouts of that process are told that it is gone and are tried again elsewhere.
"""

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from molt_hpc.config import AgentConfig
from molt_hpc.guard import guarded
from molt_hpc.rollout.agent_process import frame, read_frame

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for an agent process to import the user's file and report."""
CANCEL_GRACE = 5.0
"""Seconds that a call has for ending after it was cancelled; one that does not end blocks its process."""
MAX_CANCELLED = 16
"""Cancelled calls, which may have left threads behind, after which an idle process is replaced."""


class AgentFault(Exception):
    """The user's code raised; `traceback` is its own."""

    def __init__(self, text: str, traceback: str = ""):
        super().__init__(text)
        self.traceback = traceback


class AgentProcessGone(Exception):
    """The process died or was killed while somebody else's call hung in it."""


class AgentLate(TimeoutError):
    """A call outlived its deadline; `hung` if it did not end when it was cancelled either, so that its process is blocked."""

    def __init__(self, text: str, hung: bool):
        super().__init__(text)
        self.hung = hung


class AgentProcess:
    """One process and the calls that are under way in it; a socket pair is the only way to it.

    slots: how many rollouts it runs at once. kind: `env` or `chat`, known once it is ready.
    """

    def __init__(self, index: int, agent_path: str, concurrency: int, memory_mb: int, log_path: Path):
        self.index, self.log_path, self.load, self.gone, self.kind, self.cancelled = index, log_path, 0, "", "", 0
        self.slots = asyncio.Semaphore(concurrency)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "molt_hpc.rollout.agent_process", "--fd", str(theirs.fileno()), "--agent", agent_path,
                   "--threads", str(concurrency), "--memory-mb", str(memory_mb)]
        with theirs, open(log_path, "ab") as output:
            self.process = subprocess.Popen(guarded(command, owner=os.getpid()), stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()])
        self._writer: asyncio.StreamWriter | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(ours))

    async def _read(self, ours: socket.socket) -> None:
        """Hand answers to their calls until the process is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            self.kind = (await read_frame(reader))["kind"]
            self.ready.set_result(None)
            while True:
                answer = await read_frame(reader)
                call = self._calls.pop(answer["call"], None)
                if call is not None and not call.done():
                    call.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lose("the agent process ended")

    def lose(self, reason: str) -> None:
        """End all calls that are under way, and every later one at once."""
        self.gone = self.gone or reason
        for future in [*self._calls.values(), self.ready]:
            if not future.done():
                future.set_exception(AgentProcessGone(f"{reason} (see {self.log_path})"))
        if self.ready.done() and self.ready.exception():
            log.error("agent process %d never became ready: see %s", self.index, self.log_path)
        self._calls.clear()

    async def call(self, op: str, rollout: str, state: Any, timeout: float) -> Any:
        """Run one method of one agent. Raises AgentFault, AgentProcessGone, or AgentLate if it has not returned in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(timeout, 0.0)
        if not (await asyncio.wait([self.ready], timeout=timeout))[0]:
            raise TimeoutError(f"agent process {self.index} was not ready")
        self.ready.result()
        if self.gone:
            raise AgentProcessGone(f"{self.gone} (see {self.log_path})")
        number = next(self._numbers)
        future = self._calls[number] = loop.create_future()
        self._writer.write(frame({"call": number, "op": op, "rollout": rollout, "state": state}))
        try:
            if not (await asyncio.wait([future], timeout=deadline - loop.time()))[0]:
                self._send_cancel(number)
                raise AgentLate(f"{op} did not return", hung=not (await asyncio.wait([future], timeout=CANCEL_GRACE))[0])
        except asyncio.CancelledError:
            self._send_cancel(number)
            raise
        finally:
            self._calls.pop(number, None)
        answer = future.result()
        if "error" in answer:
            raise AgentFault(answer["error"], answer["traceback"])
        return answer["value"]

    def _send_cancel(self, number: int) -> None:
        self.cancelled += 1
        if not self.gone:
            self._writer.write(frame({"call": number, "op": "cancel", "rollout": ""}))

    def kill(self) -> None:
        """End the process (its guard ends what it started) and all calls that are under way in it."""
        if self.process.poll() is None:
            self.process.terminate()
        self._reading.cancel()
        if self._writer is not None:
            self._writer.close()


class AgentPool:
    """A fixed number of agent processes; a dead one is replaced. rollouts: how many there are at once on this worker."""

    def __init__(self, agent_path: str, config: AgentConfig, rollouts: int, logs: Path, name: str):
        self._agent_path, self._memory_mb, self._logs, self._name = agent_path, config.memory_mb, logs, name
        self._concurrency = config.concurrency or -(-rollouts // config.processes)
        self._ended: list[AgentProcess] = []
        self._processes = [self._spawn(index) for index in range(config.processes)]

    @property
    def kind(self) -> str:
        """`env` or `chat`; the pool must be ready."""
        return self._processes[0].kind

    async def wait_ready(self) -> None:
        """Wait until every process has imported the agent file. Raises RuntimeError with the reason if one cannot."""
        futures = [p.ready for p in self._processes]
        done, late = await asyncio.wait(futures, timeout=START_TIMEOUT, return_when=asyncio.FIRST_EXCEPTION)
        for process in self._processes:
            if process.ready in late or process.ready.exception():
                tail = process.log_path.read_text(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"agent process {process.index} did not report within {START_TIMEOUT:.0f} s or ended: "
                                   f"{' '.join(tail)} (see {process.log_path})")

    def _spawn(self, index: int) -> AgentProcess:
        return AgentProcess(index, self._agent_path, self._concurrency, self._memory_mb, self._logs / f"agent_{self._name}_{index}.log")

    def pick(self) -> AgentProcess:
        """The process with the fewest rollouts, replaced first if it has died."""
        process = min(self._processes, key=lambda p: p.load)
        worn = process.gone or process.process.poll() is not None or (not process.load and process.cancelled >= MAX_CANCELLED)
        return self.replace(process) if worn else process

    def replace(self, process: AgentProcess) -> AgentProcess:
        """Kill a process and start another in its place, once however many ask for it."""
        current = self._processes[process.index]
        if current is process:
            log.warning("agent process %d is replaced", process.index)
            process.kill()
            process.lose("the agent process was killed because a rollout hung in it")
            self._ended.append(process)
            current = self._processes[process.index] = self._spawn(process.index)
        return current

    async def close(self) -> None:
        """End all processes; returns when they are gone."""
        for process in self._processes:
            process.kill()
        await asyncio.gather(*(asyncio.to_thread(p.process.wait) for p in [*self._processes, *self._ended]))
