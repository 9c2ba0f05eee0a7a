"""An engine that says what a script tells it to, with latency; in place of a model where a tiny one cannot say what is needed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from molt_hpc.config import RunConfig
from molt_hpc.records import Lease, Prompt
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import EngineError


class ScriptedEngine:
    """`script(text of the prompt, sampling parameters)` is the text of the reply, or an exception to raise; `end` ends it.

    calls: (prompt's ids, sampling parameters, sampled ids) of every answered request.
    """

    def __init__(self, dialect: Dialect, script: Callable[[str, dict[str, Any]], str | Exception], latency: float = 0.0,
                 end: str = "<|im_end|>"):
        self.name, self.running, self.lost, self.last_progress = "scripted", 0, "", time.monotonic()
        self.dialect, self.script, self.latency, self.end = dialect, script, latency, dialect.ids(end)
        self.calls: list[tuple[list[int], dict[str, Any], list[int]]] = []

    async def stream(self, path: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The answer token by token, with half of the latency between them; the version spans come with the last one."""
        answer = await self.post(path, body)
        choice = answer["choices"][0]
        call = self.calls.pop()
        for at, token in enumerate(choice["token_ids"]):
            last = at + 1 == len(choice["token_ids"])
            await asyncio.sleep(self.latency / 2)
            self.calls += [call] if last else []
            ends = {k: choice[k] for k in ("finish_reason", "stop_reason", "weight_versions")} if last else {}
            yield answer | {"choices": [{"token_ids": [token], "logprobs": {"content": [choice["logprobs"]["content"][at]]}} | ends]}

    async def post(self, path: str, body: bytes) -> dict[str, Any]:
        assert path == "/inference/v1/generate"
        asked = json.loads(body)
        sampling = asked["sampling_params"]
        text = self.script(self.dialect.text(asked["token_ids"]), sampling)
        if self.latency:
            await asyncio.sleep(self.latency)
        if isinstance(text, Exception):
            raise text
        ids, reason, stopped = self.dialect.ids(text) + self.end, "stop", None
        for stop in sampling["stop"]:
            if stop in text:
                cut = next(i for i in range(len(ids) + 1) if stop in self.dialect.text(ids[:i]))
                ids, stopped = ids[:cut], stop
        if len(ids) > sampling["max_tokens"]:
            ids, reason, stopped = ids[:sampling["max_tokens"]], "length", None
        self.calls.append((asked["token_ids"], sampling, ids))
        self.last_progress = time.monotonic()
        seen = {}
        if parts := asked.get("content_parts"):
            full, spans = self.dialect.place(asked["token_ids"], [part["uuid"] for part in parts])
            seen = {"prompt_token_ids": full, "mm_placeholders": {"image": [{"offset": a, "length": b - a} for a, b in spans]}}
        return seen | {"choices": [{"token_ids": ids, "finish_reason": reason, "stop_reason": stopped,
                             "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
                             "weight_versions": [{"start": 0, "end": len(ids), "version": "1"}]}]}


def lease_of(messages: list[dict] | None = None, number: int = 0, label: Any = None, timeout: float = 60.0, **prompt: Any) -> Lease:
    prompt = Prompt(number, f"p{number}", messages or [{"role": "user", "content": "hello"}], label=label, **prompt)
    return Lease(f"{number}.0.1", number, 0, 1, prompt, 1000 * number, 0, timeout)


def chat_config(max_len: int = 4096, **agent: Any) -> RunConfig:
    config = RunConfig()
    config.data.max_len = max_len
    for name, value in agent.items():
        setattr(config.agent, name, value)
    return config


def failing(times: int, text: str) -> Callable[[str, dict[str, Any]], str | Exception]:
    """A script that fails so many times first."""
    left = [times]

    def script(prompt: str, sampling: dict[str, Any]) -> str | Exception:
        left[0] -= 1
        return EngineError("the server is gone") if left[0] >= 0 else text

    return script
