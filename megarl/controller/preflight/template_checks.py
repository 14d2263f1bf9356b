"""Notices about chat templates: variables without effect, and turns that end without a stop token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables

from megarl.config.data import Source
from megarl.config.run import StageConfig
from megarl.errors import DataError

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerBase


class _GenerationMarks(Extension):
    """Parses `{% generation %}` as transformers does, as its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_template_variables(source: str) -> frozenset[str]:
    """Return the names of variables that a chat template reads.

    Raises:
        TemplateError: it cannot be parsed.
    """
    environment = Environment(extensions=[_GenerationMarks, loopcontrols])  # noqa: S701  # nothing is rendered
    return frozenset(find_undeclared_variables(environment.parse(source)))


def find_template_notices(config: StageConfig) -> Iterator[str]:
    """Yield a sentence for each variable without effect, and for each template that ends turns without a stop token.

    Yields nothing for a model whose folder has no tokenizer yet.
    """
    from megarl.data.tokenizer import load_tokenizer  # imports transformers, which the other checks do without

    if not Path(config.model.path).is_dir():
        return
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except DataError:
        return  # the checks of the data report it
    ends = set[str]()
    for source in config.data.resolved_sources:
        yield from _find_unused_variables(source, tokenizer)
        ends.update(_find_endless_turns(source, tokenizer))
    yield from sorted(ends)


def _find_unused_variables(source: Source, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from megarl.data.chat_template import chat_template_source

    given, key = source.config.chat_template_kwargs, f"{source.key}.chat_template_kwargs"
    if not given:
        return
    if source.config.chat_template == "never" or tokenizer.chat_template is None:
        yield f"{key} has no effect: there is no chat template"
        return
    templates = tokenizer.chat_template
    names = [source.config.chat_template_name or name for name in templates] if isinstance(templates, dict) else [None]
    try:
        read = frozenset[str]().union(
            *(find_template_variables(chat_template_source(tokenizer, name)) for name in names)
        )
    except TemplateError:
        return  # rendering the first row reports it
    for name in sorted(given.keys() - read):
        yield f"{key}.{name} has no effect: the chat template does not read a variable of this name"


def _find_endless_turns(source: Source, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from megarl.data.chat_template import find_turn_end, has_chat_template, read_end_ids, template_options

    config = source.config
    if config.chat_template == "never" or not has_chat_template(tokenizer, config.chat_template_name, key=source.key):
        return
    found, stops = find_turn_end(tokenizer, source.day, template_options(config, tokenizer)), read_end_ids(tokenizer)
    if found is None or stops.intersection(found):
        return
    known = ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r} ({each})" for each in sorted(stops))
    if not found:
        end = "writes nothing after the assistant's turn"
    else:
        tokens = ", ".join(map(str, found))
        end = f"ends the assistant's turn with {tokenizer.decode(found)!r} (tokens {tokens}), which has no stop token"
    yield (
        f"model.path: the chat template {end}; generation ends at {known} alone, so that a policy that ends its turns "
        "as the template does runs on to its length limit: add the token to eos_token_id in generation_config.json"
    )
