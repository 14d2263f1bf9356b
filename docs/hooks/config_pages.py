"""Add a page with all configuration keys of each command, written by the code behind `megarl schema --markdown`.

The pages exist only in the site, so that pages which are also read in the repository cannot link to them: a comment in
docs/configuration.md is replaced by the links.
"""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megarl.cli.tools.config_reference import make_reference
from megarl.config import STAGES

PLACE_OF_LINKS = "<!-- pages of all keys -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages reference/COMMAND.md."""
    for command in STAGES:
        files.append(File.generated(config, f"reference/{command}.md", content=make_reference(command)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the comment in the page on configuration by links to the pages of all keys."""
    del config, files
    if page.file.src_uri != "configuration.md":
        return markdown
    if PLACE_OF_LINKS not in markdown:
        raise PluginError(f"docs/configuration.md needs the comment {PLACE_OF_LINKS}")
    links = "\n".join(f"- [Keys of `megarl {command}`](reference/{command}.md)" for command in STAGES)
    return markdown.replace(PLACE_OF_LINKS, links)
