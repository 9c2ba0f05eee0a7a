"""One rollout from lease to record: reset, then turns of generate and step until the environment has ended.

Nothing is re-tokenised: the prompt is tokenised once, each turn's sampled ids are kept as they came, and only
what the environment says in between is tokenised anew.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt_hpc.config import RunConfig
from molt_hpc.records import Lease, Rollout, Segment
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.generate import Turn, generate
from molt_hpc.rollout.isolation import AgentFault, AgentProcess, AgentProcessGone


class DataFault(Exception):
    """This prompt or this agent cannot give a usable rollout; trying again elsewhere would not help."""

    def __init__(self, text: str, traceback: str = ""):
        super().__init__(text)
        self.traceback = traceback


@dataclass
class TokenStream:
    """The growing token sequence of one segment and what is known of each sampled token."""

    token_ids: list[int]
    logprobs: list[np.ndarray] = field(default_factory=list)
    action_spans: list[tuple[int, int]] = field(default_factory=list)
    version_spans: list[np.ndarray] = field(default_factory=list)

    def add_turn(self, turn: Turn) -> None:
        start = len(self.token_ids)
        self.token_ids += turn.token_ids.tolist()
        self.logprobs.append(turn.logprobs)
        self.action_spans.append((start, len(self.token_ids)))
        self.version_spans.append(turn.version_spans + np.array([start, start, 0], np.int32))

    def segment(self, temperature: float) -> Segment:
        logprobs = np.zeros(len(self.token_ids), np.float32)
        for (start, end), values in zip(self.action_spans, self.logprobs, strict=True):
            logprobs[start:end] = values
        return Segment(np.array(self.token_ids, np.int32), logprobs, np.array(self.action_spans, np.int32).reshape(-1, 2),
                       np.concatenate(self.version_spans).astype(np.int32), temperature)


class Episode:
    """Runs one lease against one engine and one agent process."""

    def __init__(self, lease: Lease, config: RunConfig, tokenizer: Any, engine: Engine, agent: AgentProcess):
        self.lease, self.config, self.tokenizer, self.engine, self.agent = lease, config, tokenizer, engine, agent
        self.started = self.last_progress = time.monotonic()
        self.tokens = 0
        self.generating = False

    def _left(self) -> float:
        return self.lease.timeout - (time.monotonic() - self.started)

    def progressed(self, since: float) -> bool:
        """Whether a turn ended, an agent's call began, or the engine sampled tokens for anybody since then."""
        return self.last_progress >= since or (self.generating and self.engine.last_progress >= since)

    async def _ask(self, op: str, state: dict[str, Any] | None = None) -> Any:
        self.last_progress = time.monotonic()
        try:
            return await self.agent.call(op, self.lease.id, state, self._left())
        except AgentFault as fault:
            raise DataFault(f"{op} raised {fault}", fault.traceback) from None

    def _prompt_text(self) -> str:
        prompt = self.lease.prompt
        if not self.config.data.apply_chat_template:
            return prompt.text
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def run(self) -> Rollout:
        """Raises DataFault, AgentProcessGone, EngineError or TimeoutError; the environment is closed in every case."""
        try:
            return await self._turns(await self._reset())
        finally:
            try:
                await self.agent.call("close", self.lease.id, None, min(10.0, max(self._left(), 1.0)))
            except (AgentFault, AgentProcessGone, ConnectionError, TimeoutError):
                pass  # the rollout's own outcome is what counts; a hanging process is replaced by the worker

    async def _reset(self) -> TokenStream:
        text = self._prompt_text()
        text = await self._ask("reset", {"observation": text, "label": self.lease.prompt.label, "seed": self.lease.seed})
        stream = TokenStream(self._tokenize(text))
        if not 0 < len(stream.token_ids) < self.config.data.max_len:
            raise DataFault(f"prompt {self.lease.prompt.id} has {len(stream.token_ids)} tokens, data.max_len is {self.config.data.max_len}")
        return stream

    async def _generate(self, stream: TokenStream, turn: int) -> Turn:
        room = self.config.data.max_len - len(stream.token_ids)
        limit = min(room, self.config.rollout.max_new_tokens or room)
        request = f"{self.lease.id}.{turn}"
        sampled = generate(self.engine, stream.token_ids, limit, self.config.rollout.temperature, self.lease.seed + turn, request)
        self.generating = True
        try:
            async with asyncio.timeout(max(self._left(), 0.0)):
                result = await sampled
        finally:
            self.generating, self.last_progress = False, time.monotonic()
        self.tokens += len(result.token_ids)
        return result

    async def _turns(self, stream: TokenStream) -> Rollout:
        reward, score, info = 0.0, None, {}
        for turn in range(1, self.config.rollout.max_turns + 1):
            observation = self.tokenizer.decode(stream.token_ids)
            sampled = await self._generate(stream, turn)
            stream.add_turn(sampled)
            action = self.tokenizer.decode(sampled.token_ids.tolist())
            step = await self._ask("step", {"observation_text": observation, "action_text": action, "label": self.lease.prompt.label,
                                            "turn": turn})
            reward, score, info = reward + step["reward"], step["score"], step["info"]
            if step["terminated"] or step["truncated"]:
                return self._rollout(stream, reward, score, info, "terminated", step["terminated"], step["truncated"], turn)
            stream.token_ids += self._tokenize(step["observation"])
            if len(stream.token_ids) >= self.config.data.max_len:
                # what was said last no longer fits: the segment ends with the tokens that were sampled
                del stream.token_ids[stream.action_spans[-1][1]:]
                return self._rollout(stream, reward, score, info, "token_limit", False, True, turn)
        return self._rollout(stream, reward, score, info, "turn_limit", False, True, self.config.rollout.max_turns)

    def _rollout(self, stream: TokenStream, reward: float, score: float | None, info: dict[str, float], stop_reason: str,
                 terminated: bool, truncated: bool, turns: int) -> Rollout:
        lease = self.lease
        rollout = Rollout(lease.group_id, lease.sample, lease.attempt, lease.prompt, [stream.segment(self.config.rollout.temperature)],
                          reward, reward if score is None else score, stop_reason, terminated, truncated, turns,
                          time.monotonic() - self.started, info)
        try:
            rollout.check()
        except ValueError as error:
            raise DataFault(f"the rollout cannot be trained on: {error}") from None
        return rollout
