"""The configuration: one typed tree, read from a TOML file and dotted overrides.

Every option exists once, here; options.py reads and writes the tree. An option that would have no effect in the
given combination is an error (`RunConfig.check`). Section and option names follow labs-molt where the meaning
is the same, so that a recipe carries over.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from molt_hpc.config_checks import ESTIMATORS, PRESETS, _need, check_estimator, check_kl, check_loss, check_optim, check_replay
from molt_hpc.options import CommaNumbers, CommaTexts, comma_list, dump, help_text, load, opt, options, section

__all__ = ["RunConfig", "SftConfig", "dump", "help_text", "load", "opt", "options", "section"]

DISTILL_AGENT = Path(__file__).parent / "agents" / "distill.py"

Recompute = Literal["none", "full", "selective"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
RECOMPUTE = "recompute the layers' activations in the backward pass: none, full, or selective (all but attention and matrix products)"


@dataclass
class AdamConfig:
    lr: float = opt(1e-6, "peak learning rate")
    betas: tuple[float, float] = opt((0.9, 0.95), "decay rates of the two moments")
    eps: float = opt(1e-8, "added to the denominator")
    weight_decay: float = opt(0.0, "decoupled weight decay")
    decay_norms: bool = opt(False, "decay norms and biases too")


@dataclass
class MuonConfig:
    lr: float = opt(0.02, "peak learning rate of the matrices that Muon trains")
    momentum: float = opt(0.95, "momentum before the orthogonalisation")
    weight_decay: float | None = opt(None, "decoupled weight decay; unset: adam.weight_decay")
    ns_steps: int = opt(5, "Newton-Schulz iterations")


@dataclass
class OptimConfig:
    optim: Literal["adam", "muon"] = opt("adam", "muon: matrices of the layers by Muon, everything else by AdamW")
    adam: AdamConfig = section(AdamConfig)
    muon: MuonConfig = section(MuonConfig)
    max_norm: float = opt(1.0, "global gradient norm is clipped to this")
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = opt("constant", "learning-rate schedule")
    lr_warmup_ratio: float = opt(0.0, "share of all steps spent warming up (schedules other than constant)")
    min_lr_ratio: float = opt(0.0, "end of linear and cosine, as a share of the peak")


@dataclass
class LoraConfig:
    rank: int = opt(0, "rank of low-rank adapters, which are then all that learns; 0: none")
    alpha: float = opt(32.0, "adapters are added with alpha / rank")
    target_modules: CommaTexts = opt(["all-linear"], "names of the layers that get one; all-linear: all but the output layer")


@dataclass
class ActorConfig(OptimConfig):
    model_name_or_path: str = opt("", "folder of the Hugging Face model to train")
    backend: Literal["automodel", "transformers"] = opt("automodel", "who builds the model: NeMo AutoModel or plain transformers")
    num_nodes: int = opt(1, "training nodes")
    num_procs_per_node: int = opt(2, "training ranks a node (one a GPU)")
    loss_mode: str = opt("ppo", "policy loss: ppo, gspo, cispo, dppo, sapo, or one of algo.plugin_path")
    loss_aggregation: Aggregation = opt("token-mean", "how token losses become one; a sequence is a rollout, norm divides by data.max_len")
    eps_clip_low_high: tuple[float, float] = opt((0.2, 0.2), "clip range of the ratio; cispo: high is a ratio; dppo: of the probability")
    dual_clip: float | None = opt(None, "floor of the ppo loss for negative advantages, > 1")
    sapo_temperatures: tuple[float, float] = opt((1.0, 1.05), "of sapo's gate for positive and negative advantages")
    entropy_coef: float | None = opt(None, "weight of the entropy bonus")
    freezing_steps: int = opt(0, "batches on which only the critic learns, at the start (gae)")
    freeze_moe_router: bool = opt(False, "routers of mixture-of-experts layers keep their weights")
    gradient_checkpoint: Recompute = opt("none", RECOMPUTE)
    lora: LoraConfig = section(LoraConfig)


@dataclass
class RefConfig:
    model_name_or_path: str = opt("", "folder of the reference of the KL term, or of the teacher; unset: the actor's folder (KL only)")
    num_procs: int = opt(0, "how many of the training ranks are the reference's alone, the last but the critic's; 0: it shares the actor's")


@dataclass
class CriticConfig(OptimConfig):
    adam: AdamConfig = section(lambda: AdamConfig(lr=5e-6))
    model_name_or_path: str = opt("", "folder of the critic's backbone; unset: the actor's folder (gae)")
    num_procs: int = opt(0, "how many of the training ranks are the critic's alone, the last ones; 0: it shares the actor's")
    value_clip: float | None = opt(0.2, "range within which a value may move in a batch; none: no clipping")
    max_epochs: int = opt(0, "passes over each batch; 0: train.max_epochs")


@dataclass
class FsdpConfig:
    param_dtype: Literal["float32", "bfloat16"] = opt("bfloat16", "dtype of the forward pass; masters and reductions are float32")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = opt("sdpa", "attention kernel of the training forward")
    offload: Literal["none", "optimizer", "full"] = opt(
        "none", "optimizer: its state is on the CPU between steps; full: weights, gradients and the optimizer live and step there")
    defer_grad_sync: bool = opt(False, "reduce gradients once a step: less traffic, an unsharded gradient in memory")
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
    top_p: float = opt(1.0, "sample from the most likely tokens that together have this probability; below 1 needs top_k")
    top_k: int = opt(0, "sample from the k most likely tokens; above 0 vLLM returns sampling masks, which training replays; 0: all tokens")
    concurrency: int = opt(64, "rollouts that one worker keeps in flight")
    group_timeout: float = opt(0.0, "seconds from a group's first lease after which it goes on without its unfinished rollouts; 0: never")
    max_turns: int = opt(64, "an Env that has not ended after this many turns is truncated")


@dataclass
class AgentConfig:
    processes: int = opt(1, "processes on each rollout node that run agent code")
    concurrency: int = opt(0, "rollouts that one agent process runs at once; 0: its share of rollout.concurrency")
    timeout: float = opt(600.0, "seconds from lease to result, all turns included")
    memory_mb: int = opt(0, "address space of an agent process in MiB; 0: no limit")
    tool_parser: str = opt("", "vLLM's parser that finds tool calls in replies (ChatAgent; hermes, qwen3_coder, ...)")
    image_folder: str = opt("", "folder whose images a ChatAgent's requests may name by path or file URL; empty: data URIs only")
    reasoning_parser: str = opt("", "vLLM's parser that splits thinking from replies (ChatAgent; qwen3, deepseek_r1, ...)")


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
    max_restarts: int = opt(3, "times within an hour that one server is started again after it died, hung or failed in an update")
    stall_timeout: float = opt(300.0, "seconds without a sampled token, while requests are under way, after which a server counts as dead")
    extra_args: list[str] = opt([], "more arguments for `vllm serve`, as they are")


@dataclass
class AdvantageConfig:
    estimator: str = opt("grpo", "how rewards become advantages: " + ", ".join(ESTIMATORS) + ", or one of algo.plugin_path")
    gamma: float = opt(1.0, "discount (reinforce, gae)")
    lam: float = opt(1.0, "lambda (gae)")
    no_whiten: bool = opt(False, "do not whiten over the batch (reinforce, reinforce_baseline, gae)")
    pass_k: int = opt(2, "k of pass_at_k")
    proximal: Literal["recomputed", "rollout"] = opt("recomputed", "old log-probs: the trainer's own (decoupled) or the engine's")
    is_correction_level: Literal["off", "token", "seq", "geo"] = opt("token", "unit of the trainer/rollout ratio")
    is_correction_mode: Literal["mask", "clip", "trunc"] = opt("trunc", "what happens outside the band")
    is_correction_threshold: tuple[float, float] = opt((0.5, 2.0), "band of the ratio; trunc uses the upper end only")
    is_correction_preset: Literal["", "tis", "icepop", "seq-mask-tis", "mis"] = opt("", "sets level and mode by a published name")
    is_correction_by_version: bool = opt(False, "seq and geo: each weights version's part of a rollout is gated by itself")

    def correction(self) -> tuple[str, str]:
        """(level, mode), a preset resolved."""
        return PRESETS.get(self.is_correction_preset, (self.is_correction_level, self.is_correction_mode))


@dataclass
class KlConfig:
    init_coef: float | None = opt(None, "weight of the KL to ref.model_name_or_path; unset: 0, for on_policy_distill 1")
    use_loss: bool = opt(False, "KL as a term of the loss instead of the reward")
    estimator: Literal["k1", "k2", "k3"] = opt("k1", "estimate of the KL at each token")
    target: float | None = opt(None, "adapt the coefficient towards this KL")
    horizon: int = opt(10000, "rollouts over which the coefficient adapts")


@dataclass
class AlgoConfig:
    advantage: AdvantageConfig = section(AdvantageConfig)
    kl: KlConfig = section(KlConfig)
    plugin_path: str = opt("", "Python file that registers further estimators and losses")

    def kl_coef(self) -> float:
        """The KL coefficient that the run starts with; without one there is no reference model."""
        return float(self.advantage.estimator == "on_policy_distill") if self.kl.init_coef is None else self.kl.init_coef
    dynamic_filtering_enable: bool = opt(False, "train only on groups whose mean score lies inside dynamic_filtering_range")
    dynamic_filtering_range: tuple[float, float] = opt((0.0, 1.0), "both ends excluded")


@dataclass
class RewardConfig:
    clip_range: tuple[float, float] = opt((-10.0, 10.0), "rewards are clipped to this before the baseline")
    parts: CommaTexts = opt([], "names in the agent's info whose values are the parts of the reward (gdpo)")
    part_weights: CommaNumbers = opt([], "one weight for each part; empty: 1 each")


@dataclass
class TrainConfig:
    agent_path: str = opt("", "Python file with one Env or ChatAgent")
    max_steps: int = opt(0, "optimizer batches to train; 0: as many as num_episodes gives")
    num_episodes: int = opt(1, "passes over the prompts")
    batch_size: int = opt(0, "prompt groups of one optimizer step; 0: all of rollout.batch_size")
    max_epochs: int = opt(1, "passes over each batch")
    max_tokens_per_gpu: int = opt(16384, "tokens of one packed micro-batch")
    max_lag: int = opt(1, "batches that may be admitted ahead of the trainer; 0 is strictly on-policy")
    seed: int = opt(42, "prompt order, sampling seeds, trainer ranks")
    deterministic: bool = opt(False, "bit-equal steps for the same batch on the same ranks; slower")
    routing_replay: bool = opt(False, "training sends each token to the experts that the engine chose (mixture of experts)")
    max_bad_steps: int = opt(3, "batches in a row without a finite loss and gradient that stop the run; each is left out and quarantined")


@dataclass
class WeightsConfig:
    backend: Literal["gloo", "nccl", "sparse_nccl", "files"] = opt(
        "nccl", "who carries the bytes: vLLM's nccl, its sparse_nccl (changed elements only), gloo (CPU), or files in the run folder")
    timeout: float = opt(300.0, "seconds for each phase of an update")
    bucket_bytes: int = opt(32 << 20, "tensors travel in buckets of at most this size (gloo, files, sparse_nccl)")
    stage_bytes: int = opt(0, "packed on training rank 0 before the engines are paused; at least two buckets are (gloo)")
    changed_only: bool = opt(False, "write only tensors that differ from the last update's (files)")
    ignore: list[str] = opt([], "patterns of names that an engine may leave out although they are sent to it; others fail the update")
    drift_prompts: int = opt(0, "prompts that engines and trainer both score after each update; 0: none")
    drift_alarm: float = opt(0.0, "mean |log-prob of engine - of trainer| on them above which an error is logged; 0: never")
    drift_stop: float = opt(0.0, "the same, above which the run stops; 0: never")


@dataclass
class BrokerConfig:
    lease_timeout: float = opt(600.0, "seconds without progress after which a rollout is leased again")
    heartbeat_timeout: float = opt(60.0, "seconds of silence after which a worker counts as dead, and to a worker the broker")
    max_attempts: int = opt(3, "infrastructure faults of one rollout before it counts as failed")
    max_worker_faults: int = opt(8, "infrastructure faults in a row (those of one moment count once) after which a worker gets no more leases")
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
    max_restarts: int = opt(3, "times that a rollout role is started again after it died while the run goes on")
    save_grace: float = opt(60.0, "seconds that the actor has, before the job's time limit, to end its step and to save")
    stop_grace: float = opt(10.0, "seconds between asking a role to end and killing it")
    socket_dir: str | None = opt(None, "parent of the folder of Unix sockets; unset: the node's temporary folder")
    pass_env: list[str] = opt([], "further environment variables that the roles inherit; * matches any text")


@dataclass
class RunConfig:
    """Everything of one run; `output_dir` is the run folder."""

    output_dir: str = opt("", "run folder, on a file system that all nodes share")
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    critic: CriticConfig = section(CriticConfig)
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
        if self.algo.advantage.estimator == "on_policy_distill":
            self.train.agent_path = self.train.agent_path or str(DISTILL_AGENT)
        _need(self.train.agent_path, "train.agent_path: no agent file is set")
        rollout, train = self.rollout, self.train
        for name in ("batch_size", "n_samples_per_prompt", "num_nodes", "concurrency", "max_turns"):
            _need(getattr(rollout, name) >= 1, f"rollout.{name}: expected at least 1, got {getattr(rollout, name)}")
        check_estimator(self)
        _need(1 <= rollout.min_group_size <= rollout.n_samples_per_prompt,
              f"rollout.min_group_size: expected 1..{rollout.n_samples_per_prompt} (n_samples_per_prompt), got {rollout.min_group_size}")
        agent = self.agent
        _need(agent.processes >= 1, f"agent.processes: expected at least 1, got {agent.processes}")
        _need(agent.concurrency == 0 or agent.processes * agent.concurrency >= rollout.concurrency,
              f"agent.concurrency: {agent.processes} processes x {agent.concurrency} are fewer than rollout.concurrency {rollout.concurrency}")
        _need(rollout.temperature > 0, f"rollout.temperature: expected more than 0, got {rollout.temperature}")
        check_replay(self)
        _need(train.max_steps >= 0 and train.num_episodes >= 1, "train.max_steps must be >= 0 and train.num_episodes >= 1")
        _need(train.batch_size == 0 or rollout.batch_size % train.batch_size == 0,
              f"train.batch_size: {train.batch_size} groups an optimizer step do not divide rollout.batch_size {rollout.batch_size}")
        for name in ("max_epochs", "max_bad_steps"):
            _need(getattr(train, name) >= 1, f"train.{name}: expected at least 1, got {getattr(train, name)}")
        _need(train.max_lag >= 0, f"train.max_lag: expected at least 0, got {train.max_lag}")
        _need(self.vllm.num_engines % rollout.num_nodes == 0,
              f"vllm.num_engines: {self.vllm.num_engines} servers cannot be spread evenly over rollout.num_nodes {rollout.num_nodes}")
        world = self.actor.num_nodes * self.actor.num_procs_per_node
        shards = self.fsdp.tp_size * self.fsdp.ep_size
        own = {"ref.num_procs": self.ref.num_procs, "critic.num_procs": self.critic.num_procs}
        left = {"the actor": world - sum(own.values())} | {name: count for name, count in own.items() if count}
        _need(all(count > 0 for count in left.values()), f"ref.num_procs, critic.num_procs: {world} training ranks cannot be split into {left}")
        for who, count in left.items():
            _need(count % shards == 0, f"fsdp: tp_size x ep_size = {shards} does not divide the {count} training ranks of {who}")
        _need(shards == 1 or self.actor.backend == "automodel", "fsdp.tp_size and fsdp.ep_size need actor.backend automodel")
        _check_data(self.data, train.num_episodes)
        _check_weights(self.weights)
        check_optim(self.actor, "actor.")
        check_optim(self.critic, "critic.")
        check_loss(self.actor, self.algo)
        check_kl(self)


@dataclass
class SftModelConfig:
    model_name_or_path: str = opt("", "folder of the Hugging Face model to start from")
    backend: Literal["automodel", "transformers"] = opt("transformers", "who builds the model: NeMo AutoModel or plain transformers")
    gradient_checkpoint: Recompute = opt("none", RECOMPUTE)


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
        check_optim(self.optim, "optim.")


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
    _need(data.easy_fraction < 1 or data.hard_fraction < 1, "data.difficulty_sampling has no effect with data.easy_fraction and data.hard_fraction 1")


def _check_weights(weights: WeightsConfig) -> None:
    _need(weights.bucket_bytes > 0, f"weights.bucket_bytes: expected more than 0, got {weights.bucket_bytes}")
    for name, backends in {"bucket_bytes": ("gloo", "files", "sparse_nccl"), "stage_bytes": ("gloo",), "changed_only": ("files",)}.items():
        _need(weights.backend in backends or getattr(weights, name) == getattr(WeightsConfig, name),
              f"weights.{name} has no effect with weights.backend {weights.backend}")
    _need(not weights.ignore or weights.backend != "sparse_nccl", "weights.ignore has no effect with weights.backend sparse_nccl")
    for pattern in weights.ignore:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"weights.ignore: {pattern!r} is no regular expression: {error}") from None
    for name in ("drift_alarm", "drift_stop"):
        _need(weights.drift_prompts > 0 or not getattr(weights, name), f"weights.{name} has no effect with weights.drift_prompts 0")
