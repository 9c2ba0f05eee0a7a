"""Random but well-formed batches, built from the same records that rollouts produce."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from molt_hpc.data.media import ImageReader
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


def behind_image(segment: Segment, reader: ImageReader, seed: int) -> Segment:
    """The same segment behind one of a few random images."""
    picture, output = np.random.default_rng(seed % 3).integers(0, 255, (60 + 30 * (seed % 3), 100, 3), np.uint8), io.BytesIO()
    Image.fromarray(picture).save(output, "PNG")
    digest = reader.store.put(output.getvalue())
    ids, spans = reader.place([5, reader.token_id, 7], [digest])
    shift = np.array([len(ids), len(ids), 0], np.int32)
    return Segment(np.concatenate([np.array(ids, np.int32), segment.token_ids]), np.concatenate([np.zeros(len(ids), np.float32), segment.logprobs]),
                   segment.action_spans + shift[:2], segment.version_spans + shift, segment.temperature,
                   {"images": np.frombuffer(bytes.fromhex(digest), np.uint8)[None], "image_spans": np.array(spans, np.int32)})


def with_choices(rollout: Rollout, rng: np.random.Generator, vocab: int = 330) -> Rollout:
    """The rollout with sampling masks of a few random tokens and random experts (2 of 8 in each of 2 layers)."""
    for segment in rollout.segments:
        masks = [np.unique(np.append(rng.integers(3, vocab, rng.integers(0, 20)), token)) for token in segment.token_ids[segment.action_mask()]]
        segment.extras |= {"kept_counts": np.array([len(mask) for mask in masks], np.int32), "kept_ids": np.concatenate(masks).astype(np.int32),
                           "routed_experts": rng.random((len(segment.token_ids) - 1, 2, 8)).argsort(-1)[..., :2].astype(np.uint8)}
    return rollout


def random_batch(seed: int = 0, groups: int = 4, samples: int = 4, step: int = 1, version: int = 1, segments: int = 2,
                 length: tuple[int, int] = (8, 40), reader: ImageReader | None = None, choices: bool = False,
                 rollouts_only: bool = False) -> Batch | list[Rollout]:
    """`groups` groups of `samples` rollouts with 1..segments segments each and rewards 0 or 1.

    reader: every third segment has an image. choices: with_choices for all.
    """
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(groups):
        prompt = Prompt(ordinal=group, id=f"row-{group}", text="a prompt")
        for sample in range(samples):
            reward = float(rng.integers(0, 2))
            parts = [random_segment(rng, version, length=length) for _ in range(int(rng.integers(1, segments + 1)))]
            parts = [behind_image(p, reader, group + sample) if reader and (group + sample + n) % 3 == 0 else p for n, p in enumerate(parts)]
            rollout = Rollout(group, sample, 0, prompt, parts, reward, reward, "terminated", True, False, len(parts), 0.1)
            rollout.check()
            rollouts.append(with_choices(rollout, rng) if choices else rollout)
    return rollouts if rollouts_only else build_batch(step, version, rollouts)
