"""Trajectory shards: one safetensors file a step, written before the step is trained on.

A shard opens with plain `safetensors` and no code of this project. Its arrays:

    token_ids int32 [N]           all segments end to end
    logprobs float32 [N]          the engine's log-prob of each sampled token, 0 elsewhere
    action_mask uint8 [N]         1 on sampled tokens
    versions int32 [N]            the weights version that sampled each token, -1 elsewhere
    segment_offsets int64 [S+1]   segment s is token_ids[offsets[s]:offsets[s+1]]
    segment_rollout int32 [S]     index of the rollout that the segment belongs to
    segment_temperature float32 [S]
    rollout_reward, rollout_score float32 [R]
    rollout_group int32 [R]       index of the group
    group_ordinal int64 [G]       the prompt's ordinal
    extra.NAME [M, ...]           what only some runs have, all segments end to end
    extra_offsets.NAME int64 [S+1]  segment s has the rows offsets[s]:offsets[s+1], none where they are equal

Extras: kept_counts int32, one for each sampled token, and kept_ids int32, the ids among which these were sampled, token by token
(rollout.top_k); routed_experts uint8 or int16 [T-1, layers, k] of all tokens but the segment's last one (train.routing_replay).

The metadata (text) holds `schema`, `step`, `version` (of the weights that the step starts from) and
`rollouts`, a JSON list with id, prompt, stop reason, turns, seconds and info of each rollout.
"""

import json
import os
import uuid
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from safetensors.numpy import load as load_bytes
from safetensors.numpy import save as save_bytes

from molt_hpc.records import Rollout, join_extras

SCHEMA = 1


@dataclass
class Batch:
    """The groups of one step as flat arrays; see the module's text for shapes and meaning."""

    step: int
    version: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    action_mask: np.ndarray
    versions: np.ndarray
    segment_offsets: np.ndarray
    segment_rollout: np.ndarray
    segment_temperature: np.ndarray
    rollout_reward: np.ndarray
    rollout_score: np.ndarray
    rollout_group: np.ndarray
    group_ordinal: np.ndarray
    rollouts: list[dict]
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    """The arrays `extra.NAME` and `extra_offsets.NAME` under these names."""

    def extra(self, name: str, segment: int) -> np.ndarray | None:
        """A segment's rows of an extra, None where it has none."""
        if (offsets := self.extras.get(f"extra_offsets.{name}")) is None or offsets[segment] == offsets[segment + 1]:
            return None
        return self.extras[f"extra.{name}"][offsets[segment]:offsets[segment + 1]]

    @property
    def segment_lengths(self) -> np.ndarray:
        return np.diff(self.segment_offsets)

    def to_bytes(self) -> bytes:
        arrays = {f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self)
                  if isinstance(getattr(self, f.name), np.ndarray)} | self.extras
        metadata = {"schema": str(SCHEMA), "step": str(self.step), "version": str(self.version), "rollouts": json.dumps(self.rollouts)}
        return save_bytes(arrays, metadata)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Batch":
        """Raises ValueError if the bytes are not a shard of this schema."""
        length = int.from_bytes(raw[:8], "little")
        try:
            metadata = json.loads(raw[8:8 + length])["__metadata__"]
            if int(metadata["schema"]) != SCHEMA:
                raise ValueError(f"a shard of schema {metadata['schema']}, expected {SCHEMA}")
            arrays = load_bytes(raw)
            extras = {name: arrays.pop(name) for name in sorted(arrays) if name.startswith("extra")}
            return cls(step=int(metadata["step"]), version=int(metadata["version"]), rollouts=json.loads(metadata["rollouts"]),
                       extras=extras, **arrays)
        except (KeyError, json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(f"not a trajectory shard: {type(error).__name__}: {error}") from None


def build_batch(step: int, version: int, rollouts: list[Rollout]) -> Batch:
    """Lay rollouts out as one batch, in the order of prompt ordinal and sample."""
    rollouts = sorted(rollouts, key=lambda r: (r.prompt.ordinal, r.sample))
    ordinals = sorted({r.prompt.ordinal for r in rollouts})
    segments = [(index, s) for index, r in enumerate(rollouts) for s in r.segments]
    lengths = [len(s.token_ids) for _, s in segments]
    extras = {}
    for name, (values, rows) in join_extras([s for _, s in segments]).items():
        extras |= {f"extra.{name}": values, f"extra_offsets.{name}": np.concatenate([[0], np.cumsum(rows)])}
    return Batch(
        step=step, version=version,
        token_ids=np.concatenate([s.token_ids for _, s in segments]).astype(np.int32),
        logprobs=np.concatenate([s.logprobs for _, s in segments]).astype(np.float32),
        action_mask=np.concatenate([s.action_mask() for _, s in segments]).astype(np.uint8),
        versions=np.concatenate([s.versions() for _, s in segments]).astype(np.int32),
        segment_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        segment_rollout=np.array([index for index, _ in segments], np.int32),
        segment_temperature=np.array([s.temperature for _, s in segments], np.float32),
        rollout_reward=np.array([r.reward for r in rollouts], np.float32),
        rollout_score=np.array([r.score for r in rollouts], np.float32),
        rollout_group=np.array([ordinals.index(r.prompt.ordinal) for r in rollouts], np.int32),
        group_ordinal=np.array(ordinals, np.int64), extras=extras,
        rollouts=[{"group_id": r.group_id, "sample": r.sample, "attempt": r.attempt, "prompt": r.prompt.to_header(),
                   "stop_reason": r.stop_reason, "terminated": r.terminated, "truncated": r.truncated,
                   "turns": r.turns, "seconds": r.seconds, "info": r.info} for r in rollouts])


def shard_path(run: Path, step: int) -> Path:
    return run / "trajectories" / f"step_{step:06d}.safetensors"


def write_shard(run: Path, step: int, raw: bytes) -> Path:
    path = shard_path(run, step)
    write_whole(path, raw)
    return path


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file whole or not at all: temporary name, fsync, rename. Others may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with open(temporary, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_shard(run: Path, step: int) -> Batch:
    path = shard_path(run, step)
    try:
        return Batch.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no shard of step {step}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
