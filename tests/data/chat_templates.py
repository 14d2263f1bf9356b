"""Chat templates of the kinds that models have, with generation marks, and a tokenizer for them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from megarl.data.tiny_checkpoint import train_tokenizer
from tests.data.conftest import Tokenizer

SPECIALS = [
    "<bos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|user|>",
    "<think>",
    "</think>",
]

TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
HEAD = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

CHATML = f"""
{{%- if tools %}}{{{{ '<|im_start|>system\n' }}}}{{{{ tools | tojson }}}}{{{{ '<|im_end|>\n' }}}}{{% endif -%}}
{{%- for m in messages -%}}{TURN}
{{%- if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}
{{%- for call in m.tool_calls or [] %}}{{{{ '<tool_call>' }}}}{{{{ call.function | tojson }}}}{{% endfor -%}}
{{{{ '<|im_end|>' }}}}{{% endgeneration %}}{{% else %}}{{{{ m.content + '<|im_end|>' }}}}{{% endif %}}{{{{ '\n' }}}}
{{%- endfor -%}}{HEAD}"""

LLAMA = """{{ bos_token }}
{%- for m in messages -%}
{{ '<|head|>' + m.role + '<|/head|>\n\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}{% endgeneration %}
{%- else %}{{ m.content | trim + '<|eot|>' }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""

SYSTEM_IN_USER = """{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}
{%- elif m.role == 'user' %}{{ '<|user|>' + ns.system + m.content + '<|eot|>' }}{% set ns.system = '' %}
{%- else %}{{ '<|head|>model\n' }}{% generation %}{{ m.content + '<|eot|>' }}{% endgeneration %}{{ '\n' }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|head|>model\n' }}{% endif %}"""

QWEN3 = (
    """
{%- set ns = namespace(last=messages|length) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}"""
    + TURN
    + """
{%- if m.role == 'assistant' -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' -%}
{%- generation -%}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif -%}
{{ content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor -%}"""
    + HEAD
)

R1 = """{{ bos_token }}
{%- for m in messages -%}
{%- if m.role == 'assistant' %}{{ '<|head|>' + m.content.split('</think>')[-1] + '<|eot|>' }}
{%- else %}{{ '<|user|>' + m.content }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|head|><think>\n' }}{% endif %}"""


def make_tokenizer(template: str, *, eos: str = "<|im_end|>") -> Tokenizer:
    tokenizer = train_tokenizer(["Hi, you are here. Yes, I am brief 2+2? 4\n\n", "assistant user system"], 300, 512)
    words = Split(
        Regex(r"[^\r\n\w]?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"
    )  # as Llama 3 and Qwen split texts
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", eos
    tokenizer.chat_template = template
    return tokenizer


def without_marks(template: str) -> str:
    for mark in ("{%- generation -%}", "{% generation %}", "{% endgeneration %}"):
        template = template.replace(mark, "{#- -#}" if "-" in mark else "")
    assert "generation %}" not in template
    return template


class Trained(Protocol):
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...


def trained_texts(tokenizer: Tokenizer, sample: Trained) -> list[str]:
    """Return the texts of the runs of trained tokens."""
    runs, previous = list[list[int]](), False
    for token, is_trained in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if is_trained and not previous:
            runs.append([])
        if is_trained:
            runs[-1].append(token)
        previous = is_trained
    return [tokenizer.decode(run) for run in runs]
