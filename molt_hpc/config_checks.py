"""Which options of the learning side go together: an option that would do nothing is an error that says so.

Kept apart from config.py, which imports it; everything raises ValueError with one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt_hpc.options import comma_list

if TYPE_CHECKING:
    from molt_hpc.config import ActorConfig, AlgoConfig, OptimConfig, RunConfig

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_baseline", "max_rl", "pass_at_k", "gdpo")
TOKEN_ESTIMATORS = ("reinforce", "gae", "on_policy_distill")
"""The estimators that look at each token, and so at a KL within the reward."""
ESTIMATORS = GROUP_ESTIMATORS + TOKEN_ESTIMATORS
LOSSES = ("ppo", "gspo", "cispo", "dppo", "sapo")

PRESETS = {"tis": ("token", "trunc"), "icepop": ("token", "mask"), "seq-mask-tis": ("geo", "mask"), "mis": ("seq", "mask")}
"""Published names of importance corrections: (level, mode)."""


def _need(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _unless(used: bool, values: dict[str, tuple[Any, Any]], where: str) -> None:
    """Error for options name -> (value, default) that were set although they are not used."""
    for name, (value, default) in values.items():
        _need(used or value == default, f"{name} has no effect {where}")


def check_optim(optim: OptimConfig, prefix: str) -> None:
    _need(optim.lr_warmup_ratio == 0 or optim.lr_scheduler != "constant",
          f"{prefix}lr_warmup_ratio has no effect with lr_scheduler constant: use constant_with_warmup")
    _need(optim.min_lr_ratio == 0 or optim.lr_scheduler in ("linear", "cosine"),
          f"{prefix}min_lr_ratio has no effect with lr_scheduler {optim.lr_scheduler}")
    _need(optim.adam.weight_decay > 0 or not optim.adam.decay_norms, f"{prefix}adam.decay_norms has no effect without adam.weight_decay")
    _unless(optim.optim == "muon", {f"{prefix}muon": (optim.muon, type(optim.muon)())}, f"without {prefix}optim muon")
    _need(optim.optim != "muon" or optim.adam.lr > 0, f"{prefix}adam.lr: muon's schedule follows it; expected more than 0")


def check_loss(actor: ActorConfig, algo: AlgoConfig) -> None:
    _need(not algo.plugin_path or Path(algo.plugin_path).is_file(), f"algo.plugin_path: there is no file {algo.plugin_path}")
    advantage, mode = algo.advantage, actor.loss_mode
    _need(mode in LOSSES or algo.plugin_path, f"actor.loss_mode: expected one of {', '.join(LOSSES)} (or algo.plugin_path), got {mode!r}")
    _unless(actor.lora.rank > 0, {"actor.lora": (actor.lora, type(actor.lora)())}, "without actor.lora.rank")
    _need(actor.lora.rank == 0 or (actor.backend == "transformers" and not actor.freeze_moe_router),
          "actor.lora needs actor.backend transformers, and leaves nothing for actor.freeze_moe_router to do")
    low, high = actor.eps_clip_low_high
    _need(mode != "cispo" or high >= 1, f"actor.eps_clip_low_high: for cispo the upper value is a ratio of at least 1, got {high}")
    _need(low >= 0 and high >= 0, f"actor.eps_clip_low_high: expected at least 0, got {low} {high}")
    _unless(mode == "ppo", {"actor.dual_clip": (actor.dual_clip, None)}, "without loss_mode ppo")
    _need(actor.dual_clip is None or actor.dual_clip > 1, f"actor.dual_clip: expected more than 1, got {actor.dual_clip}")
    _unless(mode != "sapo", {"actor.eps_clip_low_high": (actor.eps_clip_low_high, (0.2, 0.2))}, "with loss_mode sapo")
    _unless(mode == "sapo", {"actor.sapo_temperatures": (actor.sapo_temperatures, (1.0, 1.05))}, "without loss_mode sapo")
    low, high = advantage.is_correction_threshold
    _need(0 <= low < high, f"algo.advantage.is_correction_threshold: expected 0 <= low < high, got {low} {high}")
    level, mode = advantage.correction()
    own = (advantage.is_correction_level, advantage.is_correction_mode)
    _need(not advantage.is_correction_preset or own in (("token", "trunc"), (level, mode)),
          f"algo.advantage.is_correction_preset {advantage.is_correction_preset} stands for level {level} and mode {mode}: leave those out")
    _unless(level in ("seq", "geo"), {"algo.advantage.is_correction_by_version": (advantage.is_correction_by_version, False)},
            f"with level {level}")
    _unless(level != "off", {"algo.advantage.is_correction_mode": (mode, "trunc"),
                             "algo.advantage.is_correction_threshold": (advantage.is_correction_threshold, (0.5, 2.0))}, "with level off")
    _need(advantage.proximal == "recomputed" or level == "off", "algo.advantage.proximal rollout leaves nothing to correct: "
          "set algo.advantage.is_correction_level off")


def check_estimator(config: RunConfig) -> None:
    advantage, samples, default = config.algo.advantage, config.rollout.n_samples_per_prompt, type(config.algo.advantage)()
    name = advantage.estimator
    _need(name in ESTIMATORS or config.algo.plugin_path,
          f"algo.advantage.estimator: expected one of {', '.join(ESTIMATORS)} (or algo.plugin_path), got {name!r}")
    _need(samples >= 2 or name not in GROUP_ESTIMATORS,
          f"rollout.n_samples_per_prompt: {name} compares the rollouts of a group and needs at least 2")
    used = {"gamma": ("reinforce", "gae"), "lam": ("gae",), "no_whiten": ("reinforce", "reinforce_baseline", "gae"),
            "pass_k": ("pass_at_k",)}
    for option, estimators in used.items():
        _unless(name in estimators or name not in ESTIMATORS,
                {f"algo.advantage.{option}": (getattr(advantage, option), getattr(default, option))}, f"with estimator {name}")
    _need(1 <= advantage.pass_k <= max(samples, 2),
          f"algo.advantage.pass_k: expected 1..{samples} (n_samples_per_prompt), got {advantage.pass_k}")
    parts, weights = comma_list(config.reward.parts), comma_list(config.reward.part_weights)
    _need(bool(parts) == (name == "gdpo") or name not in ESTIMATORS,
          "reward.parts: gdpo needs the names of the reward's parts, and no other estimator")
    _need(len(weights) in (0, len(parts)), f"reward.part_weights: expected one for each of the {len(parts)} parts, got {len(weights)}")
    _unless(name == "gae", {"critic": (config.critic, type(config.critic)()), "actor.freezing_steps": (config.actor.freezing_steps, 0)},
            f"with estimator {name}")


def check_replay(config: RunConfig) -> None:
    """What the engine's choices must look like so that training can make them again.

    With sampling masks every log-prob is one over the kept tokens: the policy's, the reference's or teacher's (so a KL compares the two
    over the same support), and the entropy is that of this distribution. The critic and the drift probe have none. With router replay
    the policy alone follows the engine; reference, critic and probe choose their experts themselves.
    """
    rollout = config.rollout
    _need(0 < rollout.top_p <= 1, f"rollout.top_p: expected more than 0 and at most 1, got {rollout.top_p}")
    _need(rollout.top_k >= 0, f"rollout.top_k: expected at least 0, got {rollout.top_k}")
    _need(rollout.top_p == 1 or rollout.top_k, "rollout.top_p below 1 needs rollout.top_k, which bounds the sampling masks (vLLM asks for it)")
    _need(not config.train.routing_replay or config.vllm.enable_prefix_caching,
          "train.routing_replay needs vllm.enable_prefix_caching: vLLM keeps the routing with the cached blocks")
    _need(not config.train.routing_replay or config.fsdp.tp_size == 1, "train.routing_replay needs fsdp.tp_size 1")


def check_kl(config: RunConfig) -> None:
    kl, name, coefficient = config.algo.kl, config.algo.advantage.estimator, config.algo.kl_coef()
    distill = name == "on_policy_distill"
    _need(coefficient >= 0, f"algo.kl.init_coef: expected at least 0, got {coefficient}")
    _need(not distill or (config.ref.model_name_or_path and coefficient > 0 and not kl.use_loss),
          "on_policy_distill needs the teacher in ref.model_name_or_path, algo.kl.init_coef above 0 and no algo.kl.use_loss")
    _need(coefficient == 0 or kl.use_loss or name not in GROUP_ESTIMATORS,
          f"algo.kl.init_coef: {name} does not look at a KL within the reward; set algo.kl.use_loss")
    _need(not (kl.use_loss and kl.estimator == "k1"), "algo.kl.estimator k1 has no useful gradient as a loss: its mean is 0; use k2 or k3")
    default = type(kl)(init_coef=kl.init_coef)
    _unless(coefficient > 0, {"ref.model_name_or_path": (config.ref.model_name_or_path, ""), "ref.num_procs": (config.ref.num_procs, 0),
                               "algo.kl": (kl, default)},
            "without algo.kl.init_coef")
    _need(kl.target is None or kl.target > 0, f"algo.kl.target: expected more than 0, got {kl.target}")
    _unless(kl.target is not None, {"algo.kl.horizon": (kl.horizon, 10000)}, "without algo.kl.target")
