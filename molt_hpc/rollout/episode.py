"""One rollout from lease to record, with an Env whose turns are driven here.

Nothing is re-tokenised: the prompt is tokenised once, each turn's sampled ids are kept as they came, and only
what the environment says in between is tokenised anew. chat_episode.py has the other kind, where the agent owns the loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from molt_hpc.config import RunConfig
from molt_hpc.data.media import has_images, images_of, map_images, stored, with_images
from molt_hpc.records import Lease, Rollout
from molt_hpc.rollout.dialect import Dialect, Message
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.rollout.generate import Seen, Turn, generate
from molt_hpc.rollout.isolation import AgentFault, AgentLate, AgentProcess, AgentProcessGone
from molt_hpc.rollout.sampling import Sampling, parse_sampling, run_sampling
from molt_hpc.rollout.session import ContextOverflow, Node, Plan, Session


class DataFault(Exception):
    """This prompt or this agent cannot give a usable rollout; trying again elsewhere would not help."""

    def __init__(self, text: str, traceback: str = ""):
        super().__init__(text)
        self.traceback = traceback


class Episode:
    """What both kinds share: the lease with its one deadline, the token tree, the way to the engine and to the agent's process.

    hung: a call did not end when it was cancelled; the agent's process has to be replaced.
    """

    def __init__(self, lease: Lease, config: RunConfig, dialect: Dialect, engine: Engine, agent: AgentProcess):
        self.lease, self.config, self.dialect, self.engine, self.agent = lease, config, dialect, engine, agent
        self.session = Session(dialect, config.data.max_len)
        self.default = run_sampling(config.rollout)
        self.started = self.last_progress = time.monotonic()
        self.tokens = self.requests = self.generating = 0
        self.hung = self.engine_late = False

    def left(self) -> float:
        """Seconds until the rollout's deadline."""
        return max(self.lease.timeout - (time.monotonic() - self.started), 0.0)

    def progressed(self, since: float) -> bool:
        """Whether a turn ended, an agent's call began, or the engine sampled tokens for anybody since then."""
        return self.last_progress >= since or (self.generating > 0 and self.engine.last_progress >= since)

    def messages(self) -> list[Message]:
        prompt = self.lease.prompt
        return prompt.messages or [{"role": "user", "content": prompt.text}]

    async def ask(self, op: str, state: dict[str, Any] | None = None) -> Any:
        """One call of the agent's code, within what is left of the deadline."""
        self.last_progress = time.monotonic()
        try:
            return await self.agent.call(op, self.lease.id, state, self.left())
        except AgentFault as fault:
            raise DataFault(f"{op} raised {fault}", fault.traceback) from None
        except AgentLate as late:
            self.hung |= late.hung
            raise

    async def sample(self, plan: Plan, sampling: Sampling, choice: int = 0, on_tokens: Callable[[list[int]], None] | None = None) -> Turn:
        """One turn after a plan's prompt, the `choice`-th for the same request; `on_tokens` hears of its tokens as they come.

        Raises EngineError, or TimeoutError at the deadline.
        """
        room = self.config.data.max_len - plan.length
        self.requests += 1
        request = f"{self.lease.id}.{self.requests}"
        seed = self.lease.seed + self.requests if sampling.seed is None else sampling.seed + choice
        self.generating += 1
        routing = {"routed_experts_prompt_start": plan.routed_from} if self.config.train.routing_replay else {}
        try:
            async with asyncio.timeout(self.left()):
                turn = await generate(self.engine, plan.prompt_json(), min(room, sampling.max_tokens or room), sampling.temperature, seed,
                                      request, on_tokens, self._seen(plan), **routing, **sampling.engine_fields())
        except TimeoutError:
            self.engine_late = True
            raise TimeoutError("the engine was still generating") from None
        finally:
            self.generating -= 1
            self.last_progress = time.monotonic()
        self.tokens += len(turn.token_ids)
        if sampling.masked and turn.kept is None:
            raise EngineError(f"{self.engine.name}, request {request}: no sampling masks, which rollout.top_k asks for")
        rows, expected = 0 if turn.routed is None else len(turn.routed), plan.length + len(turn.token_ids) - 1 - plan.routed_from
        if routing and rows != expected:
            raise EngineError(f"{self.engine.name}, request {request}: the experts of {rows} tokens, {expected} expected "
                              f"from position {plan.routed_from} on")
        return turn

    def _seen(self, plan: Plan) -> Seen | None:
        if not (images := plan.all_images()):
            return None
        return Seen([self.dialect.images.store.path(i) for i in images], *self.dialect.place(plan.prompt_ids(), images))

    async def stored(self, messages: list[Message], folder: str = "/") -> list[Message]:
        """The messages with their images in the run's store. Raises ImageError."""
        if not has_images(messages):
            return messages
        return await asyncio.to_thread(stored, self.dialect.store(), messages, folder)

    def on_the_wire(self) -> tuple[list[Message], list[str]]:
        """The prompt's messages for the agent's code, with data URIs, and these alone."""
        if not has_images(self.messages()):
            return self.messages(), []
        uris = {digest: self.dialect.store().data_uri(digest) for digest in images_of(self.messages())}
        messages = map_images(self.messages(), lambda digest: {"type": "image_url", "image_url": {"url": uris[digest]}})
        return messages, [uris[digest] for digest in images_of(self.messages())]

    async def run(self) -> Rollout:
        """Raises DataFault, AgentProcessGone, EngineError, TimeoutError or ImageError; the agent is closed in every case."""
        if self.lease.prompt.messages:
            self.lease.prompt.messages = await self.stored(self.lease.prompt.messages)
        try:
            async with asyncio.timeout(self.left()):
                await self.agent.slots.acquire()
        except TimeoutError:
            raise TimeoutError(f"agent process {self.agent.index} was busy with other rollouts") from None
        try:
            return await self.play()
        finally:
            try:
                await self.agent.call("close", self.lease.id, None, min(10.0, max(self.left(), 1.0)))
            except AgentLate as late:
                self.hung |= late.hung
            except (AgentFault, AgentProcessGone, ConnectionError, TimeoutError):
                pass  # the rollout's own outcome is what counts
            self.agent.slots.release()

    async def play(self) -> Rollout:
        raise NotImplementedError

    def rollout(self, result: dict[str, Any], stop_reason: str, turn_rewards: list[float] | None) -> Rollout:
        """The record. result: reward, score, info, terminated, truncated. turn_rewards: one for each sampled reply."""
        lease, segments, replies = self.lease, self.session.segments(), len(self.session.nodes)
        if turn_rewards is not None:
            if len(turn_rewards) != replies:
                raise DataFault(f"the agent gave {len(turn_rewards)} turn_rewards for {replies} sampled replies")
            owners = iter(self.session.span_owners())
            for segment in segments:
                ends = [(end - 1, turn_rewards[next(owners)]) for _, end in segment.action_spans]
                segment.extras["turn_rewards"] = np.array(ends, np.float64)
        reward, score = result["reward"], result["score"]
        rollout = Rollout(lease.group_id, lease.sample, lease.attempt, lease.prompt, segments, reward, reward if score is None else score,
                          stop_reason, result["terminated"], result["truncated"], replies, time.monotonic() - self.started, result["info"])
        try:
            rollout.check()
        except ValueError as error:
            raise DataFault(f"the rollout cannot be trained on: {error}") from None
        return rollout


