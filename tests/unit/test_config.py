"""The configuration: files and overrides, and one-line errors that name the key."""

from pathlib import Path

import pytest

from molt_hpc.agents.loader import load_agent
from molt_hpc.config import RunConfig, SftConfig, dump, help_text, load, options

NEEDED = ["--output_dir", "r", "--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--train.agent_path", "a"]


def test_the_resolved_tree_reads_back_as_itself(tmp_path):
    config = load(RunConfig, None, [*NEEDED, "--actor.adam.lr", "1e-3", "--rollout.max-new-tokens", "none", "--vllm.enforce_eager",
                                    "--actor.eps_clip_low_high", "0.1", "0.3", "--vllm.extra_args=--a", "--vllm.extra_args=--b"])
    assert config.actor.adam.lr == 1e-3 and config.actor.eps_clip_low_high == (0.1, 0.3)
    assert config.vllm.enforce_eager is True and config.vllm.extra_args == ["--a", "--b"]
    path = tmp_path / "c.toml"
    path.write_text(dump(config))
    assert load(RunConfig, path) == config


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[train]\nseed = 1\nmax_lag = 2\n")
    config = load(RunConfig, path, [*NEEDED, "--train.seed", "9"])
    assert (config.train.seed, config.train.max_lag) == (9, 2)


@pytest.mark.parametrize("words, text", [
    (["--train.agent_pth", "x"], "unknown option train.agent_pth; did you mean train.agent_path?"),
    (["--train.max_lag", "soon"], "train.max_lag: .*integer.*'soon'"),
    (["--train.max_lag"], "--train.max_lag takes one value, got 0"),
    (["stray"], "expected --section.option, got 'stray'"),
    (["--actor.lr_warmup_ratio", "0.1"], "no effect with lr_scheduler constant"),
    (["--rollout.n_samples_per_prompt", "1"], "n_samples_per_prompt: grpo"),
    (["--actor.loss_mode", "pop"], "actor.loss_mode: expected one of ppo, .*got 'pop'"),
    (["--actor.loss_mode", "cispo"], "eps_clip_low_high: for cispo"),
    (["--actor.loss_mode", "gspo", "--actor.dual_clip", "3"], "dual_clip has no effect without loss_mode ppo"),
    (["--algo.advantage.estimator", "grop"], "algo.advantage.estimator: expected one of grpo, .*got 'grop'"),
    (["--algo.advantage.gamma", "0.9"], "gamma has no effect with estimator grpo"),
    (["--algo.advantage.is_correction_by_version"], "has no effect with level token"),
    (["--algo.advantage.is_correction_preset", "mis", "--algo.advantage.is_correction_level", "geo"], "mis stands for level seq"),
    (["--algo.advantage.proximal", "rollout"], "is_correction_level off"),
    (["--algo.kl.init_coef", "0.1"], "grpo does not look at a KL within the reward"),
    (["--algo.kl.init_coef", "0.1", "--algo.kl.use_loss"], "k1 has no useful gradient"),
    (["--algo.kl.target", "0.1"], "algo.kl has no effect without algo.kl.init_coef"),
    (["--ref.model_name_or_path", "x"], "ref.model_name_or_path has no effect"),
    (["--algo.advantage.estimator", "on_policy_distill"], "needs the teacher in ref.model_name_or_path"),
    (["--algo.advantage.estimator", "gdpo"], "reward.parts: gdpo needs"),
    (["--actor.loss_mode", "sapo", "--actor.eps_clip_low_high", "0.1", "0.2"], "eps_clip_low_high has no effect with loss_mode sapo"),
    (["--actor.lora.alpha", "3"], "actor.lora has no effect without actor.lora.rank"),
    (["--actor.lora.rank", "3"], "actor.lora needs actor.backend transformers"),
    (["--weights.ignore", "("], "weights.ignore: '.' is no regular expression"),
    (["--weights.ignore", "mtp", "--weights.backend", "sparse_nccl"], "weights.ignore has no effect with weights.backend sparse_nccl"),
    (["--train.max_bad_steps", "0"], "train.max_bad_steps: expected at least 1"),
    (["--critic.value_clip", "0.5"], "critic has no effect with estimator grpo"),
    (["--actor.freezing_steps", "5"], "freezing_steps has no effect with estimator grpo"),
    (["--actor.muon.lr", "0.1"], "actor.muon has no effect"),
    (["--train.batch_size", "5"], "do not divide rollout.batch_size 32"),
    (["--fsdp.tp_size", "3"], "does not divide the 2 training ranks of the actor"),
    (["--algo.advantage.estimator", "gae", "--critic.num_procs", "2"], "2 training ranks cannot be split into .*'the actor': 0"),
    (["--ref.num_procs", "1"], "ref.num_procs has no effect without algo.kl.init_coef"),
    (["--vllm.num_engines", "3", "--rollout.num_nodes", "2"], "cannot be spread evenly"),
])
def test_wrong_options_are_one_line_errors_that_name_the_key(words, text):
    with pytest.raises(ValueError, match=text) as error:
        load(RunConfig, None, [*words, *NEEDED])
    assert "\n" not in str(error.value)


def test_distillation_is_one_switch_and_needs_no_agent():
    words = ["--algo.advantage.estimator", "on_policy_distill", "--ref.model_name_or_path", "teacher"]
    config = load(RunConfig, None, [*NEEDED[:-2], *words])
    assert Path(config.train.agent_path).name == "distill.py" and config.algo.kl_coef() == 1.0
    assert load_agent(config.train.agent_path)


def test_one_rollout_a_group_is_enough_where_nothing_is_compared():
    words = ["--algo.advantage.estimator", "reinforce", "--rollout.n_samples_per_prompt", "1", "--rollout.min_group_size", "1"]
    assert load(RunConfig, None, [*NEEDED, *words]).rollout.n_samples_per_prompt == 1


def test_unknown_keys_in_a_file_name_the_file_and_the_nearest_key(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[rollout]\ntemprature = 1.0\n")
    with pytest.raises(ValueError, match="c.toml: unknown option rollout.temprature; did you mean rollout.temperature"):
        load(RunConfig, path, NEEDED)


@pytest.mark.parametrize("cls", [RunConfig, SftConfig])
def test_help_lists_every_option_with_a_text(cls):
    text = help_text(cls)
    for name, (_, _, meaning) in options(cls).items():
        assert f"--{name} " in text and len(meaning) > 10
