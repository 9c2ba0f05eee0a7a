"""The configuration: one typed tree, read from a TOML file and dotted overrides.

Every option exists once, here; options.py reads and writes the tree. An option that would have no effect in the
given combination is an error (`RunConfig.check`). Section and option names follow labs-molt where the meaning
is the same, so that a recipe carries over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from molt_hpc.options import CommaNumbers, CommaTexts, comma_list, dump, help_text, load, opt, options, section

__all__ = ["RunConfig", "SftConfig", "dump", "help_text", "load", "opt", "options", "section"]


@dataclass
class AdamConfig:
    lr: float = opt(1e-6, "peak learning rate")
    betas: tuple[float, float] = opt((0.9, 0.95), "decay rates of the two moments")
    eps: float = opt(1e-8, "added to the denominator")
    weight_decay: float = opt(0.0, "decoupled weight decay; never on norms and biases")


@dataclass
class OptimConfig:
    adam: AdamConfig = section(AdamConfig)
    max_norm: float = opt(1.0, "global gradient norm is clipped to this")
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = opt("constant", "learning-rate schedule")
    lr_warmup_ratio: float = opt(0.0, "share of all steps spent warming up (schedules other than constant)")
    min_lr_ratio: float = opt(0.0, "end of linear and cosine, as a share of the peak")


@dataclass
class ActorConfig(OptimConfig):
    model_name_or_path: str = opt("", "folder of the Hugging Face model to train")
    backend: Literal["automodel", "transformers"] = opt("automodel", "who builds the model: NeMo AutoModel or plain transformers")
    num_nodes: int = opt(1, "training nodes")
    num_procs_per_node: int = opt(2, "training ranks a node (one a GPU)")
    loss_mode: Literal["ppo"] = opt("ppo", "policy loss")
    eps_clip_low_high: tuple[float, float] = opt((0.2, 0.2), "lower and upper clip range of the ratio")
    dual_clip: float | None = opt(None, "floor of the ppo loss for negative advantages, > 1")
    gradient_checkpoint: bool = opt(False, "recompute the layers' activations in the backward pass")


@dataclass
class FsdpConfig:
    param_dtype: Literal["float32", "bfloat16"] = opt("bfloat16", "dtype of the forward pass; masters and reductions are float32")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = opt("sdpa", "attention kernel of the training forward")
    tp_size: int = opt(1, "tensor-parallel size (automodel)")
    ep_size: int = opt(1, "expert-parallel size (automodel)")


@dataclass
class DataConfig:
    prompt_dataset: CommaTexts = opt([], "JSONL files of prompts: one, or several with spaces or commas between them")
    prompt_probs: CommaNumbers = opt([], "one weight a file, by which the files' rows are interleaved; empty: all rows are one pool")
    input_key: str = opt("prompt", "column with the prompt: text or a list of messages")
    label_key: str = opt("label", "column handed to the agent as label")
    apply_chat_template: bool = opt(True, "render messages (and plain text as one user message) with the model's template")
    max_len: int = opt(2048, "prompt and response together, in tokens; also vLLM's max_model_len")
    shuffle: bool = opt(True, "new order every epoch, a function of train.seed")
    difficulty_sampling: bool = opt(False, "from the second epoch on, leave out a part of the prompts that are too easy or too hard")
    easy_threshold: float = opt(1.0, "a prompt is easy if the last pass rate of its group was at least this")
    hard_threshold: float = opt(0.0, "a prompt is hard if the last pass rate of its group was at most this")
    easy_fraction: float = opt(0.2, "share of the easy prompts that an epoch keeps")
    hard_fraction: float = opt(0.5, "share of the hard prompts that an epoch keeps")


@dataclass
class RolloutConfig:
    num_nodes: int = opt(1, "rollout nodes; one worker each")
    batch_size: int = opt(32, "prompt groups of one step")
    n_samples_per_prompt: int = opt(8, "rollouts of one group")
    min_group_size: int = opt(2, "a group with fewer usable rollouts is dropped")
    max_new_tokens: int | None = opt(None, "cap on one turn's sampled tokens; unset: what max_len leaves")
    temperature: float = opt(1.0, "sampling temperature")
    concurrency: int = opt(64, "rollouts that one worker keeps in flight")
    group_timeout: float = opt(0.0, "seconds from a group's first lease after which it goes on without its unfinished rollouts; 0: never")
    max_turns: int = opt(64, "an Env that has not ended after this many turns is truncated")


@dataclass
class AgentConfig:
    processes: int = opt(1, "processes on each rollout node that run agent code")
    timeout: float = opt(600.0, "seconds from lease to result, all turns included")


@dataclass
class VllmConfig:
    num_engines: int = opt(1, "vLLM servers in all; a multiple of rollout.num_nodes")
    tensor_parallel_size: int = opt(1, "ranks of one server")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt("auto", "weights and activations of the servers")
    enforce_eager: bool = opt(False, "no compilation: starts sooner, decodes slower")
    gpu_memory_utilization: float = opt(0.85, "share of GPU memory (ignored by the CPU build)")
    kv_cache_memory_bytes: int | None = opt(None, "size of the KV cache; needed on CPU")
    max_num_seqs: int | None = opt(None, "requests decoded at once; unset: vLLM's default")
    enable_prefix_caching: bool = opt(True, "share the KV of equal prefixes")
    start_timeout: float = opt(900.0, "seconds until a server must be healthy")
    stall_timeout: float = opt(300.0, "seconds without a sampled token, while requests are under way, after which a server counts as dead")
    extra_args: list[str] = opt([], "more arguments for `vllm serve`, as they are")


@dataclass
class AdvantageConfig:
    estimator: Literal["grpo"] = opt("grpo", "how rewards become advantages")
    is_correction_level: Literal["off", "token"] = opt("token", "unit of the trainer/rollout ratio")
    is_correction_mode: Literal["mask", "clip", "trunc"] = opt("trunc", "what happens outside the band")
    is_correction_threshold: tuple[float, float] = opt((0.5, 2.0), "band of the ratio; trunc uses the upper end only")


@dataclass
class AlgoConfig:
    advantage: AdvantageConfig = section(AdvantageConfig)
    dynamic_filtering_enable: bool = opt(False, "train only on groups whose mean score lies inside dynamic_filtering_range")
    dynamic_filtering_range: tuple[float, float] = opt((0.0, 1.0), "both ends excluded")


@dataclass
class RewardConfig:
    clip_range: tuple[float, float] = opt((-10.0, 10.0), "rewards are clipped to this before the baseline")


@dataclass
class TrainConfig:
    agent_path: str = opt("", "Python file with one Env subclass")
    max_steps: int = opt(0, "optimizer batches to train; 0: as many as num_episodes gives")
    num_episodes: int = opt(1, "passes over the prompts")
    batch_size: int = opt(0, "prompt groups of one optimizer step; 0: all of rollout.batch_size")
    max_epochs: int = opt(1, "passes over each batch")
    max_tokens_per_gpu: int = opt(16384, "tokens of one packed micro-batch")
    max_lag: int = opt(1, "batches that may be admitted ahead of the trainer; 0 is strictly on-policy")
    seed: int = opt(42, "prompt order, sampling seeds, trainer ranks")


@dataclass
class WeightsConfig:
    backend: Literal["gloo", "nccl"] = opt("nccl", "who carries the bytes: vLLM's nccl, or gloo (CPU)")
    timeout: float = opt(300.0, "seconds for each phase of an update")
    bucket_bytes: int = opt(256 << 20, "tensors are sent in buckets of at most this size (gloo)")


@dataclass
class BrokerConfig:
    lease_timeout: float = opt(600.0, "seconds without progress after which a rollout is leased again")
    heartbeat_timeout: float = opt(60.0, "seconds of silence after which a worker counts as dead")
    max_attempts: int = opt(3, "infrastructure faults of one rollout before it counts as failed")
    max_worker_faults: int = opt(8, "infrastructure faults in a row after which a worker gets no more leases")
    max_filtered_groups: int = opt(1000, "groups filtered in a row that stop the run")
    memory_bytes: int = opt(4 << 30, "finished rollouts kept in memory; beyond it they are read back from the journal")
    inline_bytes: int = opt(32 << 10, "a rollout larger than this travels by reference: its worker appends it to a file in the run folder")
    max_fault_rate: float = opt(0.5, "share of faulty rollouts among the last 64 ended ones that stops the run")
    max_message_bytes: int = opt(1 << 30, "largest message that a socket takes")


@dataclass
class CkptConfig:
    save_steps: int = opt(0, "checkpoint every so many steps; 0: only at the end")
    max_num: int = opt(3, "checkpoints kept, the newest ones")
    resume: bool = opt(False, "go on with the run in output_dir; starts anew if the folder is empty")


@dataclass
class LoggerConfig:
    tensorboard: bool = opt(True, "write event files under <run>/tensorboard")


@dataclass
class LaunchConfig:
    launcher: Literal["auto", "local", "srun"] = opt("auto", "srun inside a Slurm job, local processes elsewhere")
    cpus_per_node: int | None = opt(None, "cores that the planned threads may use; unset: what Slurm or the machine gives")
    roll_call_timeout: float = opt(900.0, "seconds until every role must have reported")
    stop_grace: float = opt(10.0, "seconds between asking a role to end and killing it")
    socket_dir: str | None = opt(None, "parent of the folder of Unix sockets; unset: the node's temporary folder")
    pass_env: list[str] = opt([], "further environment variables that the roles inherit; * matches any text")


@dataclass
class RunConfig:
    """Everything of one run; `output_dir` is the run folder."""

    output_dir: str = opt("", "run folder, on a file system that all nodes share")
    actor: ActorConfig = section(ActorConfig)
    fsdp: FsdpConfig = section(FsdpConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    agent: AgentConfig = section(AgentConfig)
    reward: RewardConfig = section(RewardConfig)
    vllm: VllmConfig = section(VllmConfig)
    algo: AlgoConfig = section(AlgoConfig)
    train: TrainConfig = section(TrainConfig)
    weights: WeightsConfig = section(WeightsConfig)
    broker: BrokerConfig = section(BrokerConfig)
    ckpt: CkptConfig = section(CkptConfig)
    logger: LoggerConfig = section(LoggerConfig)
    launch: LaunchConfig = section(LaunchConfig)

    def check(self) -> None:
        """Raise ValueError for a combination that cannot work or would do nothing."""
        _need(self.output_dir, "output_dir: the run folder is not set")
        _need(self.actor.model_name_or_path, "actor.model_name_or_path: no model folder is set")
        _need(self.data.prompt_dataset, "data.prompt_dataset: no prompt file is set")
        _need(self.train.agent_path, "train.agent_path: no agent file is set")
        rollout, train = self.rollout, self.train
        for name in ("batch_size", "n_samples_per_prompt", "num_nodes", "concurrency", "max_turns"):
            _need(getattr(rollout, name) >= 1, f"rollout.{name}: expected at least 1, got {getattr(rollout, name)}")
        _need(rollout.n_samples_per_prompt >= 2, "rollout.n_samples_per_prompt: grpo compares the rollouts of a group and needs at least 2")
        _need(1 <= rollout.min_group_size <= rollout.n_samples_per_prompt,
              f"rollout.min_group_size: expected 1..{rollout.n_samples_per_prompt} (n_samples_per_prompt), got {rollout.min_group_size}")
        _need(rollout.temperature > 0, f"rollout.temperature: expected more than 0, got {rollout.temperature}")
        _need(train.max_steps >= 0 and train.num_episodes >= 1, "train.max_steps must be >= 0 and train.num_episodes >= 1")
        _need(train.batch_size == 0 or rollout.batch_size % train.batch_size == 0,
              f"train.batch_size: {train.batch_size} groups an optimizer step do not divide rollout.batch_size {rollout.batch_size}")
        _need(train.max_lag >= 0, f"train.max_lag: expected at least 0, got {train.max_lag}")
        low, high = self.algo.advantage.is_correction_threshold
        _need(0 <= low < high, f"algo.advantage.is_correction_threshold: expected 0 <= low < high, got {low} {high}")
        _need(self.actor.dual_clip is None or self.actor.dual_clip > 1, f"actor.dual_clip: expected more than 1, got {self.actor.dual_clip}")
        _need(self.vllm.num_engines % rollout.num_nodes == 0,
              f"vllm.num_engines: {self.vllm.num_engines} servers cannot be spread evenly over rollout.num_nodes {rollout.num_nodes}")
        world = self.actor.num_nodes * self.actor.num_procs_per_node
        shards = self.fsdp.tp_size * self.fsdp.ep_size
        _need(world % shards == 0, f"fsdp: tp_size x ep_size = {shards} does not divide the {world} training ranks")
        _need(shards == 1 or self.actor.backend == "automodel", "fsdp.tp_size and fsdp.ep_size need actor.backend automodel")
        _check_data(self.data, train.num_episodes)
        _check_schedule(self.actor, "actor.")


@dataclass
class SftModelConfig:
    model_name_or_path: str = opt("", "folder of the Hugging Face model to start from")
    backend: Literal["automodel", "transformers"] = opt("transformers", "who builds the model: NeMo AutoModel or plain transformers")
    gradient_checkpoint: bool = opt(False, "recompute the layers' activations in the backward pass")


@dataclass
class SftDataConfig:
    dataset: str = opt("", "JSONL file of chat rows")
    input_key: str = opt("messages", "column with the list of messages")
    max_len: int = opt(2048, "longer rows are cut on the right")
    max_samples: int = opt(0, "rows used; 0: all")


@dataclass
class SftTrainConfig:
    batch_size: int = opt(128, "rows of one optimizer step")
    max_steps: int = opt(0, "optimizer steps; 0: as many as max_epochs gives")
    max_epochs: int = opt(1, "passes over the rows")
    max_tokens_per_gpu: int = opt(16384, "tokens of one packed micro-batch")
    seed: int = opt(42, "order of the rows, initial weights of the ranks")


@dataclass
class SftConfig:
    """Supervised fine-tuning: `output_dir` receives the Hugging Face folder and metrics.jsonl."""

    output_dir: str = opt("", "folder for the trained model")
    model: SftModelConfig = section(SftModelConfig)
    data: SftDataConfig = section(SftDataConfig)
    fsdp: FsdpConfig = section(FsdpConfig)
    optim: OptimConfig = section(OptimConfig)
    train: SftTrainConfig = section(SftTrainConfig)
    num_procs: int = opt(1, "training ranks on this machine")

    def check(self) -> None:
        _need(self.output_dir, "output_dir: no folder for the trained model is set")
        _need(self.model.model_name_or_path, "model.model_name_or_path: no model folder is set")
        _need(self.data.dataset, "data.dataset: no file of chat rows is set")
        _need(self.train.batch_size >= 1, f"train.batch_size: expected at least 1, got {self.train.batch_size}")
        _check_schedule(self.optim, "optim.")


def _need(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_data(data: DataConfig, num_episodes: int) -> None:
    _need(data.max_len > 1, f"data.max_len: expected at least 2, got {data.max_len}")
    files, weights = comma_list(data.prompt_dataset), comma_list(data.prompt_probs)
    _need(not weights or len(files) > 1, "data.prompt_probs has no effect with one file in data.prompt_dataset")
    _need(len(weights) in (0, len(files)), f"data.prompt_probs: expected one weight for each of the {len(files)} files, got {len(weights)}")
    _need(all(0 < weight < float("inf") for weight in weights), f"data.prompt_probs: expected weights above 0, got {weights}")
    if not data.difficulty_sampling:
        for name in ("easy_threshold", "hard_threshold", "easy_fraction", "hard_fraction"):
            _need(getattr(data, name) == getattr(DataConfig, name), f"data.{name} has no effect without data.difficulty_sampling")
        return
    _need(num_episodes > 1, "data.difficulty_sampling has no effect with train.num_episodes 1: the first epoch holds every prompt")
    _need(data.hard_threshold < data.easy_threshold,
          f"data.hard_threshold: expected less than data.easy_threshold {data.easy_threshold}, got {data.hard_threshold}")
    for name in ("easy_fraction", "hard_fraction"):
        _need(0 <= getattr(data, name) <= 1, f"data.{name}: expected 0..1, got {getattr(data, name)}")
    _need(data.easy_fraction < 1 or data.hard_fraction < 1,
          "data.difficulty_sampling has no effect with data.easy_fraction and data.hard_fraction 1")


def _check_schedule(optim: OptimConfig, prefix: str) -> None:
    _need(optim.lr_warmup_ratio == 0 or optim.lr_scheduler != "constant",
          f"{prefix}lr_warmup_ratio has no effect with lr_scheduler constant: use constant_with_warmup")
    _need(optim.min_lr_ratio == 0 or optim.lr_scheduler in ("linear", "cosine"),
          f"{prefix}min_lr_ratio has no effect with lr_scheduler {optim.lr_scheduler}")
