"""Images through the whole job: prompt file, both SDKs, vLLM, records, FSDP2 ranks, weight updates of the vision tower."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from molt_hpc.data.media import image_reader
from molt_hpc.data.shards import read_shard
from molt_hpc.observe.metrics import read_metrics
from tests.e2e.test_main_job import start
from tests.process_run import small_config
from tests.tiny import make_tiny_vision

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

AGENT = '''
import base64, io

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from PIL import Image

from molt_hpc.agents import ChatAgent, Result


def turned(uri):
    picture, output = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), io.BytesIO()
    picture.rotate(90, expand=True).save(output, "PNG")
    return base64.b64encode(output.getvalue()).decode()


class Agent(ChatAgent):
    """Two turns on OpenAI's wire, the second with an image of the agent's own; then another conversation on Anthropic's."""

    async def run(self, ctx):
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            first = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
            url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + turned(ctx.images[0])}}
            more = {"role": "user", "content": [{"type": "text", "text": "and "}, url, {"type": "text", "text": "?"}]}
            messages = [*ctx.messages, first.choices[0].message.model_dump(exclude_none=True), more]
            await client.chat.completions.create(model=ctx.model_name, messages=messages)
        source = {"type": "base64", "media_type": "image/png", "data": turned(ctx.images[-1])}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "is?"}]
        async with AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key) as client:
            last = await client.messages.create(model=ctx.model_name, max_tokens=8, messages=[{"role": "user", "content": content}])
        return Result(reward=float(len(last.content[0].text) % 2 if last.content else 0))
'''


def write_rows(folder: Path, count: int) -> Path:
    """Rows with one or two images each, named by paths beside the file."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        names = [f"{i}_{n}.png" for n in range(1 + i % 2)]
        for name in names:
            Image.fromarray(rng.integers(0, 255, (int(rng.integers(40, 160)), int(rng.integers(40, 160)), 3), np.uint8)).save(folder / name)
        rows.append({"prompt": "What is " + " or ".join(["<image>"] * len(names)) + "?", "images": names, "label": str(i)})
    (folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "images.jsonl"


def score(model, reader, batch, segment):
    """HF's log-probs of a segment's sampled tokens. This process has no stand-in for torchvision: its pixels are PIL's, a little different."""
    part = slice(batch.segment_offsets[segment], batch.segment_offsets[segment + 1])
    ids = torch.tensor(batch.token_ids[part].astype(np.int64))[None]
    pixels = [reader.pixels(bytes(digest).hex()) for digest in batch.extra("images", segment)]
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == reader.token_id).int(), pixel_values=torch.cat([p for p, _ in pixels]),
                       image_grid_thw=torch.cat([g for _, g in pixels])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()[batch.action_mask[part][1:].astype(bool)]


def test_a_job_with_images_agrees_on_log_probs_at_every_version_and_moves_the_vision_tower(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "stand_ins"), str(Path(__file__).parents[2])]))
    folder = make_tiny_vision("qwen2_5_vl", tmp_path / "model")
    config = small_config(tmp_path, folder, agent=AGENT)
    config.data.prompt_dataset, config.data.max_len = [str(write_rows(tmp_path, 4))], 256
    config.train.num_episodes = 2  # the same images before and after an update: nothing that is cached of them may be used again
    config.actor.adam.lr, config.vllm.extra_args = 1e-3, ["--limit-mm-per-prompt", '{"image": 4, "video": 0}']
    process = start(config, tmp_path)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    run = Path(config.output_dir)
    records = read_metrics(run)
    assert [r["groups_trained"] for r in records] == [4, 4], output
    assert all(r["logprob_gap_max"] < 1e-4 for r in records)

    original, trained = (AutoModelForImageTextToText.from_pretrained(f, dtype=torch.float32)
                         for f in (folder, run / "checkpoints" / "step_000002" / "hf"))
    moved = {n: not torch.equal(p, dict(original.named_parameters())[n]) for n, p in trained.named_parameters()}
    assert all(moved.values()), [n for n, m in moved.items() if not m]
    reader, batch = image_reader(folder, run), read_shard(run, 1)
    assert len(batch.segment_lengths) == 2 * len(batch.rollouts)  # of each wire one, with two or three and with one image
    mixed = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    mixed.model.visual.load_state_dict(trained.model.visual.state_dict())
    towers = [np.concatenate([score(m, reader, batch, s) for s in range(len(batch.segment_lengths))]) for m in (original, mixed)]
    assert np.abs(towers[0] - towers[1]).max() > 1e-2  # an engine that kept the old tower would be seen in logprob_gap_max
    assert b"data:image" not in (run / "trajectories" / "step_000001.safetensors").read_bytes()
    assert all(Image.open(io.BytesIO(path.read_bytes())).mode == "RGB" for path in (run / "media").glob("??/*"))
