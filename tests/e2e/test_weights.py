"""Weight updates of real vLLM servers: all of the model arrives, or the update fails and says what is wrong."""

import asyncio
import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from molt_hpc.rollout.generate import generate
from molt_hpc.rollout.update import score
from molt_hpc.train.actor import Actor
from molt_hpc.train.gather import published
from molt_hpc.train.model import whole
from molt_hpc.weights.publish import make_sender
from tests.batches import random_batch
from tests.process_run import small_config
from tests.tiny import make_tiny_vision
from tests.weight_fleet import Checkpoint, Fleet, forward_scores, perturbed, probe, reference_scores, rewritten, running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def mixed_dtypes(folder, out):
    """A bfloat16 copy of a mixture of experts whose router stays float32."""
    rewritten(folder, out, lambda name, t: t if "mlp.gate." in name else t.bfloat16())
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return out


@pytest.mark.parametrize("kind", ["nested_tie", "qwen3_moe", "glm4_moe", "qwen3_moe_mixed_dtypes"])
def test_after_an_update_an_engine_equals_the_checkpoint_of_that_version(tmp_path, tiny_models, monkeypatch, kind):
    """Experts, buffers of the checkpoint, heads tied within a submodel, dtypes per tensor; compared with transformers or a fresh engine."""
    mixed, tower = kind == "qwen3_moe_mixed_dtypes", r"^model\.visual\."
    if kind == "nested_tie":
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "stand_ins"), str(Path(__file__).parents[2])]))
        folder = make_tiny_vision("qwen3_vl", tmp_path / "model", tied=True)
    else:
        folder = mixed_dtypes(tiny_models("qwen3_moe"), tmp_path / "mixed") if mixed else tiny_models(kind)
    moved = perturbed(folder, tmp_path / "moved", seed=1)
    config = small_config(tmp_path, folder)
    config.weights.bucket_bytes = 100_000  # several buckets, with layers that straddle them
    config.vllm.dtype = "bfloat16" if mixed else "float32"
    config.vllm.extra_args = ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'] if kind == "nested_tie" else []
    fresh_config = copy.deepcopy(config)
    fresh_config.actor.model_name_or_path = str(moved)
    source = Checkpoint(folder)
    assert kind != "glm4_moe" or any("e_score_correction_bias" in name for name in source.tensors)
    assert not mixed or {t.dtype for t in source.tensors.values()} == {torch.float32, torch.bfloat16}
    sender = make_sender(config.weights, source, 0, "127.0.0.1", tmp_path / "weights")

    async def main():
        async with running({"updated": config} | ({"fresh": fresh_config} if mixed else {}), tmp_path) as engines:
            fleet, everybody, found = Fleet(config, {"updated": engines["updated"]}), Fleet(config, engines), []
            initial = (await everybody.scores(probe()))["updated"]
            if kind == "nested_tie":  # served for text only, it has no vision tower: an error unless that is said
                await asyncio.to_thread(sender.stage)
                await fleet.command("pause", {"version": 1})
                answers, _ = await fleet.transfer(sender, 1)
                assert "its model has no place for model.visual.blocks.0" in str(answers["updated"])
                config.weights.ignore, fleet.members = [tower], []
            for version in (1, 2, 3):  # the third is as the first: nothing of the second may be left
                source.tensors = Checkpoint(moved if version != 2 else folder).tensors
                await fleet.update(sender, version)
                found.append(await everybody.scores(probe()))
            return initial, found

    initial, found = asyncio.run(main())
    sender.close()
    if mixed:  # 16 bits: experts flip between engine and transformers
        np.testing.assert_allclose(found[0]["updated"], found[0]["fresh"], atol=1e-6)
    else:
        np.testing.assert_allclose(found[0]["updated"], reference_scores(moved, probe()), atol=1e-4)
    np.testing.assert_allclose(found[1]["updated"], initial, atol=1e-6)
    np.testing.assert_allclose(found[2]["updated"], found[0]["updated"], atol=1e-6)
    assert np.abs(initial - found[0]["updated"]).max() > 0.1


