"""Random but well-formed batches, built from the same records that rollouts produce."""

from __future__ import annotations

import numpy as np

from molt_hpc.data.shards import Batch, build_batch
from molt_hpc.records import Prompt, Rollout, Segment


def random_segment(rng: np.random.Generator, version: int, vocab: int = 330, length: tuple[int, int] = (8, 40)) -> Segment:
    """A prompt and one or two turns of sampled tokens, the later ones from `version`."""
    total = int(rng.integers(*length))
    start = int(rng.integers(1, total // 2))
    middle = int(rng.integers(start + 1, total))
    spans = np.array([[start, middle], [min(middle + 1, total), total]] if middle + 1 < total else [[start, middle]], np.int32)
    versions = np.array([[a, b, version - (i == 0 and version > 0)] for i, (a, b) in enumerate(spans)], np.int32)
    logprobs = np.zeros(total, np.float32)
    for a, b in spans:
        logprobs[a:b] = rng.normal(-5.8, 0.5, b - a)
    return Segment(rng.integers(3, vocab, total).astype(np.int32), logprobs, spans, versions, float(rng.choice([1.0, 0.7])))


def random_batch(seed: int = 0, groups: int = 4, samples: int = 4, step: int = 1, version: int = 1, segments: int = 2,
                 length: tuple[int, int] = (8, 40)) -> Batch:
    """`groups` groups of `samples` rollouts with 1..segments segments each and rewards 0 or 1."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(groups):
        prompt = Prompt(ordinal=group, id=f"row-{group}", text="a prompt")
        for sample in range(samples):
            reward = float(rng.integers(0, 2))
            parts = [random_segment(rng, version, length=length) for _ in range(int(rng.integers(1, segments + 1)))]
            rollout = Rollout(group, sample, 0, prompt, parts, reward, reward, "terminated", True, False, len(parts), 0.1)
            rollout.check()
            rollouts.append(rollout)
    return build_batch(step, version, rollouts)
