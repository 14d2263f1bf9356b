"""Add the pages that are written by the code: the interfaces of each public module, and the keys of each command.

They exist only in the site, so that pages which are also read in the repository cannot link to them: a comment in
docs/architecture.md, and one in docs/configuration.md, is replaced by the links.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import megarl
from megarl.cli.schema import make_reference
from megarl.config import STAGES

GUIDES = {
    "agents": ("rewards-and-agents.md", "environments.md"),
    "engines": ("configuration.md",),
    "environments": ("environments.md",),
    "functional": ("algorithms.md",),
    "models": ("models.md",),
    "reshard": ("weight-sync.md",),
    "rewards": ("rewards-and-agents.md",),
    "rl": ("algorithms.md", "schedules.md"),
}
"""Pages of docs/ that introduce each public module. `reshard` is used without `import megarl` giving it."""

RUN_METHODS = (
    "begin",
    "steps",
    "prompts",
    "serve",
    "sample",
    "sample_kept",
    "sample_with_baselines",
    "add_logprobs",
    "add_reference_logprobs",
    "add_model_logprobs",
    "add_values",
    "estimate",
    "kl_coefficient",
    "train_policy",
    "train_critic",
    "finish_critics",
    "train_model",
    "policy_loss",
    "finish_step",
    "finish_pretraining_step",
    "register_state",
    "add_metrics",
    "metric",
    "notify",
    "should_stop",
)
"""Methods of `RLRun` that training loops call, in the order of a step."""

OPTIONS: dict[str, dict[str, Any]] = {
    "Episode": {"merge_init_into_class": False},
    "RLRun": {"inherited_members": True, "merge_init_into_class": False, "members": list(RUN_METHODS)},
    "RolloutBatch": {"merge_init_into_class": False},
}
"""What mkdocstrings shows of a name, where it is not all."""


LINKS = {
    "architecture.md": (
        "<!-- pages of the public names -->",
        [f"- [`megarl.{name}`](api/{name}.md)" for name in GUIDES],
    ),
    "configuration.md": (
        "<!-- pages of all keys -->",
        [f"- [Keys of `megarl {command}`](reference/{command}.md)" for command in STAGES],
    ),
}
"""By page of docs/, the comment that is replaced, and the links."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages api/MODULE.md and reference/COMMAND.md."""
    for name in GUIDES:
        files.append(File.generated(config, f"api/{name}.md", content=_page(name)))
    for command in STAGES:
        files.append(File.generated(config, f"reference/{command}.md", content=make_reference(command)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the comment in a page by links to generated pages."""
    del config, files
    if page.file.src_uri not in LINKS:
        return markdown
    comment, links = LINKS[page.file.src_uri]
    if comment not in markdown:
        raise PluginError(f"docs/{page.file.src_uri} needs the comment {comment}")
    return markdown.replace(comment, "\n".join(links))


def _page(name: str) -> str:
    module = import_module("megarl.reshard") if name == "reshard" else getattr(megarl, name)
    guides = ", ".join(f"[{guide}](../{guide})" for guide in GUIDES[name])
    return "\n\n".join([f"# megarl.{name}", str(module.__doc__), f"Guides: {guides}.", *_interfaces(module), ""])


def _interfaces(module: ModuleType) -> list[str]:
    entries = []
    for name in module.__all__:
        options = yaml.safe_dump({"options": {"heading_level": 2, **OPTIONS.get(name, {})}})
        indented = "".join(f"    {line}\n" for line in options.splitlines())
        entries.append(f"::: {module.__name__}.{name}\n{indented}")
    return entries