def with_peft(actor, folder):
    """The actor's adapters in peft's own model, from the names and values of its parameters."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    lora = actor.config.actor.lora
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
                                peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules))
    adapters = {f"base_model.model.{name}": whole(p) for name, p in actor.model.named_parameters() if ".lora_" in name}
    assert adapters and not model.load_state_dict(adapters, strict=False).unexpected_keys
    return model


def test_adapters_travel_alone_and_the_engine_scores_as_peft_does_with_its_folder_untouched(tmp_path, tiny_qwen3, process_group):
    config = small_config(tmp_path, tiny_qwen3)
    config.actor.backend, config.actor.adam.lr, config.weights.bucket_bytes = "transformers", 5e-2, 20_000
    # a part of a fused layer, one of a layer's two parts, and whole layers; others keep what the engine has read
    config.actor.lora.rank, config.actor.lora.target_modules = 4, ["q_proj", "o_proj", "up_proj"]
    actor, served = Actor(config, 20), copy.deepcopy(config)
    served.actor.model_name_or_path = str(shutil.copytree(tiny_qwen3, tmp_path / "served"))
    file = tmp_path / "served" / "model.safetensors"
    original = file.read_bytes()
    sender = make_sender(config.weights, published(actor.model, "gloo", torch.float32), 0, "127.0.0.1", tmp_path / "weights")

    async def main():
        async with running({"engine": served}, tmp_path) as engines:
            fleet, scores, sizes = Fleet(config, engines), [(await engines_scores(engines))], []
            file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))  # not the checkpoint that the trainer has read
            await asyncio.to_thread(sender.stage)
            await fleet.command("pause", {"version": 0})
            answers, _ = await fleet.transfer(sender, 0)
            assert "HTTP 500" in str(answers["engine"])
            file.write_bytes(original)
            fleet.members = []
            for version in range(3):
                if version:
                    actor.train_batch(random_batch(version, step=version, version=version - 1).to_bytes())
                sizes.append((await fleet.update(sender, version)).nbytes)
                scores += [await engines_scores(engines), forward_scores(with_peft(actor, tiny_qwen3), probe())]
            return scores, sizes

    async def engines_scores(engines):
        return await score(engines["engine"], probe(), 60)

    (before, *scores), sizes = asyncio.run(main())
    sender.close()
    assert "does not hold the checkpoint that the trainer has loaded" in (tmp_path / "engine.log").read_text()
    np.testing.assert_allclose(scores[0], before, atol=1e-6)  # nothing is learned yet: the base as it was
    for engine, peft in zip(scores[::2], scores[1::2]):
        np.testing.assert_allclose(engine, peft, atol=1e-4)
    assert np.abs(scores[2] - scores[4]).max() > 1e-3 < np.abs(scores[2] - before).max()
    assert max(sizes) < 0.1 * len(original) and file.read_bytes() == original


class Recorder:
    """Clients that sample all the time; every finished completion is kept."""

    def __init__(self, engine, count):
        self.engine, self.count, self.done, self.stop = engine, count, [], False

    async def one(self, number):
        request = 0
        prompts = [[int(t) for t in probe(1, 40, seed=number)[0]], [int(t) for t in probe(1, 40, seed=99)[0]]]
        while not self.stop:
            request += 1
            prompt = prompts[request % 2]  # one of its own, one that all share: a block of the prefix cache
            turn = await generate(self.engine, prompt, 24 + number % 40, 1.0, number * 1000 + request, f"c{number}-{request}")
            self.done.append((prompt, turn))

    async def __aenter__(self):
        self.tasks = [asyncio.create_task(self.one(n)) for n in range(self.count)]
        return self

    async def __aexit__(self, *_):
        self.stop = True
        await asyncio.gather(*self.tasks)


def expected_logprobs(models, prompt, turn):
    """Token by token, under the weights of the version that the engine says sampled it."""
    ids = np.concatenate([prompt, turn.token_ids])[None]
    by_version = [forward_scores(model, ids)[0][len(prompt) - 1:] for model in models]
    versions = np.zeros(len(turn.token_ids), int)
    for start, end, version in turn.version_spans:
        versions[start:end] = version
    return np.choose(versions % len(models), by_version), versions


def test_no_token_is_computed_on_half_loaded_or_old_weights_while_50_clients_sample(tmp_path, tiny_qwen3):
    """Updates in quick succession between two models. One whose halves were mixed would give log-probs that belong to neither."""
    from transformers import AutoModelForCausalLM

    folders = [tiny_qwen3, perturbed(tiny_qwen3, tmp_path / "moved", seed=3)]
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders]
    tensors = [Checkpoint(f).tensors for f in folders]
    config = small_config(tmp_path, tiny_qwen3)
    config.data.max_len, config.weights.bucket_bytes, updates = 256, 200_000, 100
    source = Checkpoint(tiny_qwen3)
    sender = make_sender(config.weights, source, 0, "127.0.0.1", tmp_path / "weights")
    mixed = dict(tensors[0]) | {name: t for name, t in tensors[1].items() if "layers.1" in name or "lm_head" in name}
    window = []

    async def main():
        async with running({"engine": config}, tmp_path) as engines:
            engine, fleet = engines["engine"], Fleet(config, engines)
            await fleet.update(sender, 0)
            async with Recorder(engine, 50) as recorder:
                for version in range(1, updates + 1):
                    source.tensors = tensors[version % 2]
                    await asyncio.to_thread(sender.stage)
                    await fleet.command("pause", {"version": version})
                    if version % 10 == 0:  # asked while weights are under way
                        window.append((version, asyncio.create_task(generate(engine, [5, 6, 7], 4, 1.0, version, f"w{version}"))))
                        await asyncio.sleep(0.02)
                    answers, report = await fleet.transfer(sender, version)
                    assert answers["engine"]["checksum"] == report.checksum
                    assert "probe" not in (await fleet.command("resume", {"version": version}))["engine"]
                    await asyncio.sleep(0.1)
            asked = [(version, await task) for version, task in window]
            source.tensors = mixed
            await fleet.update(sender, updates + 1)
            return recorder.done, asked, (await fleet.scores(probe()))["engine"]

    done, asked, halves = asyncio.run(main())
    sender.close()
    assert np.abs(halves - forward_scores(models[0], probe())).max() > 0.1  # a mixture would be noticed
    assert np.abs(halves - forward_scores(models[1], probe())).max() > 0.1
    assert len(asked) == updates // 10
    for version, turn in asked:
        assert {int(v) for _, _, v in turn.version_spans} <= set(range(version, updates + 1)) and turn.version_spans[0][2] == version
    crossing = [(prompt, turn) for prompt, turn in done if len(turn.version_spans) > 1]
    assert len(crossing) > 100 and len(done) > 200
    checked = crossing[:300] + [row for row in done if len(row[1].version_spans) == 1][-200:]
    seen = set()
    for prompt, turn in checked:
        expected, versions = expected_logprobs(models, prompt, turn)
        assert np.abs(expected - turn.logprobs).max() < 1e-4, turn.version_spans
        assert (np.diff(versions) >= 0).all()
        seen |= set(versions.tolist())
    assert len(seen) > 20


def test_an_update_that_lacks_a_tensor_or_brings_an_unknown_one_fails_with_its_name_and_can_be_repeated(tmp_path, tiny_qwen3):
    moved = perturbed(tiny_qwen3, tmp_path / "moved", seed=2)
    config = small_config(tmp_path, tiny_qwen3)
    config.weights.bucket_bytes = 100_000
    whole = Checkpoint(moved).tensors
    odd = "model.layers.1.self_attn.q_proj.bias"  # vLLM skips it without a word
    wrong = {
        "lacks a part of a fused layer": {n: t for n, t in whole.items() if n != "model.layers.0.self_attn.k_proj.weight"},
        "lacks a layer's norm": {n: t for n, t in whole.items() if n != "model.layers.1.input_layernorm.weight"},
        "brings an unknown bias": whole | {odd: torch.zeros(128)},
        "brings an unknown module": {n.replace("layers.0.mlp.down_proj", "layers.0.mlp.down_projection"): t for n, t in whole.items()},
    }
    named = {"lacks a part of a fused layer": "model.layers.0.self_attn.qkv_proj.{weight} (12288 of 16384 elements)",
             "lacks a layer's norm": "model.layers.1.input_layernorm.{weight} (0 of 64 elements)",
             "brings an unknown bias": f"no place for {odd}", "brings an unknown module": "/update_weights: HTTP 500"}

    async def main():
        async with running({"engine": config}, tmp_path) as engines:
            fleet, found = Fleet(config, engines), {}
            await fleet.command("pause", {"version": 1})
            for name, tensors in wrong.items():
                source = Checkpoint(moved)
                source.tensors = tensors
                sender = make_sender(config.weights, source, 0, "127.0.0.1", tmp_path / "weights")
                fleet.members = []
                answers, _ = await fleet.transfer(sender, 1)
                found[name] = str(answers["engine"])
                sender.close()
            served = (await engines["engine"].get("/weight_info"))["weight_version"]
            sender = make_sender(config.weights, Checkpoint(moved), 0, "127.0.0.1", tmp_path / "weights")
            fleet.members = []
            await fleet.update(sender, 2)
            return found, served, (await fleet.scores(probe()))["engine"]

    found, served, scores = asyncio.run(main())
    for name, text in named.items():
        assert text in found[name], f"{name}: {found[name]}"
    assert "down_projection" in (tmp_path / "engine.log").read_text()
    assert served == "default"  # no failed update has set a version
    np.testing.assert_allclose(scores, reference_scores(moved, probe()), atol=1e-4)


def test_files_carry_whole_models_changed_tensors_and_late_engines(tmp_path, tiny_models):
    folder = tiny_models("qwen3_moe")
    moved = perturbed(folder, tmp_path / "moved", seed=4)
    config = small_config(tmp_path, folder)
    config.weights.backend, config.weights.changed_only, config.weights.bucket_bytes = "files", True, 100_000
    before, after, source = Checkpoint(folder).tensors, Checkpoint(moved).tensors, Checkpoint(folder)
    sender = make_sender(config.weights, source, 0, "127.0.0.1", tmp_path / "weights")
    partly = "model.layers.1.self_attn.q_proj.weight"  # one third of a fused layer
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"

    async def main():
        async with running({"early": config, "late": config}, tmp_path) as engines:
            early, late = (Fleet(config, {name: engines[name]}) for name in ("early", "late"))
            reports, scores = [], []
            for version, tensors in enumerate([before, before | {partly: after[partly], expert: after[expert]}, after, after], 1):
                source.tensors = tensors
                reports.append(await early.update(sender, version))
                scores.append((await early.scores(probe()))["early"])
            source.tensors = after | {partly: before[partly]}
            await early.update(sender, 5)
            await late.command("pause", {"version": 6})
            source.tensors = before | {partly: after[partly]}
            await asyncio.to_thread(sender.stage)
            (answers, report) = await late.transfer(sender, 6)  # has seen none of the older manifests
            assert answers["late"]["checksum"] == report.checksum
            await late.command("resume", {"version": 6})
            # a damaged file does not pass for what was sent
            source.tensors = {name: 2 * t for name, t in after.items()}
            await early.command("pause", {"version": 7})
            await asyncio.to_thread(sender.stage)
            for path in (tmp_path / "weights" / "000007").glob("*.safetensors"):
                raw = bytearray(path.read_bytes())
                raw[-1] ^= 1
                path.write_bytes(raw)
            damaged, sent = await early.transfer(sender, 7)
            return reports, scores, (await late.scores(probe()))["late"], damaged["early"]["checksum"] != sent.checksum

    reports, scores, late, noticed = asyncio.run(main())
    total = sum(t.nbytes for t in before.values())
    assert [r.nbytes for r in reports] == [total, before[partly].nbytes + before[expert].nbytes, reports[2].nbytes, 0]
    assert reports[2].nbytes == total - before[partly].nbytes - before[expert].nbytes
    small = rewritten(folder, tmp_path / "small", lambda n, t: after[n] if n in (partly, expert) else t)
    for found, wanted in zip(scores, [folder, small, moved, moved]):
        np.testing.assert_allclose(found, reference_scores(wanted, probe()), atol=1e-4)
    late_folder = rewritten(folder, tmp_path / "late_model", lambda n, t: after[n] if n == partly else t)
    np.testing.assert_allclose(late, reference_scores(late_folder, probe()), atol=1e-4)
    assert noticed
    assert len(list((tmp_path / "weights").iterdir())) <= 7
