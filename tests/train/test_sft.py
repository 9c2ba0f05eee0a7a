"""Supervised fine-tuning from the command line: it learns, whatever the ranks, and writes a folder that opens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_hpc.data.templates import render_with_mask
from tests.train.ranks import ROOT


def write_rows(path: Path, count: int = 64) -> Path:
    rows = [{"messages": [{"role": "user", "content": f"What is {i % 9} + 1?"}, {"role": "assistant", "content": f"{i % 9 + 1}"}]}
            for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft(model: Path, rows: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "molt_hpc", "sft", "--output_dir", str(out), "--model.model_name_or_path", str(model),
               "--data.dataset", str(rows), "--train.batch_size", "32", "--train.max_tokens_per_gpu", "256",
               "--fsdp.param_dtype", "float32", "--optim.adam.lr", "3e-3", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_folder_answers(tiny_qwen3, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl")
    done = sft(tiny_qwen3, rows, tmp_path / "out", "--train.max_steps", "40", "--optim.lr_scheduler", "cosine")
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "out")
    assert len(found) == 40 and found[-1] < 0.2 * found[0]
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 4 + 1?"}], add_generation_prompt=True, return_tensors="pt",
                                           return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    assert tokenizer.decode(reply) == "5<|im_end|>", "the model must have learned to end its turn too"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["transformers", "automodel"])
def test_two_ranks_learn_the_same_as_one(tiny_qwen3, tmp_path: Path, backend: str):
    rows = write_rows(tmp_path / "rows.jsonl", 50)
    for ranks in ("1", "2"):
        done = sft(tiny_qwen3, rows, tmp_path / ranks, "--train.max_epochs", "2", "--num_procs", ranks, "--model.backend", backend)
        assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(one) == 4
    assert one == pytest.approx(two, rel=1e-4)


def test_a_bad_row_is_named_by_file_and_line(tiny_qwen3, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    rows.write_text(rows.read_text() + json.dumps({"messages": [{"role": "user", "content": "and?"}]}) + "\n")
    done = sft(tiny_qwen3, rows, tmp_path / "out")
    assert done.returncode == 1
    assert f"{rows}:4: no assistant message" in done.stderr


@pytest.mark.slow
def test_rows_cut_before_their_reply_are_left_out(tiny_qwen3, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    long = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "never seen"}]}
    rows.write_text(json.dumps(long) + "\n" + rows.read_text())
    done = sft(tiny_qwen3, rows, tmp_path / "out", "--data.max_len", "64")
    assert done.returncode == 0, done.stderr
    assert "1 rows have no reply token within data.max_len 64" in done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    expected = sum(render_with_mask(tokenizer, json.loads(line)["messages"])[1].sum() for line in rows.read_text().splitlines()[1:])
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["reply_tokens"] == expected
