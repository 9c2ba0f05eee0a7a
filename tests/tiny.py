"""Tiny random models with a real tokenizer, so that tests run real transformers, vLLM and FSDP code in seconds.

The sizes respect what vLLM's CPU build accepts: head_dim 32, expert sizes that are multiples of 32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

KINDS = ("qwen3", "llama", "qwen3_moe")


def make_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on small sums and chat words; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    sums = [f"What is {a} + {b} - {b - 1}? The answer is {a + 1}.\n" for a in range(30) for b in range(30)]
    chat = ["system user assistant tool state the final answer to the following problem\n", "reverse sort count letters words\n"] * 50
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(sums + chat, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=CHATML, clean_up_tokenization_spaces=False)


def make_tiny(kind: str, out: str | Path, seed: int = 0, hidden: int = 64, layers: int = 2, dtype: str = "float32",
              tied: bool = False) -> Path:
    """Write a random model and its tokenizer to the folder `out` and return it. kind: one of KINDS."""
    tokenizer = make_tokenizer()
    vocab = -(-len(tokenizer) // 64) * 64
    common = dict(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  intermediate_size=2 * hidden, max_position_embeddings=4096, tie_word_embeddings=tied, initializer_range=0.08,
                  eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1,
                   mlp_only_layers=[])
    if kind not in KINDS:
        raise ValueError(f"tiny model: expected one of {KINDS}, got {kind!r}")
    config = AutoConfig.for_model(kind, **common, **(experts if kind == "qwen3_moe" else {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)
