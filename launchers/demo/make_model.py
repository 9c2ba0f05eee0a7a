"""Make the demo's model: a Qwen3 of 0.3 million parameters with random weights and a tokenizer of its own.

    python launchers/demo/make_model.py FOLDER [SEED]

It is small enough to learn sums on one core in a minute, yet everything that handles it is the real code: vLLM
serves it (attention heads of size 32, the least that its CPU build takes) and transformers trains it. The
tokenizer is byte-level BPE, so any text round-trips; digits are always single tokens, and because
its words are not split at blanks the task's constant phrases become one token each.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from make_data import REPLIES, chain_sums
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")

VOCAB, CORPUS_ROWS, CORPUS_SEED = 384, 3000, 3
CONTEXT = 512
HIDDEN, LAYERS, HEADS, HEAD_DIM, FEED_FORWARD = 96, 2, 3, 32, 288


def make_tokenizer(texts: Iterable[str], vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the texts; `vocab` bounds its size, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, model_max_length=CONTEXT)


def corpus() -> list[str]:
    """Questions and replies of the task, and the words of the chat template."""
    rows = chain_sums(CORPUS_ROWS, CORPUS_SEED)
    texts = [row["question"] for row in rows] + [REPLIES[i % len(REPLIES)](row) for i, row in enumerate(rows)]
    return texts + ["system\n", "user\n", "assistant\n"] * CORPUS_ROWS


def make_model(folder: str | Path, seed: int = 0) -> Path:
    """Write configuration, random float32 weights and tokenizer to the folder; returns it."""
    tokenizer = make_tokenizer(corpus())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, intermediate_size=FEED_FORWARD,
                         max_position_embeddings=CONTEXT, tie_word_embeddings=False, **ids)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


if __name__ == "__main__":
    print(make_model(sys.argv[1], *map(int, sys.argv[2:])))
