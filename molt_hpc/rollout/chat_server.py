"""The chat server of one rollout worker: OpenAI's and Anthropic's routes on loopback, a URL and a key for each rollout.

    /s/<name>/v1/chat/completions, /completions, /models      OpenAI; base_url is the part up to /v1
    /s/<name>/v1/messages, /messages/count_tokens             Anthropic; base_url is the part before /v1
    /s/<name>/judge/v1/...                                    the same model, not recorded, with all sampling options

A reply is recorded when the engine has sampled all of it; a client that goes away before that leaves no trace.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from molt_hpc.config import RunConfig
from molt_hpc.data.media import ImageError
from molt_hpc.rollout import chat_anthropic, chat_openai
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_openai import Reply, Request
from molt_hpc.rollout.chat_stream import PING, EventStream
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import EngineError, RequestRefused
from molt_hpc.rollout.generate import Turn
from molt_hpc.rollout.reply_parsing import ReplyParser
from molt_hpc.rollout.sampling import Unsupported, parse_sampling
from molt_hpc.rollout.session import ContextOverflow, Plan, Session

log = logging.getLogger(__name__)

BODY_LIMIT = 64 << 20
REPLAYS = 8
"""Answers of a rollout that are kept for clients that ask again because theirs got lost."""


class Refusal(Exception):
    """An answer that is an error; the client's SDK raises the class that goes with the status."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param


@dataclass(frozen=True)
class Wire:
    """The functions that make one route out of the common path. head: events in front of the first piece of text."""

    parse: Callable[[dict[str, Any]], Request]
    body: Callable[..., dict[str, Any]]
    events: Callable[..., Any]
    ping: bytes
    head: int
    anthropic: bool = False


WAITING = b": waiting\n\n"
WIRES = {"chat/completions": Wire(chat_openai.parse_chat, chat_openai.chat_body, chat_openai.chat_events, WAITING, 1),
         "completions": Wire(chat_openai.parse_completion, chat_openai.completion_body, chat_openai.completion_events, WAITING, 0),
         "messages": Wire(chat_anthropic.parse_messages, chat_anthropic.message_body, chat_anthropic.message_events,
                          chat_anthropic.event("ping"), 2, True)}


