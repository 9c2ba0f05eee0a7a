"""Chat templates that behave like those of the model families people train, written for the tests, and a tokenizer for all of them.

What matters is kept: where special tokens stand, what ends a turn, how tool calls and results are laid out, which of them drop
earlier thinking, trim replies or put nothing at all behind a reply.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thinking is kept only behind the last question; tool results that follow each other share one turn.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set text = m.content or '' %}
{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and thought %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- text }}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first or text %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# Contents are trimmed, the tools stand in the first user message, a call is a bare JSON object.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- set ns = namespace(tools=tools) %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a message') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'user' and ns.tools %}{% for t in ns.tools %}{{ t | tojson }}{% endfor %}{% set ns.tools = none %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# No system and no tools, roles must alternate, the assistant is called model.
GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Thinking is always dropped; the opening of a reply holds the mark; special tokens stand between parallel calls and results.
DEEPSEEK = """\
{%- set ns = namespace(tool=false) %}
{{- '<|begin_of_sentence|>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% endif %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% set ns.tool = false %}{% endif %}
{%- if m.role == 'assistant' %}
{%- if not ns.tool %}{{ '<|Assistant|>' }}{% endif %}
{{- (m.content or '').split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}
{%- if loop.first %}{{ '<|tool_calls_begin|>' }}{% endif %}
{{- '<|tool_call_begin|>function<|tool_sep|>' + c.function.name + '\\n' + c.function.arguments | tojson + '<|tool_call_end|>' }}
{%- if loop.last %}{{ '<|tool_calls_end|>' }}{% endif %}
{%- endfor %}
{{- '<|end_of_sentence|>' }}
{%- set ns.tool = false %}
{%- endif %}
{%- if m.role == 'tool' %}
{%- if not ns.tool %}{{ '<|tool_outputs_begin|>' }}{% endif %}
{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}
{%- set ns.tool = true %}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|tool_outputs_end|>' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{% if not ns.tool %}{{ '<|Assistant|>' }}{% endif %}{{ '<think>\\n' }}{% endif %}"""

# Nothing ends a reply: the model stops by sampling the mark of whoever speaks next.
GLM = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- '[gMASK]<sop>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set text = m.content or '' %}
{{- '<|assistant|>' }}
{%- if '</think>' in text and loop.index0 > ns.last %}{{ '\\n<think>' + text.split('</think>')[0].split('<think>')[-1] + '</think>' }}{% endif %}
{%- if text.split('</think>')[-1].strip() %}{{ '\\n' + text.split('</think>')[-1].strip() }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + v | string + '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Results name the call that they answer.
KIMI = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{%- if loop.first %}{{ '<|tool_calls_section_begin|>' }}{% endif %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson + '<|tool_call_end|>' }}
{%- if loop.last %}{{ '<|tool_calls_section_end|>' }}{% endif %}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}
{{- ('<|im_system|>system' if m.role == 'system' else '<|im_user|>user') + '<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "deepseek": DEEPSEEK, "glm": GLM, "kimi": KIMI}
END = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "deepseek": "<|end_of_sentence|>",
       "glm": "<|user|>", "kimi": "<|im_end|>"}
"""The token with which a plain reply ends."""

SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <bos> <start_of_turn>
<end_of_turn> <|begin_of_sentence|> <|end_of_sentence|> <|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|> <|tool_call_begin|>
<|tool_call_end|> <|tool_sep|> <|tool_outputs_begin|> <|tool_outputs_end|> <|tool_output_begin|> <|tool_output_end|> [gMASK] <sop>
<|user|> <|assistant|> <|system|> <|observation|> <|im_assistant|> <|im_user|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|tool_call_argument_begin|>""".split()


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, whose merges depend on where a text is cut, with one of TEMPLATES."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["hello hell he user assistant tool think the answer is 12 or 21 lo"] * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END[template], pad_token="<|endoftext|>",
                                   chat_template=TEMPLATES[template], clean_up_tokenization_spaces=False)
    made.add_tokens(["<think>", "</think>"])
    return made
