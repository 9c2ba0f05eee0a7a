"""One rollout of a ChatAgent: its code talks to the chat server of this worker, and what was sampled for it is the record."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from molt_hpc.records import Rollout
from molt_hpc.rollout.engine import EngineError
from molt_hpc.rollout.episode import DataFault, Episode
from molt_hpc.rollout.isolation import AgentLate

if TYPE_CHECKING:
    from molt_hpc.rollout.chat_server import ChatServer


class ChatEpisode(Episode):
    """The server looks it up by `name` and lets in whoever knows `key`.

    engine_error: the last one, whose client may have given up. answers: the newest, for clients that lost theirs. work: what is
    being sampled.
    """

    def __init__(self, *args: Any, server: ChatServer):
        super().__init__(*args)
        self.server = server
        self.name, self.key = secrets.token_hex(8), secrets.token_urlsafe(24)
        self.engine_error: EngineError | None = None
        self.answers: dict[str, Any] = {}
        self.work: set[asyncio.Task] = set()

    async def play(self) -> Rollout:
        url = self.server.open(self)
        try:
            result = await self.ask("run", self._context(url))
        except (DataFault, AgentLate) as fault:  # the engine's doing?
            if isinstance(fault, DataFault) and self.engine_error is not None:
                raise self.engine_error from None
            if self.engine_late or self.generating:
                raise TimeoutError("the engine was still generating") from None
            raise
        finally:
            self.server.shut(self)
        if not self.session.nodes:
            raise DataFault("the agent ended without one reply of the model")
        return self.rollout(result, "terminated", result["turn_rewards"])

    def _context(self, url: str) -> dict[str, Any]:
        prompt, rollout = self.lease.prompt, self.config.rollout
        messages, uris = self.on_the_wire()
        asked = ["".join(p["text"] for p in parts if p["type"] == "text") if isinstance(parts := m.get("content") or "", list) else parts
                 for m in messages if m["role"] == "user"]
        return {"messages": messages, "tools": prompt.tools, "prompt": asked[-1] if asked else "", "label": prompt.label,
                "images": uris or None, "base_url": f"{url}/v1", "session_url": url, "judge_url": f"{url}/judge/v1", "api_key": self.key,
                "model_name": "policy", "session_id": self.name, "max_length": self.config.data.max_len, "seed": self.lease.seed,
                "options": prompt.options, "sampling_params": {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens}}
