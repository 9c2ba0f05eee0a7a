"""What the tests run on training ranks: `torchrun -m tests.train.workers WORK ARGUMENTS...`; results go to files of rank 0."""

from __future__ import annotations

import json
import resource
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from molt_hpc.config import RunConfig, load
from molt_hpc.data.shards import Batch, read_shard
from molt_hpc.train.actor import Actor
from molt_hpc.train.checkpoint import load_checkpoint, nearest, save_checkpoint
from molt_hpc.train.export import export_hf
from molt_hpc.train.launch import in_process_group, leave
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.metrics import TokenSums
from molt_hpc.train.micro import TokenTable, share_plan, whole_sequences
from molt_hpc.train.optim import Optimizers, TrainingError
from tests.batches import random_batch


def raw(batch: Batch) -> bytes | None:
    return batch.to_bytes() if dist.get_rank() == 0 else None


def save_on_rank_0(tensors: dict[str, torch.Tensor], path: str) -> None:
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


def all_weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.weights(torch.float32)}


def gradients(actor: Actor) -> dict[str, torch.Tensor]:
    """Full gradients under the checkpoint's names."""
    found = {}
    for name, parameter in actor.model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found |= {k: v.clone() for k, v in actor.weights()._convert(name, grad)}
    return found


def batch_gradient(actor: Actor, batch: Batch) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and loss of a batch's first optimizer step, by the actor's own code up to the step itself."""
    table = TokenTable(batch)
    plan = share_plan(actor.model, table, actor.config.train)
    actor._prepare(plan, table, 1, whole_sequences(plan, table))
    total = actor._backward(table, plan.steps[0], TokenSums(), True)
    dist.all_reduce(total)
    found = gradients(actor)
    actor.optimizer.zero_grad()
    return found, total.item()


def invariance(config_path: str, out: str, *budgets: str) -> None:
    """Gradients of the same batch for every token budget, and with every rollout split in other segments."""
    config = load(RunConfig, config_path, check=False)
    actor = Actor(config, None)
    batch = random_batch(3, segments=2, reader=actor.model.vision and actor.model.vision.reader, choices=bool(config.rollout.top_k))
    for budget in budgets:
        config.train.max_tokens_per_gpu = int(budget)
        found, loss = batch_gradient(actor, batch)
        save_on_rank_0({**found, "loss": torch.tensor([loss])}, f"{out}/{dist.get_world_size()}_{budget}.safetensors")
    found, loss = batch_gradient(actor, split_spans(batch))
    save_on_rank_0({**found, "loss": torch.tensor([loss])}, f"{out}/{dist.get_world_size()}_split.safetensors")


def split_spans(batch: Batch) -> Batch:
    """The same sampled tokens in more segments: each span of sampled tokens in a segment of its own, with its context."""
    parts: dict[str, list[np.ndarray]] = {"token_ids": [], "logprobs": [], "action_mask": [], "versions": []}
    lengths, owners, temperatures, sources = [], [], [], []
    for s, (start, end) in enumerate(zip(batch.segment_offsets[:-1], batch.segment_offsets[1:], strict=True)):
        mask = batch.action_mask[start:end]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        for first, last in edges.reshape(-1, 2):
            only = np.zeros(last, np.uint8)
            only[first:last] = 1
            parts["token_ids"].append(batch.token_ids[start:start + last])
            parts["logprobs"].append(np.where(only, batch.logprobs[start:start + last], 0).astype(np.float32))
            parts["action_mask"].append(only)
            parts["versions"].append(np.where(only, batch.versions[start:start + last], -1).astype(np.int32))
            lengths.append(last)
            owners.append(batch.segment_rollout[s])
            temperatures.append(batch.segment_temperature[s])
            sources.append(s)
    arrays, extras = {name: np.concatenate(values) for name, values in parts.items()}, {}
    for name in ("images", "image_spans") if "extra.images" in batch.extras else ():
        rows = [found for s in sources if (found := batch.extra(name, s)) is not None]
        counts = [0 if batch.extra(name, s) is None else len(batch.extra(name, s)) for s in sources]
        extras |= {f"extra.{name}": np.concatenate(rows), f"extra_offsets.{name}": np.concatenate([[0], np.cumsum(counts)])}
    return Batch(batch.step, batch.version, **arrays, segment_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                 segment_rollout=np.array(owners, np.int32), segment_temperature=np.array(temperatures, np.float32),
                 rollout_reward=batch.rollout_reward, rollout_score=batch.rollout_score, rollout_group=batch.rollout_group,
                 group_ordinal=batch.group_ordinal, rollouts=batch.rollouts, extras=extras)


def in_another_order(batch: Batch) -> Batch:
    """The same rollouts from the last to the first: another packing order."""
    order = np.arange(len(batch.rollout_reward))[::-1]
    segments = np.concatenate([np.flatnonzero(batch.segment_rollout == r) for r in order])
    tokens = np.concatenate([np.arange(batch.segment_offsets[s], batch.segment_offsets[s + 1]) for s in segments])
    new_number = np.argsort(order)
    return replace(batch, **{name: getattr(batch, name)[tokens] for name in ("token_ids", "logprobs", "action_mask", "versions")},
                   segment_offsets=np.concatenate([[0], np.cumsum(batch.segment_lengths[segments])]).astype(np.int64),
                   segment_rollout=new_number[batch.segment_rollout[segments]].astype(np.int32),
                   segment_temperature=batch.segment_temperature[segments], rollout_reward=batch.rollout_reward[order],
                   rollout_score=batch.rollout_score[order], rollout_group=batch.rollout_group[order],
                   rollouts=[batch.rollouts[r] for r in order])


def start_again(actor: Actor, start: list[torch.Tensor]) -> torch.Tensor:
    """Put the weights back; returns how far they had come, all of them in one row."""
    moved, parameters = [], [p for _, model, _ in actor.learners() for _, p in model.named_parameters()]
    with torch.no_grad():
        for parameter, before in zip(parameters, start, strict=True):
            difference = parameter - before
            moved.append((difference.full_tensor() if isinstance(difference, DTensor) else difference).flatten())
            parameter.copy_(before)
    return torch.cat(moved)


def double_invariance(config_path: str, out: str, variants: str) -> None:
    """Two epochs of gradient descent in float64 by the actor itself, for every variant, token budget, packing order and segment split.

    variants: JSON, name -> {dotted option: value}. Writes where the weights of actor and critic went.
    """
    for name, options in json.loads(variants).items():
        overrides = [word for key, value in options.items()
                     for word in (f"--{key}", *map(str, value if isinstance(value, list) else [value]))]
        config = load(RunConfig, config_path, overrides)
        config.fsdp.param_dtype = "float64"
        actor = Actor(config, 10)
        actor.optimizer = Optimizers([torch.optim.SGD([p for _, p in actor.model.named_parameters() if p.requires_grad])])
        if actor.critic:
            actor.critic.optimizer = Optimizers([torch.optim.SGD([p for _, p in actor.critic.model.named_parameters()])])
        start = [p.detach().clone() for _, model, _ in actor.learners() for _, p in model.named_parameters()]
        batch, found = random_batch(3, segments=2), {}
        small = random_batch(5, groups=1, samples=2, segments=1)
        small.rollout_reward[:] = 0, 1
        for label, given, budget in (("100000", batch, 100000), ("40", batch, 40), ("split", split_spans(batch), 90),
                                     ("order", in_another_order(batch), 90), ("small", small, 90)):
            config.train.max_tokens_per_gpu = budget
            metrics = actor.train_batch(raw(given))
            assert "batch_skipped" not in metrics and metrics["grad_norm"] > 0
            found[label] = start_again(actor, start)
        save_on_rank_0(found, f"{out}/{dist.get_world_size()}_{name}.safetensors")


def train(config_path: str, out: str, first: str, last: str, save: str = "", resume: str = "", *, store: dist.Store) -> None:
    """Train the batches first..last; optionally save a checkpoint after batch `save`, or start from the newest one. Writes metrics and weights."""
    config = load(RunConfig, config_path, check=False)
    actor = Actor(config, 10, store)
    run = Path(config.output_dir)
    if resume:
        described = load_checkpoint(actor, nearest(run))
        assert described["version"] == int(first) - 1 == described["step"] == actor.step, described
    records = []
    for step in range(int(first), int(last) + 1):
        metrics = actor.train_batch(raw(random_batch(step, step=step, version=step - 1)))
        records.append({"step": step, **metrics})
        if str(step) == save:
            save_checkpoint(actor, run, step, {"version": step})
    save_on_rank_0(all_weights(actor), f"{out}.safetensors")
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, records)
    if dist.get_rank() == 0:
        Path(f"{out}.json").write_text(json.dumps(gathered))


def export(config_path: str, out: str) -> None:
    """Train one batch, export, and leave the trainer's own log-probs of fixed tokens beside the export."""
    actor = Actor(load(RunConfig, config_path, check=False), 10)
    actor.train_batch(raw(random_batch(1)))
    export_hf(actor, Path(out))
    ids = np.random.default_rng(9).integers(3, 330, 30)
    packed = pack_segments([ids], [np.arange(30) > 0], [1.0], actor.device)
    with torch.no_grad():
        scores = actor.model.score(packed)[0]
    metadata = actor.weights().metadata()
    assert metadata == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in actor.weights()]
    save_on_rank_0({"ids": torch.from_numpy(ids), "log_probs": scores}, f"{out}.expected")


