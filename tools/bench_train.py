"""Tokens/s and peak memory of a training step beside a bare transformers + FSDP2 loop and TRL's GRPO step; the chunked head beside a naive one.

The bare loop does what a plain script does with the same rollouts: padded micro-batches of the same token budget, all
logits, log_softmax, PPO loss, AdamW. `bare` pads every row to the batch's longest; `bare sorted` puts rows of similar
length together and pads to the longest of a micro-batch. Every measurement runs in processes of its own, so that each peak is its own.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from molt_hpc.config import RunConfig
from molt_hpc.data.shards import Batch, build_batch, write_shard
from molt_hpc.records import Prompt, Rollout, Segment

VOCABULARY = 4096
HEAD = {"vocabulary": 151936, "tokens": 8192, "hidden": 64}


def mixed_batch(rollouts: int, longest: int) -> Batch:
    """Rollouts with a tail of long ones (log-normal lengths), two thirds of each sampled; groups of four."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(rollouts):
        length = int(np.clip(rng.lognormal(np.log(longest / 8), 0.9), 16, longest))
        start = length // 3
        logprobs = np.where(np.arange(length) < start, 0.0, -np.log(VOCABULARY)).astype(np.float32)
        segment = Segment(rng.integers(3, VOCABULARY, length).astype(np.int32), logprobs, np.array([[start, length]], np.int32),
                          np.array([[start, length, 0]], np.int32), 1.0)
        reward = float(rng.integers(0, 2))
        made.append(Rollout(number // 4, number % 4, 0, Prompt(number // 4, str(number // 4), text=""), [segment], reward, reward,
                            "terminated", True, False, 1, 1.0))
    return build_batch(1, 0, made)


def random_model(folder: Path, hidden: int, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                         num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=8192)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def peak_bytes() -> int:
    """Largest memory of this process so far: of the GPU, or resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def product_step(options: dict[str, Any], batch: Batch):
    """A function that trains one step with the product's actor, and the shares of filling in what it computes."""
    from molt_hpc.train.actor import Actor
    from molt_hpc.train.attention import build_layout
    from molt_hpc.train.micro import TokenTable, share_plan

    config = RunConfig()
    config.actor.model_name_or_path, config.actor.backend = options["model"], "transformers"
    config.fsdp.param_dtype, config.train.max_tokens_per_gpu = options["dtype"], options["budget"]
    actor = Actor(config, None)
    plan = share_plan(actor.model, TokenTable(batch), config.train).steps[0]
    lengths = [[int(batch.segment_lengths[s]) for s in micro] for rank in plan.micro_batches for micro in rank if micro]
    attended = sum(index.numel() for each in lengths for index in build_layout(each, torch.device("cpu")).batches)
    dummies = 2 * sum(not micro for rank in plan.micro_batches for micro in rank)
    filling = {"padding_share": dummies / (dummies + len(batch.token_ids)), "attention_filling": 1 - len(batch.token_ids) / attended}
    raw = batch.to_bytes() if dist.get_rank() == 0 else None
    return lambda: actor.train_batch(raw), filling


