"""Images in the training forward: packed segments score as transformers scores each one alone, and nothing is trained on a doubtful image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from molt_hpc.config import FsdpConfig
from molt_hpc.data.media import ImageError
from molt_hpc.train.micro import TokenTable, build_micro_batch
from molt_hpc.train.model import build_model
from tests.batches import random_batch
from tests.tiny import make_tiny_vision

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")


def alone(reference, reader, batch, segment):
    """HF's log-probs of a segment's sampled tokens, unpacked."""
    part = slice(batch.segment_offsets[segment], batch.segment_offsets[segment + 1])
    ids, seen = torch.tensor(batch.token_ids[part].astype(np.int64))[None], {}
    if (digests := batch.extra("images", segment)) is not None:
        pixels, grids = zip(*(reader.pixels(bytes(digest).hex()) for digest in digests), strict=True)
        seen = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids), "mm_token_type_ids": (ids == reader.token_id).int()}
    logits = reference(input_ids=ids, **seen).logits[0, :-1].float() / batch.segment_temperature[segment]
    chosen = torch.tensor(batch.action_mask[part][1:].astype(bool))
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[chosen, 0]


@pytest.mark.parametrize(("kind", "attention"), [("qwen2_5_vl", "sdpa"), ("qwen3_vl", "eager")])
def test_packed_segments_with_and_without_images_score_as_each_alone(tmp_path, kind, attention):
    folder = make_tiny_vision(kind, tmp_path / "model")
    model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32", attn_implementation=attention), run=tmp_path)
    reader, reference = model.vision.reader, AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    batch = random_batch(1, groups=2, samples=3, reader=reader)
    images = [len(batch.extra("images", s)) if batch.extra("images", s) is not None else 0 for s in range(len(batch.segment_lengths))]
    assert 0 in images and sum(images) >= 3
    table, order = TokenTable(batch), list(reversed(range(len(images))))
    found, _ = model.score(build_micro_batch(table, order, CPU).packed)
    expected = torch.cat([alone(reference, reader, batch, s) for s in order])
    assert (found - expected).abs().max() < 1e-5
    weights = torch.linspace(-1, 1, len(expected))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad.full_tensor() - wanted[name].grad).abs().max() < 1e-5 * wanted[name].grad.abs().max(), name
    if kind == "qwen3_vl":
        return
    segment = images.index(1)
    packed = build_micro_batch(table, [segment], CPU).packed
    (digest, start, end), = packed.images[0]
    other = next(d for d in (bytes(row).hex() for row in batch.extras["extra.images"]) if reader.count(d) != end - start)
    for wrong, reason in ((replace(packed, images=[[(other, start, end)]]), "embeddings, but"),
                          (replace(packed, images=[[]]), "of which its images fill 0"),
                          (replace(packed, images=[[(digest, start - 1, end - 1)]]), "embeddings, but")):
        with pytest.raises(ImageError, match=reason):
            model.vision.inputs(wrong)
    reader.store.path(digest).unlink()
    reader.pixels.cache_clear()
    with pytest.raises(ImageError, match="not there"):
        model.score(packed)