def broken(config_path: str, out: str) -> None:
    """A loss that is not finite on one rank only, or a batch that rank 0 refuses, must raise on all ranks and change nothing."""
    actor = Actor(load(RunConfig, config_path, check=False), 10)
    before = all_weights(actor)
    batch = random_batch(1)
    batch.logprobs[np.flatnonzero(batch.action_mask)[0]] = np.nan
    skipped = actor.train_batch(raw(batch))
    assert skipped["batch_skipped"] == 1 and "loss" not in skipped and actor.step == 1
    middle = all_weights(actor)
    assert all(torch.equal(before[name], middle[name]) for name in before)
    caught = 0
    try:
        actor.train_batch(raw(batch))
    except TrainingError as error:
        caught = int("2 batches in a row" in str(error))
    refused = random_batch(1)
    refused.rollout_reward[0] = np.inf
    try:
        actor.train_batch(raw(refused))
    except ValueError as error:
        caught += "rollouts [0]: the reward is not finite" in str(error)
    votes = torch.tensor([caught])
    dist.all_reduce(votes)
    assert votes.item() == 2 * dist.get_world_size(), f"{votes.item()} errors were raised"
    after = all_weights(actor)
    assert all(torch.equal(before[name], after[name]) for name in before)
    metrics = actor.train_batch(raw(random_batch(1)))
    assert actor.bad_steps == 0
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(metrics))