class ChatServer:
    """`start`, then `open` and `shut` for each rollout, `close` at the end; one for a worker."""

    def __init__(self, dialect: Dialect, parser: ReplyParser):
        self.dialect, self.parser, self.url = dialect, parser, ""
        self.ping = PING
        self._episodes: dict[str, ChatEpisode] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_LIMIT)
        for scope in ("", "/judge"):
            root = "/s/{name}" + scope + "/v1/"
            for path in WIRES:
                app.router.add_post(root + path, self._route(self._reply, path, scope))
            app.router.add_post(root + "messages/count_tokens", self._route(self._count, "messages", scope))
            app.router.add_get(root + "models", self._route(self._models, "", scope))
            app.router.add_get(root + "models/{model}", self._route(self._models, "", scope))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, episode: ChatEpisode) -> str:
        """Let a rollout's agent in; returns its session URL."""
        self._episodes[episode.name] = episode
        return f"{self.url}/s/{episode.name}"

    def shut(self, episode: ChatEpisode) -> None:
        """Let it in no more; what is being sampled for it is cancelled."""
        self._episodes.pop(episode.name, None)
        for work in episode.work:
            work.cancel()

    # one request ---------------------------------------------------------------------------

    def _route(self, handler: Callable[..., Any], path: str, scope: str) -> Callable[..., Any]:
        anthropic = path == "messages"

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request, self._admit(request), path, scope == "")
            except Exception as error:
                refusal = _refusal(error)
                if refusal is None:
                    raise
                body = chat_anthropic.error_body(refusal.status, str(refusal)) if anthropic else \
                    chat_openai.error_body(str(refusal), refusal.kind, refusal.param, refusal.code)
                return web.json_response(body, status=refusal.status)

        return handle

    def _admit(self, request: web.Request) -> ChatEpisode:
        episode = self._episodes.get(request.match_info["name"])
        if episode is None:
            raise _ended()
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(key.encode(), episode.key.encode()):
            raise Refusal(401, "wrong key: use the api_key of this rollout's context", "authentication_error", "invalid_api_key")
        return episode

    async def _models(self, request: web.Request, episode: ChatEpisode, path: str, trained: bool) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "molt_hpc", "max_model_len": episode.config.data.max_len}
        name = request.match_info.get("model")
        if name not in (None, "policy"):
            raise Refusal(404, f"there is no model {name!r}, only 'policy'", code="model_not_found", param="model")
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _count(self, request: web.Request, episode: ChatEpisode, path: str, trained: bool) -> web.Response:
        wanted = chat_anthropic.parse_messages(self._json(await request.read()), counting=True)
        wanted.messages = await episode.stored(wanted.messages, episode.config.agent.image_folder)
        try:
            count = episode.session.plan(wanted.messages, wanted.tools, wanted.options).length
        except ContextOverflow as overflow:
            count = overflow.tokens
        return web.json_response({"input_tokens": count})

    def _json(self, raw: bytes) -> dict[str, Any]:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refusal(400, "the request is not a JSON object")
        if body.get("model") not in (None, "policy"):
            raise Refusal(404, f"there is no model {body['model']!r}, only 'policy'", code="model_not_found", param="model")
        return body

    async def _reply(self, request: web.Request, episode: ChatEpisode, path: str, trained: bool) -> web.StreamResponse:
        wire, raw = WIRES[path], await request.read()
        wanted = wire.parse(self._json(raw))
        self._check(wanted, trained and not episode.default.masked)
        wanted.messages = await episode.stored(wanted.messages, episode.config.agent.image_folder)
        mark = request.headers.get("Idempotency-Key") or hashlib.sha256(path.encode() + raw).hexdigest()
        again = "Idempotency-Key" in request.headers or int(request.headers.get("x-stainless-retry-count", 0)) > 0
        if again and mark in episode.answers:
            prompt_tokens, replies = episode.answers[mark]
            return await EventStream(request, wire, wanted, prompt_tokens, self.dialect).finish(replies)
        session = episode.session if trained else Session(self.dialect, episode.config.data.max_len)
        plan = self._plan(session, wanted)
        sampling = parse_sampling(wanted.sampling, episode.default, trained)
        if episode.name not in self._episodes:
            raise _ended()
        live = wanted.stream and wanted.n == 1 and not (wanted.parse_calls and self.parser.changes(wanted.tools))
        hold = max((len(text) for text in sampling.stop), default=1) - 1
        stream = EventStream(request, wire, wanted, plan.length, self.dialect, live, hold)
        work = asyncio.ensure_future(self._sample(episode, session, plan, wanted, sampling, trained, stream.ids.extend if live else None))
        episode.work.add(work)
        work.add_done_callback(episode.work.discard)
        try:
            if wanted.stream:
                await stream.follow(work, self.ping)
            await asyncio.wait([work])
        finally:
            work.cancel()  # nothing if it is done; if the client has gone, so is what it asked for
        error = _ended() if work.cancelled() else work.exception()
        if error is not None:
            if stream.response is None:
                raise error
            return await stream.fail(error)
        replies = work.result()
        episode.answers[mark] = (plan.length, replies)
        if len(episode.answers) > REPLAYS:
            del episode.answers[next(iter(episode.answers))]
        return await stream.finish(replies)

    def _check(self, wanted: Request, unrestricted: bool) -> None:
        """Raise Unsupported for what cannot be done here. unrestricted: training assumes that every token could be sampled."""
        if wanted.tools and wanted.parse_calls and not self.parser.finds_tools:
            raise Unsupported("tools", "tools need agent.tool_parser, the name of vLLM's parser for this model's tool calls")
        if wanted.tool_choice not in ("auto", "none"):
            if unrestricted:
                raise Unsupported("tool_choice", f"tool_choice={json.dumps(wanted.tool_choice)} forces tokens, which training cannot undo "
                                  "without sampling masks (rollout.top_k): only auto and none")
            wanted.sampling["structured_outputs"] = self.parser.grammar(wanted.tools, wanted.tool_choice)
        for name in wanted.options:
            if name not in (self.dialect.tokenizer.chat_template or ""):
                raise Unsupported(name, f"{name}: the model's chat template has no such switch")

    def _plan(self, session: Session, wanted: Request) -> Plan:
        if wanted.prompt is None:
            return session.plan(wanted.messages, wanted.tools, wanted.options)
        if isinstance(wanted.prompt, str):
            return session.plan_text(wanted.prompt)
        if not all(0 <= i < len(self.dialect.tokenizer) for i in wanted.prompt):
            raise Unsupported("prompt", f"prompt: expected token ids from 0 to {len(self.dialect.tokenizer) - 1}")
        return session.plan_text(self.dialect.text(wanted.prompt))

    async def _sample(self, episode: ChatEpisode, session: Session, plan: Plan, wanted: Request, sampling: Any,
                      trained: bool, on_tokens: Callable[[list[int]], None] | None) -> list[Reply]:
        """All n replies, recorded once the last one is there."""
        tasks = [asyncio.ensure_future(episode.sample(plan, sampling, i, on_tokens)) for i in range(wanted.n)]
        try:
            turns = await asyncio.gather(*tasks)
        except RequestRefused:
            raise
        except EngineError as error:
            episode.engine_error = error
            raise
        finally:
            for task in tasks:
                task.cancel()
        episode.engine_error = None
        replies = [self._shown(turn, wanted) for turn in turns]
        for turn, reply in zip(turns, replies, strict=True):
            if trained:
                session.commit(plan, turn, sampling.temperature, reply.message, reply.stopped_by or "")
        return replies

    def _shown(self, turn: Turn, wanted: Request) -> Reply:
        ids = turn.token_ids.tolist()
        ids = ids[:-1] if turn.stop_token() is not None else ids
        text, stopped_by = self.dialect.text(ids), turn.stop_reason if isinstance(turn.stop_reason, str) else None
        text = text.split(stopped_by)[0] if stopped_by else text
        message = self.parser.parse(text, wanted.tools) if wanted.parse_calls else {"role": "assistant", "content": text}
        tokens = [(self.dialect.text([i]), float(p)) for i, p in zip(ids, turn.logprobs)] if wanted.logprobs else []
        return Reply(message, "tool_calls" if message.get("tool_calls") else turn.finish_reason, stopped_by, tokens, len(turn.token_ids))


