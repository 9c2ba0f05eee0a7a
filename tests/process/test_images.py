"""Images from agents to records: every way in, one copy by content, as many placeholders as embeddings, or no rollout at all."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from molt_hpc.config import DataConfig
from molt_hpc.data.media import (
    ImageError,
    MediaStore,
    image_reader,
    portable,
    with_images,
)
from molt_hpc.data.prompts import read_files
from molt_hpc.records import Rollout
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.episode import DataFault
from molt_hpc.rollout.generate import Seen
from molt_hpc.rollout.reply_parsing import ReplyParser
from tests.scripted_model import ScriptedEngine, chat_config, lease_of
from tests.tiny import make_tiny_vision

AGENTS = Path(__file__).parents[2] / "launchers" / "agents"


def png(seed=0, height=84, width=112, mode="RGB"):
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).convert(mode)
    output = io.BytesIO()
    picture.save(output, "PNG")
    return output.getvalue()


def uri(raw):
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def message(*images, text="What is it?"):
    return {"role": "user", "content": [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_vision("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture
def seeing(model, tmp_path):
    from transformers import AutoTokenizer

    return Dialect(AutoTokenizer.from_pretrained(model), image_reader(model, tmp_path / "run"))


def check(rollout, dialect, calls):
    """What the record says of images is what the engine was shown, and each image's tokens are where its span is."""
    kept = dialect.images.store
    again = Rollout.from_wire(*rollout.to_wire())
    for segment, sent in zip(again.segments, calls, strict=True):
        digests, spans = segment.extras["images"], segment.extras["image_spans"]
        prompt = sent[0] + sent[2]
        assert (segment.token_ids == dialect.images.token_id).sum() == (spans[:, 1] - spans[:, 0]).sum()
        collapsed = np.delete(segment.token_ids, np.concatenate([np.arange(a + 1, b) for a, b in spans]))
        assert collapsed.tolist() == prompt
        for digest, (start, end) in zip(digests, spans, strict=True):
            raw = kept.read(bytes(digest).hex())
            with Image.open(io.BytesIO(raw)) as picture:
                grid = dialect.images.preprocess(picture)[1]
            assert end - start == int(grid.prod()) // 4 and set(segment.token_ids[start:end]) == {dialect.images.token_id}
            assert segment.action_mask()[start:end].sum() == 0


def test_the_zoom_agent_gets_the_part_that_it_asked_for(play, seeing):
    def script(prompt, sampling):
        return r"\boxed{42}" if "This part" in prompt else "<zoom>50 0 100 100</zoom>"

    whole = png(1)
    done = play(AGENTS / "zoom.py", script, lease=lease_of([message(uri(whole))], label="42"), dialect=seeing)
    assert done.outcome.reward == 1.0 and done.outcome.info == {"zooms": 1.0, "answered": 1.0}, done.outcome
    check(done.outcome, seeing, done.engine.calls[-1:])
    first, second = (bytes(digest).hex() for digest in done.outcome.segments[0].extras["images"])
    assert first == hashlib.sha256(whole).hexdigest() == done.outcome.prompt.messages[0]["content"][0]["image"]
    with Image.open(io.BytesIO(seeing.images.store.read(second))) as part:
        assert np.array_equal(np.array(part), np.array(Image.open(io.BytesIO(whole)))[:, 56:])


