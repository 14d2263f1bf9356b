"""Fail the build on a wrong command or code block in the pages, and on a page that loads anything from another host."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from tests.docs.code_blocks import find_problems, pages

EXTERNAL = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon)\b[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
)
"""An element whose content the browser would load from another host."""


def on_pre_build(config: MkDocsConfig) -> None:
    """Check the code blocks and inline code of all Markdown files that are written by hand."""
    del config
    problems = find_problems(pages())
    if problems:
        raise PluginError("\n".join(["wrong code in the pages:", *map(str, problems)]))


def on_post_build(config: MkDocsConfig) -> None:
    """Check that the built pages load nothing from another host."""
    site = Path(config.site_dir)
    found = [
        f"{file.relative_to(site)}: {match[0]}"
        for file in sorted(site.rglob("*.html"))
        for match in EXTERNAL.finditer(file.read_text())
    ]
    found += [
        f"{file.relative_to(site)}: {match[0]}"
        for file in sorted(site.rglob("*.css"))
        for match in re.finditer(r"url\([\"']?(?:https?:)?//[^)]+\)", file.read_text())
    ]
    if found:
        raise PluginError("\n".join(["the pages need to work offline, these load from another host:", *found]))
