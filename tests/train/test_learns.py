"""Short runs at fixed seeds on the quick start's own model, data, settings and scorer: each algorithm raises the reward.

One rank in this process; the sampler is transformers' own model under the actor's weights, so every log-prob is real.
The warm start is half of the quick start's, and all runs share it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_hpc.config import RunConfig, SftConfig, load
from molt_hpc.data.shards import Batch, build_batch, write_shard
from molt_hpc.records import Prompt, Rollout, Segment
from molt_hpc.train.actor import Actor
from molt_hpc.train.export import export_hf
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.loop import Loop
from molt_hpc.train.sft import run_rank
from tests.batches import random_batch
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.usefixtures("process_group")
DEMO = Path(__file__).parents[2] / "launchers" / "demo"
GROUPS, SAMPLES, STEPS, WARM_STEPS, WARM_ROWS = 24, 8, 16, 600, 6000


@pytest.fixture(scope="module")
def demo(tmp_path_factory, process_group):
    """(folder of the warm-started model, prompt rows, agent) of the quick start, and the reward before any training on each batch's prompts."""
    sys.path.insert(0, str(DEMO))
    import agent
    import make_data
    import make_model

    folder = tmp_path_factory.mktemp("demo")
    base = make_model.make_model(folder / "base")
    rows = make_data.write_jsonl(folder / "sft.jsonl", make_data.sft_rows(WARM_ROWS, 0))
    (folder / "warm").mkdir()
    words = {"model.model_name_or_path": base, "data.dataset": rows, "output_dir": folder / "warm", "train.max_steps": WARM_STEPS}
    run_rank(load(SftConfig, DEMO / "sft.toml", [word for k, v in words.items() for word in (f"--{k}", str(v))]))
    start = folder / "warm", make_data.prompt_rows(GROUPS * STEPS, 0), agent.Agent()
    policy, tokenizer = sampler(start[0])
    return *start, [float(sample(policy, tokenizer, *start[1:], step).rollout_reward.mean()) for step in range(1, STEPS + 1)]


def sampler(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def sample(policy, tokenizer, rows: list[dict], agent, step: int) -> Batch:
    """SAMPLES replies to each prompt of a batch, scored by the quick start's agent."""
    rows = [row for row in rows[(step - 1) * GROUPS:step * GROUPS] for _ in range(SAMPLES)]
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    asked = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(step)
    found = policy.generate(**asked, do_sample=True, top_k=0, max_new_tokens=20, output_logits=True, return_dict_in_generate=True)
    replies = found.sequences[:, asked.input_ids.shape[1]:]
    logprobs = torch.log_softmax(torch.stack(found.logits, 1), -1).gather(-1, replies[..., None])[..., 0]
    rollouts = []
    for i, (row, reply) in enumerate(zip(rows, replies, strict=True)):
        ended = (reply == tokenizer.eos_token_id).nonzero()
        reply = reply[:int(ended[0]) + 1] if len(ended) else reply
        ids = torch.cat([asked.input_ids[i][asked.attention_mask[i].bool()], reply]).numpy().astype(np.int32)
        start, total = len(ids) - len(reply), len(ids)
        segment = Segment(ids, np.concatenate([np.zeros(start), logprobs[i, :len(reply)]]).astype(np.float32),
                          np.array([[start, total]], np.int32), np.array([[start, total, step - 1]], np.int32), 1.0)
        scored = agent.step({"label": row["label"], "action_text": tokenizer.decode(reply)})
        prompt = Prompt(i // SAMPLES, row["id"], messages=row["prompt"], label=row["label"])
        rollouts.append(Rollout(i // SAMPLES, i % SAMPLES, 0, prompt, [segment], scored.reward, scored.score, "terminated", True, False, 1,
                                0.1, scored.info))
    return build_batch(step, step - 1, rollouts)


def learn(demo, folder: Path, *words: str) -> tuple[Actor, list[dict[str, float]]]:
    """Train the warm start for STEPS batches with the quick start's configuration and further options."""
    warm, rows, agent, _ = demo
    own = ["--actor.model_name_or_path", str(warm), "--data.prompt_dataset", "unused", "--train.agent_path", str(DEMO / "agent.py"),
           "--output_dir", str(folder), "--actor.backend", "transformers", "--actor.adam.lr", "5e-4"]
    actor, records = Actor(load(RunConfig, DEMO / "rl.toml", own + list(words)), STEPS), []
    policy, tokenizer = sampler(warm)
    for step in range(1, STEPS + 1):
        policy.load_state_dict(dict(actor.weights(torch.float32)))
        records.append(actor.train_batch(sample(policy, tokenizer, rows, agent, step).to_bytes()))
        assert records[-1]["logprob_gap_max"] < 1e-4, "sampler and trainer are the same policy"
    return actor, records


TWO_EPOCHS = ("--train.max_epochs", "2")
CASES = {
    "rloo": ("--algo.advantage.estimator", "rloo"),
    "dr_grpo": ("--algo.advantage.estimator", "dr_grpo"),
    "reinforce": ("--algo.advantage.estimator", "reinforce"),
    "gae": ("--algo.advantage.estimator", "gae", "--critic.adam.lr", "5e-3"),
    "gspo": ("--actor.loss_mode", "gspo", *TWO_EPOCHS),
    "cispo": ("--actor.loss_mode", "cispo", "--actor.eps_clip_low_high", "0.2", "2.0", *TWO_EPOCHS),
    "max_rl and dppo": ("--algo.advantage.estimator", "max_rl", "--actor.loss_mode", "dppo", *TWO_EPOCHS),
    "pass_at_k and sapo": ("--algo.advantage.estimator", "pass_at_k", "--actor.loss_mode", "sapo", *TWO_EPOCHS),
    "reinforce_baseline and muon": ("--algo.advantage.estimator", "reinforce_baseline", "--actor.optim", "muon", "--actor.muon.lr", "0.005"),
    "lora": ("--actor.lora.rank", "16", "--actor.adam.lr", "2e-3"),
}


@pytest.fixture(scope="module")
def grpo(demo, tmp_path_factory):
    """(records, folder of the trained model)."""
    folder = tmp_path_factory.mktemp("grpo")
    actor, records = learn(demo, folder)
    export_hf(actor, folder / "hf")
    return records, folder / "hf"


def assert_rises(name: str, demo, records: list[dict[str, float]]) -> None:
    """Against the warm start on the same prompts: some batches are harder than others."""
    before, after = np.mean(demo[3][-4:]), np.mean([record["reward_mean"] for record in records[-4:]])
    print(f"{name}: {before:.3f} -> {after:.3f}", [round(record["reward_mean"] - base, 3) for record, base in zip(records, demo[3], strict=True)])
    assert after > before + 0.04


@pytest.mark.slow
def test_grpo_raises_the_reward(demo, grpo):
    assert_rises("grpo", demo, grpo[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(name: str, demo, tmp_path: Path):
    if name == "lora":
        pytest.importorskip("peft")
    assert_rises(name, demo, learn(demo, tmp_path, *CASES[name])[1])


@pytest.mark.slow
def test_distillation_moves_the_student_to_its_teacher(demo, grpo, tmp_path: Path):
    records = learn(demo, tmp_path, "--algo.advantage.estimator", "on_policy_distill", "--ref.model_name_or_path", str(grpo[1]))[1]
    values = [record["kl_mean"] for record in records]
    print([round(value, 4) for value in values])
    assert 0 < np.mean(values[-4:]) < 0.5 * np.mean(values[:4])


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