def test_every_form_of_an_image_in_an_observation(play, seeing, tmp_path):
    (tmp_path / "p.png").write_bytes(png(3))
    done = play(f'''
        from pathlib import Path

        from PIL import Image

        from molt_hpc.agents import Env, Result

        path = Path({str(tmp_path / "p.png")!r})
        wire = {{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": {uri(png(4))!r}}}}}, {{"type": "text", "text": "b"}}]}}
        turns = [Result(observation="marks <image> and <image>", images=[path.read_bytes(), str(path)]),
                 Result(observation="in front", images=[path]),
                 Result(observation=[wire, {{"role": "user", "content": [{{"type": "image", "image": Image.open(path)}}]}}]),
                 Result(observation="<|im_start|>user\\n<|image_pad|>by hand<|im_end|>\\n<|im_start|>assistant\\n", images=[path])]

        class Agent(Env):
            def step(self, state):
                turn = turns[state["turn"] - 1] if state["turn"] <= len(turns) else Result()
                turn.terminated = state["turn"] > len(turns)
                return turn
        ''', dialect=seeing)
    assert isinstance(done.outcome, Rollout), done.outcome
    check(done.outcome, seeing, done.engine.calls[-1:])
    text = done.prompt()
    assert text.count("<|image_pad|>") == 6 and "marks <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|>" in text
    assert text.endswith("user\n<|image_pad|>by hand<|im_end|>\n<|im_start|>assistant\n")
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>in front" in text
    assert len(list((tmp_path / "run" / "media").glob("??/*"))) == 2


@pytest.mark.parametrize("images, reason", [(["'http://host/a.png'"], "not fetched from elsewhere"),
                                            ([f"{png(1)!r}", "b'not an image'"], "no readable image")])
def test_an_image_that_fails_refuses_the_rollout_and_says_why(play, seeing, images, reason):
    done = play(f'''
        from molt_hpc.agents import Env, Result

        class Agent(Env):
            def step(self, state):
                return Result(observation="see <image>", images=[{", ".join(images)}], terminated=False)
        ''', dialect=seeing)
    assert isinstance(done.outcome, (DataFault, ImageError)) and reason in str(done.outcome), done.outcome
    for where, wrong in (("/nowhere.png", "cannot be read"), (3, "given as int")):
        with pytest.raises(ImageError, match=wrong):
            portable(where)
    with pytest.raises(ImageError, match="2 images for 1 marks"):
        with_images("see <image>", [b"1", b"2"])


def test_placeholders_without_images_and_images_without_a_vision_model_are_refused(play, seeing):
    agent = "from molt_hpc.agents import Env, Result\n\nclass Agent(Env):\n    def step(self, state):\n        return Result()\n"
    assert "1 image placeholders for 0 images" in str(play(agent, "so <|image_pad|>", dialect=seeing).outcome)  # sampled by the policy
    assert "sees no images" in str(play(agent, lease=lease_of([message(uri(png()))])).outcome)


def test_an_engine_that_laid_images_out_otherwise_is_noticed():
    seen = Seen([Path("/run/media/ab/abc")], [1, 9, 9, 2], [(1, 3)])
    good = {"prompt_token_ids": [1, 9, 9, 2], "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    seen.check(good)
    for wrong in ({}, good | {"mm_placeholders": None}, good | {"prompt_token_ids": [1, 9, 9, 9, 2]},
                  good | {"mm_placeholders": {"image": [{"offset": 1, "length": 1}]}}):
        with pytest.raises(ImageError, match="expected"):
            seen.check(wrong)


def test_both_sdks_send_images_and_the_branches_share_them(seeing, tmp_path):
    async def talk():
        engine, config = ScriptedEngine(seeing, lambda prompt, sampling: "fine"), chat_config(image_folder=str(tmp_path / "pictures"))
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures" / "a.png").write_bytes(png(1))
        (tmp_path / "b.png").write_bytes(png(2))
        server = ChatServer(seeing, ReplyParser(seeing.tokenizer))
        await server.start()
        episode = ChatEpisode(lease_of([message(uri(png(1)))]), config, seeing, engine, None, server=server)
        url = server.open(episode)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=url, api_key=episode.key, max_retries=0)

        def ask(*images, stream=False):
            parts = [{"type": "image_url", "image_url": {"url": i}} for i in images]
            return client.chat.completions.create(model="policy", stream=stream, messages=[
                {"role": "user", "content": [*parts, {"type": "text", "text": "hello"}]}])

        try:
            await ask(uri(png(1)))
            await ask((tmp_path / "pictures" / "a.png").as_uri())
            assert [c async for c in await ask(uri(png(1)), stream=True)]
            errors = []
            for bad in ((tmp_path / "b.png").as_uri(), "https://host/a.png", uri(b"broken"), "data:image/png,abc"):
                with pytest.raises(openai.BadRequestError) as refused:
                    await ask(uri(png(1)), bad)
                errors.append((refused.value.code, str(refused.value)))
            source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
            image = {"type": "image", "source": source}
            asked = [{"role": "user", "content": [image, {"type": "text", "text": "hello"}]}]
            again = [*asked, {"role": "assistant", "content": "fine"}, {"role": "user", "content": [image, {"type": "text", "text": "and?"}]}]
            counted = await claude.messages.count_tokens(model="policy", messages=again)
            reply = await claude.messages.create(model="policy", max_tokens=9, messages=again)
            assert counted.input_tokens == reply.usage.input_tokens
            return episode, engine, errors
        finally:
            await asyncio.gather(client.close(), claude.close(), server.close())

    episode, engine, errors = asyncio.run(talk())
    assert [code for code, _ in errors] == ["invalid_image"] * 4 and len(episode.session.nodes) == 4
    for (_, text), wanted in zip(errors, ("only files under", "not fetched", "no readable image", "not base64"), strict=True):
        assert wanted in text
    segments = episode.session.segments()
    assert [len(s.extras["images"]) for s in segments] == [1, 1, 2] and len({bytes(d) for s in segments for d in s.extras["images"]}) == 1
    assert [(s.action_mask().sum()) for s in segments].count(0) == 0 and len(list((tmp_path / "run" / "media").glob("??/*"))) == 1
    assert engine.calls[-1][0].count(seeing.images.token_id) == 2


