"""The records of the data path: what a prompt, a lease, a segment and a rollout hold.

Token identity is the first contract: the ids that the engine sampled are the ids trained on,
so a segment carries them as they were, with one log-prob and one weights version for each
sampled token. Position t of every per-token array belongs to token t.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Prompt:
    """One row of the prompt file. `ordinal` counts prompts in training order over all epochs."""

    ordinal: int
    id: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    label: Any = None
    source: str = ""
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] | None = None

    def to_header(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Lease:
    """The right and duty to produce one rollout: sample `sample` of group `group_id`, try number `attempt`."""

    id: str
    group_id: int
    sample: int
    attempt: int
    prompt: Prompt
    seed: int
    minimum_version: int
    timeout: float

    def to_header(self) -> dict[str, Any]:
        return vars(self) | {"prompt": self.prompt.to_header()}

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> "Lease":
        return cls(**(header | {"prompt": Prompt(**header["prompt"])}))


@dataclass
class Segment:
    """One token sequence that the engine saw.

    token_ids: int32 [T]. logprobs: float32 [T], the engine's log-prob of each sampled token, 0
    elsewhere. action_spans: int32 [A, 2], half-open ranges of sampled tokens. version_spans:
    int32 [V, 3], rows (start, end, version) that cover every sampled token. temperature: the one
    that sampled them. extras: what only some runs have, by name; the first axis is as long as the
    segment needs it: turn_rewards float64 [A, 2], for each action span its last token and its reward;
    images uint8 [M, 32], SHA-256 of each, and image_spans int32 [M, 2], their ranges of tokens.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    action_spans: np.ndarray
    version_spans: np.ndarray
    temperature: float
    extras: dict[str, np.ndarray] = field(default_factory=dict)

    def action_mask(self) -> np.ndarray:
        """bool [T], True on sampled tokens."""
        mask = np.zeros(len(self.token_ids), bool)
        for start, end in self.action_spans:
            mask[start:end] = True
        return mask

    def versions(self) -> np.ndarray:
        """int32 [T]: the weights version that sampled each token, -1 elsewhere."""
        versions = np.full(len(self.token_ids), -1, np.int32)
        for start, end, version in self.version_spans:
            versions[start:end] = version
        return versions

    def check(self) -> None:
        """Raise ValueError with the reason if this segment must not be trained on."""
        length, mask, versions = len(self.token_ids), self.action_mask(), self.versions()
        if len(self.logprobs) != length:
            raise ValueError(f"{len(self.logprobs)} log-probs for {length} tokens")
        if not mask.any():
            raise ValueError("no sampled token")
        if mask[0]:
            raise ValueError("the first token is sampled: it has no context to be predicted from")
        if not np.isfinite(self.logprobs[mask]).all():
            raise ValueError("a log-prob is not finite")
        if ((versions >= 0) != mask).any():
            raise ValueError("version spans do not cover exactly the sampled tokens")


def join_extras(segments: list[Segment]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (the segments' values end to end along axis 0, int64 [S] rows of each segment: 0 where it has none)."""
    joined = {}
    for name in sorted({name for segment in segments for name in segment.extras}):
        lengths = [len(segment.extras.get(name, ())) for segment in segments]
        joined[name] = np.concatenate([s.extras[name] for s in segments if name in s.extras]), np.array(lengths, np.int64)
    return joined


@dataclass
class Rollout:
    """One finished run of the agent on one prompt; its segments share reward and score.

    stop_reason: `terminated` (the agent ended), `turn_limit` (rollout.max_turns) or `token_limit` (data.max_len).
    """

    group_id: int
    sample: int
    attempt: int
    prompt: Prompt
    segments: list[Segment]
    reward: float
    score: float
    stop_reason: str
    terminated: bool
    truncated: bool
    turns: int
    seconds: float
    info: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        if not self.segments:
            raise ValueError("no segment")
        if not np.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}")
        for segment in self.segments:
            segment.check()

    def to_wire(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(header fields, named arrays); segments are laid end to end, `segment_lengths` cuts them."""
        header = {k: getattr(self, k) for k in ("group_id", "sample", "attempt", "reward", "score", "stop_reason",
                                               "terminated", "truncated", "turns", "seconds", "info")}
        versions = np.concatenate([s.version_spans[:, 2] for s in self.segments])
        header |= {"prompt": self.prompt.to_header(), "temperatures": [s.temperature for s in self.segments],
                   "sampled_tokens": int(sum(s.action_mask().sum() for s in self.segments)),
                   "version_min": int(versions.min()), "version_max": int(versions.max())}
        arrays = {"segment_lengths": np.array([[len(s.token_ids), len(s.action_spans), len(s.version_spans)] for s in self.segments], np.int32)}
        for name in ("token_ids", "logprobs", "action_spans", "version_spans"):
            arrays[name] = np.concatenate([getattr(s, name) for s in self.segments])
        for name, (values, lengths) in join_extras(self.segments).items():
            arrays |= {f"extra.{name}": values, f"extra_lengths.{name}": lengths}
        return header, arrays

    @classmethod
    def from_wire(cls, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> "Rollout":
        segments, at = [], np.zeros(3, np.int64)
        for lengths, temperature in zip(arrays["segment_lengths"], header["temperatures"], strict=True):
            to = at + lengths
            segments.append(Segment(arrays["token_ids"][at[0]:to[0]], arrays["logprobs"][at[0]:to[0]],
                                    arrays["action_spans"][at[1]:to[1]], arrays["version_spans"][at[2]:to[2]], temperature))
            at = to
        for name in (name.removeprefix("extra.") for name in arrays if name.startswith("extra.")):
            parts = np.split(arrays[f"extra.{name}"], np.cumsum(arrays[f"extra_lengths.{name}"])[:-1])
            for segment, values in zip(segments, parts, strict=True):
                segment.extras |= {name: values} if len(values) else {}
        fields = {k: header[k] for k in ("group_id", "sample", "attempt", "reward", "score", "stop_reason",
                                         "terminated", "truncated", "turns", "seconds", "info")}
        return cls(prompt=Prompt(**header["prompt"]), segments=segments, **fields)
