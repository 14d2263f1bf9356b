"""Draw Mermaid diagrams as SVG files while building, so that the pages need no script for them."""

from __future__ import annotations

import hashlib
import posixpath
import re

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each diagram by an image; fails on one that Mermaid cannot parse."""

    def draw(match: re.Match[str]) -> str:
        line = markdown.count("\n", 0, match.start()) + 1
        name = f"diagrams/{hashlib.sha256(match[1].encode()).hexdigest()[:16]}.svg"
        if files.get_file_from_path(name) is None:
            try:
                image = mermaidx.render(match[1]).svg()
            except RuntimeError as error:
                raise PluginError(f"{page.file.src_uri}:{line}: {error}") from error
            files.append(File.generated(config, name, content=image))
        heading = re.findall(r"^#+ (.*)$", markdown[: match.start()], re.MULTILINE)
        path = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"![Diagram: {heading[-1] if heading else page.title}]({path})"

    return BLOCK.sub(draw, markdown)