async def chat_server(config: RunConfig, dialect: Dialect, kind: str) -> ChatServer | None:
    """A started server if the agent is a ChatAgent (kind `chat`). Raises ValueError for settings that do nothing or cannot work."""
    agent = config.agent
    if kind == "env":
        if agent.tool_parser or agent.reasoning_parser or agent.image_folder:
            raise ValueError("agent.tool_parser, agent.reasoning_parser and agent.image_folder have no effect: the agent file defines an Env, "
                             "not a ChatAgent")
        return None
    if not dialect.tokenizer.chat_template or not config.data.apply_chat_template:
        raise ValueError("a ChatAgent needs data.apply_chat_template and a tokenizer with a chat template")
    server = ChatServer(dialect, await asyncio.to_thread(ReplyParser, dialect.tokenizer, agent.tool_parser, agent.reasoning_parser))
    await server.start()
    return server


def _ended() -> Refusal:
    return Refusal(403, "this rollout has ended, or never was", "permission_error", "rollout_ended")


def _refusal(error: Exception) -> Refusal | None:
    """The answer for what went wrong; None for a fault of ours."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextOverflow):
        return Refusal(400, f"prompt is too long: {error.tokens} tokens > {error.limit - 1} maximum. This model's maximum context "
                       f"length is {error.limit} tokens", code="context_length_exceeded", param="messages")
    if isinstance(error, Unsupported):
        return Refusal(400, str(error), param=error.param)
    if isinstance(error, ImageError):
        return Refusal(400, str(error), code="invalid_image", param="messages")
    if isinstance(error, TimeoutError):
        return Refusal(403, "the rollout's deadline has passed", "permission_error", "rollout_ended")
    if isinstance(error, RequestRefused):
        return Refusal(400, f"the model server refused the request: {error}")
    if isinstance(error, EngineError):
        return Refusal(500, f"the model server failed: {error}", "server_error")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refusal(413, f"the request is larger than {BODY_LIMIT} bytes")
    if isinstance(error, (ValueError, KeyError, TypeError, AttributeError)):
        log.warning("a chat request was refused: %s: %s", type(error).__name__, error, exc_info=not isinstance(error, ValueError))
        return Refusal(400, f"the request cannot be understood: {type(error).__name__}: {error}")
    return None