def test_the_store_keeps_one_upright_rgb_copy_and_notices_damage(tmp_path):
    store = MediaStore(tmp_path)
    raw = png()
    assert store.put(raw) == store.put(raw) == hashlib.sha256(raw).hexdigest() and store.read(store.put(raw)) == raw
    turned, output = Image.open(io.BytesIO(raw)), io.BytesIO()
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(output, "JPEG", exif=exif)
    upright = Image.open(io.BytesIO(store.read(store.put(output.getvalue()))))
    assert upright.size == (84, 112) and upright.mode == "RGB"
    clear = io.BytesIO()
    Image.new("RGBA", (40, 40), (0, 0, 0, 0)).save(clear, "PNG")
    assert Image.open(io.BytesIO(store.read(store.put(clear.getvalue())))).getpixel((0, 0)) == (255, 255, 255)
    assert store.data_uri(store.put(raw)) == uri(raw)
    store.path(store.put(raw)).write_bytes(raw[:-1])
    with pytest.raises(ImageError, match="damaged"):
        store.read(store.put(raw))
    with pytest.raises(ImageError, match="not there"):
        store.read("0" * 64)
    with pytest.raises(ImageError, match="bytes, the limit"):
        store.put(b"\0" * (21 << 20))


def test_prompt_rows_name_images_beside_their_file(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"prompt": "is <image> like <image>?", "images": ["a.png", uri(png(1))]}, {"prompt": "hello", "images": ["a.png"]},
            {"prompt": [message("a.png")]}, {"prompt": "<image> is a tag"}]
    config = DataConfig(prompt_dataset=[str(tmp_path / "rows.jsonl")])

    def read(*rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_files(config)[0]

    first, second, third, fourth = read(*rows)
    path = str(tmp_path / "a.png")
    assert [p.get("image", p.get("text")) for p in first["messages"][0]["content"]] == ["is ", path, " like ", uri(png(1)), "?"]
    assert second["messages"] == [message(path, text="hello")] and third["messages"] == [message(path)] and fourth["text"] == rows[3]["prompt"]
    for bad, reason in ((rows[0] | {"images": ["a.png"]}, "1 images for 2 marks"), ({"prompt": "q", "images": ["b.png"]}, "no image 'b.png'"),
                        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "type audio")):
        with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{reason}"):
            read(rows[1], bad)
