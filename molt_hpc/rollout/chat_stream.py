"""The answer to one chat request; as a stream: signs of life, pieces of the reply while it is sampled, its end, or what went wrong.

A reply that has to be parsed (tool calls, thinking) or comes with others is complete before its pieces are sent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from aiohttp import web

from molt_hpc.rollout import chat_anthropic, chat_openai
from molt_hpc.rollout.chat_openai import PIECE, Reply, Request

if TYPE_CHECKING:
    from molt_hpc.rollout.chat_server import Wire
    from molt_hpc.rollout.dialect import Dialect

PING = 10.0
"""Seconds between two signs of life while there is nothing to say."""
BEAT = 0.1
"""Seconds between two looks at what has been sampled."""


class EventStream:
    """`follow` while the reply is sampled (its tokens are appended to `ids`), then `finish` or `fail`.

    live: pieces are sent before the reply is complete. hold: characters at the end that may turn out to be a stop string.
    """

    def __init__(self, request: web.Request, wire: Wire, wanted: Request, prompt_tokens: int, dialect: Dialect, live: bool = False,
                 hold: int = 0):
        self._request, self._wire, self._wanted, self._prompt_tokens, self._dialect = request, wire, wanted, prompt_tokens, dialect
        self.live, self._hold, self._sent = live, hold, 0
        self.ids: list[int] = []
        self._text, self._decoded, self._behind = "", 0, 0
        self.answer_id, self.response = secrets.token_hex(12), None

    async def follow(self, work: asyncio.Task, ping: float) -> None:
        heard = time.monotonic()
        while not (await asyncio.wait([work], timeout=min(BEAT, ping) if self.live else ping))[0]:
            events = self._partial() if self.live else []
            if len(events) > self._sent:
                await self._write(b"".join(events[self._sent:]))
                self._sent, heard = len(events), time.monotonic()
            elif time.monotonic() - heard >= ping:
                await self._write(self._wire.ping)
                heard = time.monotonic()

    def _partial(self) -> list[bytes]:
        """The events that are certain by now: those of whole pieces, which the whole reply will begin with."""
        text = self._decode()
        count = max(len(text) - self._hold, 0) // PIECE
        if not count or self._wire.head + count <= self._sent:  # nothing that the client has not got
            return []
        reply = Reply({"role": "assistant", "content": text[:count * PIECE]}, "stop", None, [], 0)
        return list(self._wire.events(self.answer_id, self._wanted, self._prompt_tokens, [reply]))[:self._wire.head + count]

    def _decode(self) -> str:
        """The text so far, up to the last whole character. Only the ids since the last two looks are decoded: a token's text may depend
        on the one before it."""
        known, longer = (self._dialect.text(self.ids[self._behind:end]) for end in (self._decoded, len(self.ids)))
        if not longer.endswith("\ufffd"):
            self._text += longer[len(known):]
            self._behind, self._decoded = self._decoded, len(self.ids)
        return self._text

    async def finish(self, replies: list[Reply]) -> web.StreamResponse:
        """The rest of the stream, or the whole answer if none was asked for."""
        if not self._wanted.stream:
            return web.json_response(self._wire.body(self.answer_id, self._wanted, self._prompt_tokens, replies))
        events = list(self._wire.events(self.answer_id, self._wanted, self._prompt_tokens, replies))
        await self._write(b"".join(events[self._sent:]))
        await self.response.write_eof()
        return self.response

    async def fail(self, error: BaseException) -> web.StreamResponse:
        """Tell a client that has heard something already; its SDK raises APIError."""
        message = str(error) or type(error).__name__
        raw = chat_openai.event(chat_openai.error_body(message, "server_error", None, None))
        if self._wire.anthropic:
            raw = chat_anthropic.event("error", error=chat_anthropic.error_body(500, message)["error"])
        await self._write(raw)
        await self.response.write_eof()
        return self.response

    async def _write(self, raw: bytes) -> None:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await self.response.prepare(self._request)
        await self.response.write(raw)