def out_of_memory(config_path: str) -> None:
    """A micro-batch that does not fit: the error names its tokens, the budget and the option."""
    actor = Actor(load(RunConfig, config_path, check=False), 10)
    actor.train_batch(raw(random_batch(1)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        actor.train_batch(raw(random_batch(1, length=(3000, 4000))))
    except TrainingError as error:
        print(error, "| in", [frame.name for frame in traceback.extract_tb(error.__traceback__)])


def record_run(run: str, steps: str, save_at: str) -> None:
    """Train a run folder's saved batches and record metrics and one checkpoint, as a real run would."""
    folder = Path(run)
    actor = Actor(load(RunConfig, folder / "config.toml"), int(steps))
    for step in range(1, int(steps) + 1):
        metrics = actor.train_batch(raw(read_shard(folder, step)))
        if dist.get_rank() == 0:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "total_steps": int(steps), **metrics}) + "\n")
        if step == int(save_at):
            save_checkpoint(actor, folder, step, {"version": step})


if __name__ == "__main__":
    chosen, words = globals()[sys.argv[1]], sys.argv[2:]
    if chosen is train:
        in_process_group(lambda store: train(*words, store=store), load(RunConfig, words[0], check=False))
    else:
        in_process_group(lambda store: chosen(*words))
    leave(0)
