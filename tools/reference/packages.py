"""The page of all packages, from the first sentences of their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.paths import ROOT
from tools.reference.markdown import code, head, joined, table

_PACKAGE = ROOT / "diffmegatron"
_INTRODUCTION = """\
[architecture.md](../architecture.md#who-may-import-whom) defines which package may import which."""


def page() -> str:
    """Return the page docs/reference/packages.md."""
    rows = [(code(name), text) for name, text in sorted(_described())]
    parts = [head("Packages", "packages", _INTRODUCTION)]
    return joined([*parts, table(("package or module of `diffmegatron/`", "content"), rows)])


def _described() -> Iterator[tuple[str, str]]:
    """Yield each package, and each module outside of subpackages, with its first sentence."""
    for path in [*_PACKAGE.glob("*.py"), *_PACKAGE.glob("*/**/__init__.py")]:
        is_package = path.name == "__init__.py" and path.parent != _PACKAGE
        name = path.parent if is_package else path
        yield f"{name.relative_to(_PACKAGE)}{'/' if is_package else ''}", _sentence(path)


def _sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("``", "`")
