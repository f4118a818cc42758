"""Write the generated pages of docs/reference.

python -m tools.reference                # all pages
python -m tools.reference suites         # one page
"""

import argparse
from collections.abc import Callable

from tools.paths import ROOT
from tools.reference import (
    backends,
    cluster_file,
    command_line,
    exit_statuses,
    features_by_layout,
    packages,
    refused_layouts,
    shipped_recipes,
    suites,
)

FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "backends": backends.page,
    "cluster_file": cluster_file.page,
    "command_line": command_line.page,
    "exit_statuses": exit_statuses.page,
    "features_by_layout": features_by_layout.page,
    "packages": packages.page,
    "refused_layouts": refused_layouts.page,
    "shipped_recipes": shipped_recipes.page,
    "suites": suites.page,
}


def main() -> None:
    """Write the pages that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAGES)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(PAGES):
        parser.error(f"{unknown.pop()!r} is unknown; choose from {', '.join(PAGES)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or PAGES:
        (FOLDER / f"{name}.md").write_text(PAGES[name]())


if __name__ == "__main__":
    main()
