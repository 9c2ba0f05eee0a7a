"""What an agent is: an `Env`, whose turns the framework drives, or a `ChatAgent`, which talks to a chat server itself.

The shape is labs-molt's, so that an agent file written for it runs after `molt.agents` is renamed to `molt_hpc.agents`.
Habits are Gymnasium's: seed and options come with reset, `terminated` (the task is over) and `truncated` (a limit
cut it short) are two things, and `close` is always called.
"""

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """What a step of an Env, or a whole ChatAgent run, gives back.

    reward: a number; an Env's are added up. observation (Env): what the policy sees next, see `Env.step`. info: numbers become
    metrics (`info_<name>`, mean per rollout). score: the rollout's quality for pass rates; unset, it is the reward. images
    (Env): what the policy sees next, as bytes, data URIs, paths or PIL images; in a text observation they take the places of its
    <image> marks, or stand in front of it. sampling_params (Env): a dict for the next turn, any of temperature, max_tokens,
    stop, stop_token_ids, seed. turn_rewards (ChatAgent): one number for each sampled reply, in the order of their requests;
    an Env's are its steps' rewards. reinforce and gae credit each turn with its own, and the last one with what remains of the reward.
    """

    reward: float = 0.0
    observation: str | list[int] | list[dict[str, Any]] = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    images: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None
    turn_rewards: list[float] | None = None


@dataclass
class SamplingParams:
    """The run's sampling settings; max_tokens caps one turn, None: what the context leaves."""

    temperature: float
    max_tokens: int | None
    top_p: float = 1.0


class Env:
    """A task for one rollout; a fresh instance is made for each, and `close` is always called.

    Methods may be plain or `async`. They run in an agent process of their own, so blocking code holds up only
    the rollouts of that process.
    """

    def reset(self, state: dict[str, Any]) -> Any:
        """Called once with {observation: the rendered prompt, messages, images (data URIs), label, seed, options}.

        seed: of this rollout, options: the prompt row's column of that name. Returns the prompt: a text taken as it is, a list
        of messages that the model's template renders, or a dict that holds one of them as `observation`; a tuple's first element
        counts (Gymnasium's info is not used). The default keeps what the prompt file says.
        """
        return state["observation"]

    def step(self, state: dict[str, Any]) -> Result:
        """Called after each turn with {observation_text, action_text, reply_text, label, turn, sampling_params}.

        action_text holds the special token that ended the turn, reply_text does not; observation_text is all before it. The
        result's observation is what the policy sees next: text becomes a user message, with the seams that the model's template
        puts around it; text that opens the next turn itself (labs-molt's habit) and everything without data.apply_chat_template
        is taken as it is; a list of messages (tool results, for instance) is rendered; a list of numbers are exactly these tokens. In a
        text or tokens taken as they are, the model's placeholder stands once for each of the result's images.
        """
        raise NotImplementedError(f"{type(self).__name__}.step(state) -> Result is missing")

    def close(self) -> None:
        """Called once at the end, also after an error and before a reset that failed."""


@dataclass
class ChatContext:
    """What a ChatAgent gets: its task and the address of its model.

    Point an OpenAI client at `base_url`, an Anthropic client at `session_url`, with `api_key`; every reply is recorded token by
    token and trained. images: the prompt's, as data URIs, which stand in `messages` too. `judge_url` is the same model (OpenAI)
    outside the record, with all sampling options.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt: str
    label: Any
    images: list[Any] | None
    base_url: str
    session_url: str
    judge_url: str
    model_name: str
    api_key: str
    session_id: str
    sampling_params: SamplingParams
    max_length: int
    seed: int
    options: dict[str, Any] | None = None

    def environment(self) -> dict[str, str]:
        """Environment variables that point a harness in a process of its own, on either wire, at this rollout's model."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "ANTHROPIC_BASE_URL": self.session_url,
                "ANTHROPIC_API_KEY": self.api_key}

    async def judge(self, messages: str | list[dict[str, Any]], **fields: Any) -> str:
        """The text of an untrained reply of the same model; `fields` are those of a chat completion (temperature=0, ...).

        Raises RuntimeError with the server's message if the request is refused.
        """
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return await asyncio.to_thread(self._judge, {"model": self.model_name, "messages": messages} | fields)

    def _judge(self, body: dict[str, Any]) -> str:
        request = urllib.request.Request(f"{self.judge_url}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:  # no timeout: the rollout's own deadline ends this process's call
                return json.load(answer)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the judge's request was refused: {error.read().decode(errors='replace')}") from None


class ChatAgent:
    """An agent that owns its loop and speaks to the model through any OpenAI or Anthropic client, or starts a harness that does."""

    def run(self, ctx: ChatContext) -> Result:
        """Do the task once, plain or `async`, and say how it went. An exception costs the rollout, never a reward of zero."""
        raise NotImplementedError(f"{type(self).__name__}.run(ctx) -> Result is missing")

    def close(self) -> None:
        """Called once at the end, also after an error."""


class AgentRunner:
    """Names the agent of a file that defines several; a file with one Env or ChatAgent needs none."""

    kind: tuple[type, ...] = (Env, ChatAgent)

    def __init__(self, agent: type[Env | ChatAgent]):
        if not (isinstance(agent, type) and issubclass(agent, self.kind)):
            raise TypeError(f"{type(self).__name__} expects a subclass of {' or '.join(k.__name__ for k in self.kind)}, got {agent!r}")
        self.agent = agent


class StepEnvRunner(AgentRunner):
    """`class AgentRunner(StepEnvRunner): def __init__(self): super().__init__(MyEnv)`."""

    kind = (Env,)


class ChatAgentRunner(AgentRunner):
    """The same for a ChatAgent."""

    kind = (ChatAgent,)
