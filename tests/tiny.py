"""Tiny random models with a real tokenizer, so that tests run real transformers, vLLM and FSDP code in seconds.

The sizes respect what vLLM's CPU build accepts: head_dim 32, expert sizes that are multiples of 32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

# Contents are text, or parts of text and images.
VISION_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

KINDS = ("qwen3", "llama", "qwen3_moe", "glm4_moe")
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


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
    if kind == "glm4_moe":  # the buffers that correct its routers' scores belong to the checkpoint
        experts = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1, first_k_dense_replace=1,
                       use_qk_norm=True, num_nextn_predict_layers=0)
    if kind not in KINDS:
        raise ValueError(f"tiny model: expected one of {KINDS}, got {kind!r}")
    config = AutoConfig.for_model(kind, **common, **(experts if kind.endswith("moe") else {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def make_tiny_vision(kind: str, out: str | Path, seed: int = 0, tied: bool = False) -> Path:
    """The same with a vision tower: qwen2_5_vl or qwen3_vl, with a processor that makes 4 to 64 tokens of an image."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    tokenizer.chat_template = VISION_CHATML
    newer, patch = kind == "qwen3_vl", 16 if kind == "qwen3_vl" else 14
    text = dict(vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=64 if newer else 128, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=tied, initializer_range=0.08,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5] if newer else [4, 6, 6])
                | (dict(mrope_interleaved=True) if newer else {}), **(dict(head_dim=32) if newer else {}))
    tower = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=text["hidden_size"], patch_size=patch,
                 spatial_merge_size=2, temporal_patch_size=2, initializer_range=0.08,
                 **(dict(num_position_embeddings=64, deepstack_visual_indexes=[0]) if newer else dict(window_size=56, fullatt_block_indexes=[1])))
    ids = dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
                   tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=tied, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    processor = dict(processor_class="Qwen3VLProcessor" if newer else "Qwen2_5_VLProcessor", patch_size=patch, merge_size=2,
                     temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=dict(shortest_edge=56 * 56, longest_edge=224 * 224))
    for name, key, value in (("preprocessor_config", "image_processor_type", "Qwen2VLImageProcessor"),
                             ("video_preprocessor_config", "video_processor_type", "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor")):
        (Path(out) / f"{name}.json").write_text(json.dumps(processor | {key: value}))
    return Path(out)
