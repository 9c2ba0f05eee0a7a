"""The pool of agent processes: user code that hangs or dies costs its own rollouts, nothing else.

A call that outlives its rollout's deadline gets its process killed and replaced; the other rollouts of
that process are told that it is gone and are tried again elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from molt_hpc.guard import guarded
from molt_hpc.rollout.agent_process import frame, read_frame

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for an agent process to import the user's file and report."""


class AgentFault(Exception):
    """The user's code raised or did not return in time; `traceback` is its own, if there is one."""

    def __init__(self, text: str, traceback: str = ""):
        super().__init__(text)
        self.traceback = traceback


class AgentProcessGone(Exception):
    """The process died or was killed while somebody else's call hung in it."""


class AgentProcess:
    """One process and the calls that are under way in it; a socket pair is the only way to it."""

    def __init__(self, index: int, agent_path: str, threads: int, log_path: Path):
        self.index, self.log_path, self.load, self.gone = index, log_path, 0, ""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "molt_hpc.rollout.agent_process", "--fd", str(theirs.fileno()), "--agent", agent_path,
                   "--threads", str(threads)]
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
            await read_frame(reader)
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
        """Run one method of one environment. Raises AgentFault, AgentProcessGone, or TimeoutError."""
        deadline = asyncio.get_running_loop().time() + max(timeout, 0.0)
        if not (await asyncio.wait([self.ready], timeout=timeout))[0]:
            raise TimeoutError(f"agent process {self.index} was not ready")
        self.ready.result()
        if self.gone:
            raise AgentProcessGone(f"{self.gone} (see {self.log_path})")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame({"call": number, "op": op, "rollout": rollout, "state": state}))
        done, _ = await asyncio.wait([future], timeout=deadline - asyncio.get_running_loop().time())
        if not done:
            self._calls.pop(number, None)
            raise TimeoutError(f"{op} did not return")
        answer = future.result()
        if "error" in answer:
            raise AgentFault(answer["error"], answer["traceback"])
        return answer["value"]

    def kill(self) -> None:
        """End the process (its guard ends what it started) and all calls that are under way in it."""
        if self.process.poll() is None:
            self.process.terminate()
        self._reading.cancel()
        if self._writer is not None:
            self._writer.close()


class AgentPool:
    """A fixed number of agent processes; a dead one is replaced."""

    def __init__(self, agent_path: str, processes: int, threads: int, logs: Path, name: str):
        self._agent_path, self._threads, self._logs, self._name = agent_path, threads, logs, name
        self._ended: list[AgentProcess] = []
        self._processes = [self._spawn(index) for index in range(processes)]

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
        return AgentProcess(index, self._agent_path, self._threads, self._logs / f"agent_{self._name}_{index}.log")

    def pick(self) -> AgentProcess:
        """The process with the fewest rollouts, replaced first if it has died."""
        process = min(self._processes, key=lambda p: p.load)
        return self.replace(process) if process.process.poll() is not None else process

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
