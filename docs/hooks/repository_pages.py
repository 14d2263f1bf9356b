"""Add a page for every file outside docs/ that a page links to: examples, recipes, benchmark results, source files.

In the repository these links are relative paths. Here they lead to copies below repository/. Files that do not exist
are left to the link check of MkDocs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
COPIES = "repository"

ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/**/*.md", "launch/**/*.md")
"""Files that have a page even if no other page links to them."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".sbatch": "bash", ".toml": "toml"}
IMAGES = (".svg", ".png", ".jpg")

LINK = re.compile(r"(`[^`]+`)|(?<=\]\()([^)\s#]+)(?=[)\s#])")
"""Inline code, which is skipped, or the path of a link."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the README of every example to the section Examples of the navigation."""
    (pages,) = [item["Examples"] for item in config.nav or [] if isinstance(item, dict) and "Examples" in item]
    pages += [_site_uri(path) for path in sorted(ROOT.glob("examples/*/README.md"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the copies of all files that can be reached from the pages."""
    pending = [path for pattern in ALWAYS for path in sorted(ROOT.glob(pattern))]
    pending += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(pending)
    while pending:
        path = pending.pop()
        uri = _site_uri(path)
        if uri.startswith(f"{COPIES}/") and files.get_file_from_path(uri) is None:
            files.append(_copy(path, uri, config))
        for target in _targets(path) if path.suffix == ".md" else ():
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to the pages of the files that they name."""
    del config, files
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else ROOT / "docs" / uri
    if not source.is_file():
        return markdown

    def replace(link: str) -> str:
        target = _resolve(source, link)
        return link if target is None else posixpath.relpath(_site_uri(target), posixpath.dirname(uri) or ".")

    return "\n".join(_with_links(markdown, replace))


def _with_links(markdown: str, replace: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines with the paths of their links replaced; code blocks stay as they are."""
    in_block = False
    for line in markdown.split("\n"):
        in_block ^= line.lstrip().startswith("```")
        yield line if in_block else LINK.sub(lambda match: match[1] or replace(match[2]), line)


def _targets(page: Path) -> set[Path]:
    found: set[Path] = set()

    def note(link: str) -> str:
        target = _resolve(page, link)
        if target is not None:
            found.add(target)
        return link

    for _ in _with_links(page.read_text(), note):
        pass
    return found


def _resolve(page: Path, link: str) -> Path | None:
    """Return the file or folder of the repository that a link of `page` leads to."""
    if ":" in link or link.startswith("/"):
        return None
    target = Path(posixpath.normpath(page.parent / link))
    if not target.exists() or not target.is_relative_to(ROOT):
        return None
    readme = target / "README.md"
    return readme if readme.is_file() else target


def _site_uri(path: Path) -> str:
    """Return the path in the site's sources of a file or folder of the repository."""
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith("docs/"):
        return relative.removeprefix("docs/")
    if path.is_dir():
        return f"{COPIES}/{relative}/index.md"
    return f"{COPIES}/{relative}" if path.suffix in (".md", *IMAGES) else f"{COPIES}/{relative}.md"


def _copy(path: Path, uri: str, config: MkDocsConfig) -> File:
    relative = path.relative_to(ROOT).as_posix()
    if path.suffix in IMAGES:
        return File.generated(config, uri, content=path.read_bytes())
    if path.suffix == ".md":
        return File.generated(config, uri, content=path.read_text())
    head = f"---\nsearch:\n  exclude: true\n---\n# `{relative}`\n\n"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
        return File.generated(config, uri, content=head + "\n".join(f"- `{name}`" for name in names))
    fence = "`" * 8
    content = f"{head}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n{fence}\n"
    return File.generated(config, uri, content=content)
