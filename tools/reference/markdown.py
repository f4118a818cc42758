"""Parts of generated Markdown pages."""

import inspect
import re
from collections.abc import Iterable, Sequence


def head(title: str, name: str, text: str) -> str:
    """Return the beginning of a page: its title, the command that writes it, and a text."""
    return f"# {title}\n\n`python -m tools.reference {name}` writes this page from the code. {text}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def code(text: str) -> str:
    """Return a text in code font, or nothing for an empty text."""
    return f"`{text}`" if text else ""


def docstring(of: object) -> str:
    """Return a docstring as Markdown."""
    return re.sub(r"``", "`", inspect.cleandoc(of.__doc__ or ""))


def joined(parts: Iterable[str]) -> str:
    """Return the text of a page."""
    return "\n\n".join(part for part in parts if part) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