def padded_rows(lengths: np.ndarray, budget: int, ranks: int, by_length: bool) -> list[tuple[np.ndarray, int]]:
    """(rows of one micro-batch of all ranks, the length they are padded to)."""
    order, found = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths)), []
    while len(order):
        longest = int(lengths[order[0]] if by_length else lengths.max())
        size = ranks * max(1, budget // longest)
        found.append((order[:size], longest))
        order = order[size:]
    return found


def bare_step(options: dict[str, Any], batch: Batch):
    """The same for a plain script: as many padded rows in a micro-batch as the budget holds, every n-th of them on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options["dtype"]))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    ranks, sampled = dist.get_world_size(), int(batch.action_mask.sum())
    parts = padded_rows(batch.segment_lengths, options["budget"], ranks, options["part"] == "bare sorted")

    def step() -> None:
        for chosen, longest in ((rows[dist.get_rank()::ranks], longest) for rows, longest in parts):
            ids, seen, acted = (torch.zeros(len(chosen), longest, dtype=torch.long) for _ in range(3))
            for i, s in enumerate(chosen):
                part = slice(batch.segment_offsets[s], batch.segment_offsets[s + 1])
                length = part.stop - part.start
                ids[i, :length], acted[i, :length] = (torch.from_numpy(values[part]) for values in (batch.token_ids, batch.action_mask))
                seen[i, :length] = 1
            ids, seen, acted = ids.to(device), seen.to(device), acted.to(device)
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1].float()
            current = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            advantages = torch.where(torch.arange(len(chosen), device=device)[:, None] % 2 == 0, 1.0, -1.0)
            ratio = (current - current.detach()).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((loss * acted[:, 1:]).sum() * ranks / sampled).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    share = 1 - len(batch.token_ids) / sum(len(rows) * longest for rows, longest in parts)
    return step, {"padding_share": share, "attention_filling": share}


def run_step(options: dict[str, Any]) -> dict[str, float]:
    """Child: median seconds of a step after one to warm up, and this rank's peak memory."""
    batch = mixed_batch(options["rollouts"], options["longest"])
    step, filling = (product_step if options["part"] == "product" else bare_step)(options, batch)
    seconds = []
    for _ in range(options["steps"] + 1):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    taken = float(np.median(seconds[1:]))
    return {"seconds": taken, "tokens_per_s": len(batch.token_ids) / taken, "peak_mib": peak_bytes() / 2**20} | filling


def run_head(options: dict[str, Any]) -> dict[str, float]:
    """Child: forward and backward of an output layer over its tokens; memory above what hidden states and weight take."""
    from molt_hpc.train.logprob import CHUNK_ELEMENTS, TokenScores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary, tokens = options["vocabulary"], options["tokens"]
    hidden = torch.randn(tokens, options["hidden"], device=device, requires_grad=True)
    weight = torch.randn(vocabulary, options["hidden"], device=device, requires_grad=True)
    targets, inverse = torch.arange(tokens, device=device) % vocabulary, torch.ones(tokens, device=device)
    before, started = peak_bytes(), time.perf_counter()
    if options["part"] == "chunked head":
        scores = TokenScores.apply(hidden, weight, targets, inverse, CHUNK_ELEMENTS // vocabulary, 0, None)[0]
    else:
        scores = torch.log_softmax((hidden @ weight.T).float() * inverse[:, None], -1).gather(-1, targets[:, None])
    scores.sum().backward()
    return {"seconds": time.perf_counter() - started, "peak_mib": (peak_bytes() - before) / 2**20}


def child(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "head" in options["part"]:
        print(json.dumps(run_head(options)))
        return
    from molt_hpc.train.launch import in_process_group, leave

    def work(store: dist.Store) -> None:
        found = run_step(options)
        peak = torch.tensor([found["peak_mib"]], device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(json.dumps(found | {"peak_mib": peak.item()}))

    in_process_group(work)
    leave(0)


def start(options: dict[str, Any], ranks: int = 1) -> dict[str, float]:
    """Run a child (torchrun for several ranks) and return what it measured."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return finish([sys.executable, *words, __file__, json.dumps(options)], f"{options['part']} on {ranks} ranks")


def start_trl(python: str, options: dict[str, Any]) -> dict[str, float] | None:
    """The same for TRL under the given Python, None where that has no trl. It reads the rollouts from a shard."""
    if subprocess.run([python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"]).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        shard = write_shard(Path(folder), 1, mixed_batch(options["rollouts"], options["longest"]).to_bytes())
        program = Path(__file__).with_name("bench_trl.py")
        return finish([python, str(program), json.dumps(options | {"shard": str(shard)})], "TRL")


def finish(line: list[str], what: str) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{what} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(model: Path | None = None, ranks: list[int] = [1, 2], rollouts: int = 64, longest: int = 1024, budget: int = 4096, steps: int = 3,
            dtype: str = "float32", trl_python: str = sys.executable) -> dict[str, Any]:
    """Rows for product, bare loops and TRL (one rank) on each number of ranks, and for both heads; ratios in the last row."""
    if rollouts % (4 * max(ranks)):
        raise SystemExit(f"--rollouts: expected groups of 4 that {max(ranks)} ranks share evenly, got {rollouts}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": str(model or random_model(Path(folder) / "model", 256, 4)), "rollouts": rollouts, "longest": longest,
                   "budget": budget, "steps": steps, "dtype": dtype}
        for count in ranks:
            for part in ("product", "bare", "bare sorted"):
                rows.append({"part": part, "ranks": count} | start(options | {"part": part}, count))
        trl = start_trl(trl_python, options)
    heads = {part: start(HEAD | {"part": part}) for part in ("chunked head", "naive head")}
    rows += [{"part": part} | HEAD | values for part, values in heads.items()]
    speed = {(row["part"], row["ranks"]): row["tokens_per_s"] for row in rows if "ranks" in row}
    ratios = {f"product_to_{part.replace(' ', '_')}_{count}_ranks": speed["product", count] / speed[part, count]
              for part in ("bare", "bare sorted") for count in ranks}
    if trl:
        rows.append({"part": "trl", "ranks": 1} | trl)
        ratios |= {"product_to_trl": speed["product", 1] / trl["tokens_per_s"]} if 1 in ranks else {}
    else:
        rows.append({"part": "trl: not installed"})
    ratios |= {f"scaling_{ranks[0]}_to_{count}_ranks": speed["product", count] / speed["product", ranks[0]] for count in ranks[1:]}
    ratios["head_memory_naive_to_chunked"] = heads["naive head"]["peak_mib"] / heads["chunked head"]["peak_mib"]
    return {"part": "train", "rows": [*rows, ratios]}


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
