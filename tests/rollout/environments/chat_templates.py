"""Chat templates written for tests, and a tokenizer that has one of them."""

from datetime import date
from typing import Any

from megarl.data.tiny_checkpoint import train_tokenizer

DAY = date(2026, 1, 31)
"""What templates take for the current date."""

APPEND = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRIM = APPEND.replace("{{ m.content }}", "{{ m.content | trim }}")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|system|>\nYou are helpful.<eos>\n{% endif %}" + APPEND
DATED = "<|system|>\nToday is {{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}.<eos>\n" + APPEND
STRIPS_THOUGHTS = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "<|{{ m.role }}|>\n{{ text }}<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SORTED_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | dictsort | list | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Writes the arguments of a call sorted by name, however the policy has written them."""

STABLE = {
    "append": APPEND,
    "trim": TRIM,
    "default system": DEFAULT_SYSTEM,
    "dated": DATED,
    "sorted calls": SORTED_CALLS,
}


def chat_tokenizer(template: str) -> Any:
    """Return a tokenizer with this chat template; `<eos>` is its only special token besides `<pad>`."""
    tokenizer = train_tokenizer(["<|user|> <|assistant|> is it why yes higher lower tool"] * 3, 330, 512)
    tokenizer.chat_template = template
    return tokenizer
