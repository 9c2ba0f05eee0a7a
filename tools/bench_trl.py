"""TRL's GRPO step on saved rollouts, for tools/bench_train.py: seconds of a step and peak memory as one JSON line.

    PYTHON tools/bench_trl.py '{"model": folder, "shard": file, "budget": tokens, "steps": n, "dtype": "float32"}'

Runs under any Python that has trl, without code of this project: TRL is handed the shard's tokens and rewards in place of
sampling its own. Every other setting is TRL's, but for recomputation (off, as in the product's measurement) and the KL (none).
"""

import json
import resource
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file


def rollouts(shard: str) -> tuple[list[list[int]], list[list[int]], list[list[float]], np.ndarray]:
    """(prompts, replies, log-probs of the replies, rewards) of a shard whose rollouts have one segment with one reply."""
    arrays = load_file(shard)
    starts, ids, logprobs, mask = (arrays[name] for name in ("segment_offsets", "token_ids", "logprobs", "action_mask"))
    found: tuple[list, list, list] = ([], [], [])
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        middle = start + int(mask[start:end].argmax())
        for rows, part in zip(found, (ids[start:middle], ids[middle:end], logprobs[middle:end]), strict=True):
            rows.append(part.tolist())
    return *found, arrays["rollout_reward"]


def tokenizer(vocabulary: int) -> Any:
    """Words t0, t1 ...: TRL wants to decode what it trains on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")


def main(options: dict[str, Any]) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    prompts, replies, logprobs, rewards = rollouts(options["shard"])
    longest = max(map(len, prompts)) + max(map(len, replies))
    count, fitting = len(prompts), max(1, options["budget"] // longest)
    rows = max(n for n in range(1, fitting + 1) if count % n == 0)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **context: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, per_device_train_batch_size=rows, gradient_accumulation_steps=count // rows, steps_per_generation=count // rows,
            num_generations=4, max_completion_length=longest, max_steps=options["steps"] + 1, learning_rate=1e-6, beta=0.0,
            bf16=options["dtype"] == "bfloat16", gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available())
        model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
        GRPOTrainer(model, lambda completions, **columns: rewards.tolist(), config, Dataset.from_dict({"prompt": ["t2"] * count}),
                    processing_class=tokenizer(model.config.vocab_size), callbacks=[Clock()],
                    rollout_func=lambda asked, trainer: {"prompt_ids": prompts, "completion_ids": replies, "logprobs": logprobs}).train()
    seconds, tokens = float(np.median(np.diff(ends))), sum(map(len, prompts)) + sum(map(len, replies))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_mib": peak / 2**20, "padding_share": 1 - tokens / (count * longest)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
