"""Hook of mkdocs.yml: pages of the site that are outside of docs, and links that leave docs."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# File of the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "tasks.md",
    "examples/README.md": "examples.md",
    "examples/speedrun/README.md": "speedrun.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tools/README.md": "tools.md",
}
# Weight of a page in search results, by its file or its section of the site; others have 1. A word
# of a title weighs as much as a thousand of a text, and results have long titles.
_BOOSTS = {
    "changelog.md": 0.001,
    "reference/api.md": 0.01,
    "Results": 0.001,
    "Decisions": 0.5,
    "Start": 2,
    "Guides": 2,
}
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
_SOURCES = {page: source for source, page in OUTSIDE.items()}
# Roles of docstrings, such as :func:`train`.
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>|`)")
_LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]+)?\)"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of ``OUTSIDE``."""
    # mkdocs would use docs/README.md as the first page.
    if (index := files.get_file_from_path("README.md")) is not None:
        files.remove(index)
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text + _files_beside(source)))
    return files


def _files_beside(source: str) -> str:
    """Return the content of the examples for their page."""
    if source != "examples/README.md":
        return ""
    folder = (ROOT / source).parent
    found = sorted(each for each in folder.rglob("*.*") if each.suffix in _LANGUAGES)
    return "".join(
        f"\n## {path.relative_to(folder)}\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
        for path in found
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page whose links lead to pages of the site, without links to other files.

    The title of a page replaces its file name as the text of a link.
    """
    name = page.file.src_uri
    places = [name, *(section.title for section in page.ancestors)]
    page.meta["search"] = {"boost": next((_BOOSTS[each] for each in places if each in _BOOSTS), 1)}
    source = _SOURCES.get(name, f"docs/{name}")

    def replaced(link: re.Match[str]) -> str:
        mark, text, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        found = OUTSIDE.get(target) or (target[5:] if target.startswith("docs/") else None)
        if found is None or not (ROOT / target).is_file():
            return text
        title = (ROOT / target).read_bytes().partition(b"\n")[0].decode(errors="replace")
        if text.endswith(".md") and title.startswith("# "):
            text = title.removeprefix("# ")
        return f"{mark}[{text}]({posixpath.relpath(found, posixpath.dirname(name))}{anchor})"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the roles of docstrings."""
    return _ROLE.sub("", html)
