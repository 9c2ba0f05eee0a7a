"""Short runs at a fixed seed: each algorithm raises the reward of a small task, and distillation moves the student to its teacher.

One rank in this process; the sampler is transformers' own model under the actor's weights, so every log-prob is real.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from molt_hpc.config import RunConfig, load
from molt_hpc.data.shards import Batch, build_batch, write_shard
from molt_hpc.records import Prompt, Rollout, Segment
from molt_hpc.train.actor import Actor
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.loop import Loop
from tests.batches import random_batch
from tests.tiny import make_tokenizer

GROUPS, SAMPLES, PROMPT, REPLY, STEPS = 6, 8, 3, 6, 25


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.no_grad()
def sample(policy: AutoModelForCausalLM, step: int) -> Batch:
    """Replies of REPLY tokens to random prompts; the reward is the share of even token numbers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 330, (GROUPS, PROMPT), generator=generator).repeat_interleave(SAMPLES, 0)
    logprobs = torch.zeros(ids.shape)
    for _ in range(REPLY):
        scores = torch.log_softmax(policy(input_ids=ids).logits[:, -1], -1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        ids, logprobs = torch.cat([ids, chosen], 1), torch.cat([logprobs, scores.gather(1, chosen)], 1)
    total, rollouts = PROMPT + REPLY, []
    for row in range(len(ids)):
        segment = Segment(ids[row].numpy().astype(np.int32), logprobs[row].numpy(), np.array([[PROMPT, total]], np.int32),
                          np.array([[PROMPT, total, step - 1]], np.int32), 1.0)
        reward = float((ids[row, PROMPT:] % 2 == 0).float().mean())
        prompt = Prompt(row // SAMPLES, str(row // SAMPLES), text="")
        rollouts.append(Rollout(row // SAMPLES, row % SAMPLES, 0, prompt, [segment], reward, reward, "terminated", True, False, 1, 0.1))
    return build_batch(step, step - 1, rollouts)


def run(config: RunConfig, steps: int = STEPS) -> list[dict[str, float]]:
    actor = Actor(config, steps)
    policy, records = AutoModelForCausalLM.from_pretrained(config.actor.model_name_or_path, dtype=torch.float32), []
    for step in range(1, steps + 1):
        policy.load_state_dict(dict(actor.weights(torch.float32)))
        records.append(actor.train_batch(sample(policy, step).to_bytes()))
        assert records[-1]["logprob_gap_max"] < 1e-4, "sampler and trainer are the same policy"
    return records


def mean(records: list[dict[str, float]], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


CASES = {
    **{name: {"algo__advantage__estimator": name}
       for name in ("grpo", "rloo", "dr_grpo", "reinforce", "reinforce_baseline", "max_rl", "pass_at_k")},
    "gae": {"algo__advantage__estimator": "gae", "critic__adam__lr": 5e-3},
    "gspo": {"actor__loss_mode": "gspo", "train__max_epochs": 2},
    "cispo": {"actor__loss_mode": "cispo", "actor__eps_clip_low_high": (0.2, 2.0), "train__max_epochs": 2},
    "dppo": {"actor__loss_mode": "dppo", "train__max_epochs": 2},
    "sapo": {"actor__loss_mode": "sapo", "train__max_epochs": 2},
    "lora": {"actor__lora__rank": 16, "actor__adam__lr": 1e-2},
    "muon": {"actor__optim": "muon", "actor__muon__lr": 0.02},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(name: str, tiny_qwen3: Path, write_config):
    if name == "lora":
        pytest.importorskip("peft")
    config = load(RunConfig, write_config(tiny_qwen3, **{"actor__adam__lr": 5e-3} | CASES[name]))
    records = run(config, 2 * STEPS if name == "lora" else STEPS)
    first, last = mean(records[:3], "reward_mean"), mean(records[-3:], "reward_mean")
    print(name, first, last)
    assert first < 0.6 and last > first + 0.15


@pytest.mark.slow
def test_distillation_moves_the_student_to_its_teacher(tiny_models, write_config):
    teacher = tiny_models("qwen3", seed=1)
    records = run(load(RunConfig, write_config(tiny_models("qwen3"), algo__advantage__estimator="on_policy_distill", actor__adam__lr=2e-3,
                                               ref__model_name_or_path=str(teacher))), 60)
    first, last = mean(records[:3], "kl_mean"), mean(records[-3:], "kl_mean")
    print(first, last)
    assert 0 < last < 0.8 * first


def test_a_users_file_adds_estimators_and_losses(tiny_qwen3, write_config, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("""
import numpy as np
from molt_hpc.train import advantage, loss

@advantage.register("constant")
def constant(episodes):
    return np.ones(len(episodes.rollout))

@loss.register("plain")
def plain(tokens, settings):
    return -tokens.ratio * tokens.advantages, tokens.mask & False
""")
    options = {"algo__plugin_path": str(path), "algo__advantage__estimator": "constant", "actor__loss_mode": "plain"}
    metrics = Actor(load(RunConfig, write_config(tiny_qwen3, **options)), 1).train_batch(random_batch(1).to_bytes())
    assert metrics["advantage_mean"] == 1.0 and metrics["clip_fraction"] == 0.0 and metrics["grad_norm"] > 0


def test_a_teacher_with_another_tokenizer_is_refused(tiny_models, tmp_path: Path, write_config):
    other = tmp_path / "other"
    shutil.copytree(tiny_models("qwen3"), other)
    make_tokenizer(300).save_pretrained(other)
    options = {"algo__advantage__estimator": "on_policy_distill", "ref__model_name_or_path": str(other)}
    with pytest.raises(ValueError, match="ref.model_name_or_path: .* has another tokenizer"):
        Actor(load(RunConfig, write_config(tiny_models("qwen3"), **options)), 1)


def test_a_step_that_trains_nothing_says_so(tiny_qwen3, write_config, caplog):
    batch = random_batch(1)
    batch.rollout_reward[:] = 1.0
    metrics = Actor(load(RunConfig, write_config(tiny_qwen3)), 1).train_batch(batch.to_bytes())
    assert metrics["trained_fraction"] == 0.0 and "STEP 1 TRAINS NOTHING" in caplog.text


def test_adapters_learn_and_are_published_within_the_weights(tiny_qwen3, write_config):
    pytest.importorskip("peft")
    actor = Actor(load(RunConfig, write_config(tiny_qwen3, actor__lora__rank=4, actor__lora__target_modules=["q_proj", "up_proj"])), 1)
    original = load_file(tiny_qwen3 / "model.safetensors")
    assert all(torch.equal(original[name], tensor) for name, tensor in actor.weights())
    for _ in range(2):  # the first step moves B away from 0, the second A too
        actor.train_batch(random_batch(1).to_bytes())
    merged = {name: tensor.clone() for name, tensor in actor.weights()}
    assert merged.keys() == original.keys()
    assert {name.split(".")[-2] for name in merged if not torch.equal(merged[name], original[name])} == {"q_proj", "up_proj"}
    policy = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    policy.load_state_dict(merged)
    ids = torch.arange(3, 30)
    with torch.no_grad():
        expected = torch.log_softmax(policy(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        found, _ = actor.model.score(pack_segments([ids.numpy()], [np.arange(27) > 0], [1.0], actor.device))
    assert (found - expected).abs().max() < 1e-5


def test_a_batch_that_cannot_be_trained_on_is_kept_in_quarantine(tiny_qwen3, write_config, tmp_path: Path):
    batch, config = random_batch(1), load(RunConfig, write_config(tiny_qwen3))
    batch.logprobs[np.flatnonzero(batch.action_mask)[0]] = np.nan
    run, raw = tmp_path / "run", batch.to_bytes()
    write_shard(run, 1, raw)
    loop = Loop(run, config, Actor(config, 1), object(), None, 1, 0)
    assert loop._train(raw)["batch_skipped"] == 1
    assert (run / "quarantine" / "step_000001.safetensors").read_bytes() == raw
    loop.version = 1
    write_shard(run, 2, random_batch(2).to_bytes())
    assert "batch_skipped" not in loop._train(random_batch(2).to_bytes()) and len(list((run / "quarantine").iterdir())) == 1
