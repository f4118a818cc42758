"""The page of the recipes and cluster files of the package, from their first lines."""

from diffmegatron.operations.recipes import description, groups
from tools.reference.markdown import code, head, joined, table

_INTRODUCTION = """\
`diffmegatron configs list` prints the same names, and `diffmegatron configs copy NAME` copies a
file with all files that it extends. [recipes.md](../recipes.md) explains recipes, and
[examples/](../../examples/README.md) has commented ones."""


def page() -> str:
    """Return the page docs/reference/shipped_recipes.md."""
    parts = [head("Shipped recipes", "shipped_recipes", _INTRODUCTION)]
    for title, names in groups().items():
        rows = [(code(name), description(name)) for name in names]
        parts += [f"## {title[0].upper()}{title[1:]}", table(("name", "content"), rows)]
    return joined(parts)
