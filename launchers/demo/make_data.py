"""Make the demo's data: sums from reasoning-gym as chat rows (warm start) and as prompts (reinforcement learning).

    python launchers/demo/make_data.py FOLDER [SEED [SHOTS]]

The task is `chain_sum` with two or three terms of one digit. The warm start sees correct answers only, in three
ways of putting them: the bare number, the sum written out, a sentence. The question asks for the final answer, and
reasoning-gym's scorer pays 1.0 for the bare number and a small share for a right number inside other text: that the
number alone is wanted, and to be surer of it, is what is left to learn from the reward.

The questions are split by a hash of their text: none of the prompts' questions is in a row of the warm start.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reasoning_gym

DATASET = "chain_sum"
DIFFICULTY = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SFT_ROWS, PROMPTS = 20000, 4096
HELD_OUT_PERCENT = 25
SEED_STRIDE = 10_000_000
"""Row i of a dataset of seed s is made from the seed s + i, so seeds must lie further apart than rows."""

REPLIES: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda row: row["answer"],
    lambda row: f"{row['metadata']['expression']} = {row['answer']}",
    lambda row: f"The answer is {row['answer']}.",
)


def chain_sums(count: int, seed: int, **difficulty: int) -> list[dict[str, Any]]:
    """`count` rows {question, answer, metadata}; a function of seed and difficulty."""
    dataset = reasoning_gym.create_dataset(DATASET, size=count, seed=seed * SEED_STRIDE, **(DIFFICULTY | difficulty))
    return [dataset[i] for i in range(count)]


def held_out(question: str) -> bool:
    """Whether a question belongs to the prompts; a function of its text alone."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def draw(count: int, seed: int, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """The first `count` rows whose question is wanted."""
    rows, size = [], count
    while len(rows) < count:
        size *= 2
        rows = [row for row in chain_sums(size, seed) if wanted(row["question"])]
    return rows[:count]


def sft_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Chat rows {"messages": [question, correct reply]}, the ways of replying in turn."""
    return [{"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": REPLIES[i % len(REPLIES)](row)}]}
            for i, row in enumerate(draw(count, 2 * seed + 1, lambda q: not held_out(q)))]


def prompt_rows(count: int, seed: int, shots: int = 0) -> list[dict[str, Any]]:
    """Prompt rows {id, prompt, label, source}; the label is what the scorer needs of the entry.

    `shots` solved questions stand before each question, for a model that has not been trained on the task.
    """
    shown = [message for row in draw(shots, 2 * seed + 1, lambda q: not held_out(q)) for message in
             ({"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]})]
    return [{"id": f"{DATASET}-{seed}-{i}", "prompt": [*shown, {"role": "user", "content": row["question"]}],
             "label": {"answer": row["answer"], "metadata": {"source_dataset": DATASET}}, "source": DATASET}
            for i, row in enumerate(draw(count, 2 * seed + 2, held_out))]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_data(folder: str | Path, seed: int = 0, shots: int = 0) -> tuple[Path, Path]:
    """Write sft.jsonl and prompts.jsonl to the folder; returns both paths. `shots` solved questions stand before that of every prompt."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return (write_jsonl(folder / "sft.jsonl", sft_rows(SFT_ROWS, seed)), write_jsonl(folder / "prompts.jsonl", prompt_rows(PROMPTS, seed, shots)))


if __name__ == "__main__":
    print(*make_data(sys.argv[1], *map(int, sys.argv[2:])))