class EnvEpisode(Episode):
    """Reset, then turns of sample and step until the environment has ended."""

    async def play(self) -> Rollout:
        prompt, images = await self._reset()
        plan = self._plan(None, prompt, images)
        if plan is None:
            raise DataFault(f"prompt {self.lease.prompt.id} has {len(prompt)} tokens, data.max_len is {self.config.data.max_len}")
        seen, rewards, sampling, total = self.dialect.text(prompt), [], self.default, 0.0
        for number in range(1, self.config.rollout.max_turns + 1):
            turn = await self.sample(plan, sampling)
            node = self.session.commit(plan, turn, sampling.temperature)
            action = self.dialect.text(turn.token_ids.tolist())
            used = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
            reply = self.dialect.text(turn.token_ids[:-1].tolist()) if node.stop is not None else action
            step = await self.ask("step", {"observation_text": seen, "action_text": action, "reply_text": reply, "turn": number,
                                           "label": self.lease.prompt.label, "sampling_params": used})
            rewards.append(step["reward"])
            total += step["reward"]
            ended = step["terminated"] or step["truncated"]
            added, images = ([], []) if ended else await self._observation(node, action, step["observation"], step["images"])
            plan = None if ended else self._plan(node, added, images)
            if plan is None or number == self.config.rollout.max_turns:
                reason = "terminated" if ended else "token_limit" if plan is None else "turn_limit"
                step |= {"reward": total} | ({} if ended else {"truncated": True})
                return self.rollout(step, reason, rewards)
            seen += action + self.dialect.text(added)
            sampling = parse_sampling(step["sampling_params"] or {}, self.default)
        raise AssertionError("rollout.max_turns is at least 1")

    def _plan(self, parent: Node | None, ids: list[int], images: list[str]) -> Plan | None:
        """None if there is no room for another token."""
        try:
            return self.session.plan_ids(parent, ids, images)
        except ContextOverflow:
            return None

    async def _reset(self) -> tuple[list[int], list[str]]:
        """(ids, images) of the prompt."""
        prompt, templated = self.lease.prompt, self.config.data.apply_chat_template
        text = self.dialect.render(self.messages(), prompt.tools) if templated else prompt.text
        messages, uris = self.on_the_wire()
        answer = await self.ask("reset", {"observation": text, "messages": messages, "images": uris, "label": prompt.label,
                                          "seed": self.lease.seed, "options": prompt.options})
        if isinstance(answer, str):
            return self.dialect.ids(answer), images_of(self.messages())
        messages = await self.stored(answer)
        return self.dialect.ids(self.dialect.render(messages, prompt.tools)), images_of(messages)

    async def _observation(self, node: Node, action: str, observation: Any, images: list[Any]) -> tuple[list[int], list[str]]:
        """(ids, images) of what the environment says, as `Env.step` describes it."""
        given = images_of(await self.stored([{"role": "user", "content": with_images("", images)}])) if images else []
        if isinstance(observation, list) and all(isinstance(i, int) for i in observation):
            return observation, given
        if isinstance(observation, str):
            opening = self.dialect.opening.strip()
            if not (observation or given) or not self.config.data.apply_chat_template or (opening and opening.splitlines()[0] in observation):
                return self.dialect.ids(observation), given
            observation = [{"role": "user", "content": with_images(observation, given)}]
        elif given:
            raise DataFault("step gave messages and images: put the images into the messages' content")
        if not (isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation)):
            raise DataFault(f"step gave an observation of type {type(observation).__name__}: expected text, messages or token ids")
        observation = observation if given else await self.stored(observation)
        results = [m for m in observation if m["role"] == "tool"]
        calls = [{"id": m.get("tool_call_id", f"call_{i}"), "type": "function", "function": {"name": m.get("name", "f"), "arguments": {}}}
                 for i, m in enumerate(results)]
        reply = {"role": "assistant", "content": action} | ({"tool_calls": calls} if calls else {})
        for stop in dict.fromkeys([node.stop, None]):  # another end of turn than the template's stays, and gets the template's behind it
            if (ids := self.dialect.seam(reply, stop, observation, bool(self.lease.prompt.tools))) is not None:
                return ids, images_of(observation)
        raise DataFault("the model's chat template cannot go on from this reply with the messages that step gave as observation")
