"""Links between pages, and names of tests elsewhere, lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "tools/README.md",
            "CHANGELOG.md",
            "examples/README.md",
            "examples/speedrun/README.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_existing_files_and_headings(page):
    for target, anchor in LINK.findall(page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(found), f"{target} has no heading #{anchor}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name}" not in index]
    assert [each for each in missing if each != "README.md"] == []


def test_the_site_lists_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if page not in site] == []


def test_titles_of_the_site_are_distinct():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    titles = re.findall(r"^ +- ([^\n]+?):(?: \S+\.md)?$", navigation, re.MULTILINE)
    assert len(titles) > 50 and sorted({*titles}) == sorted(titles)


def test_hosted_ci_runs_targets_of_the_makefile():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    run = set(re.findall(r"- run: make ([\w-]+)", workflow))
    assert {"lint", "test", "quickstart"} <= run <= set(targets)


@pytest.mark.parametrize(
    "name", ["Makefile", ".ci/run", "CONTRIBUTING.md", "docs/results/robustness.md"]
)
def test_named_tests_exist(name):
    text = (ROOT / name).read_text()
    named = set(re.findall(r"\btests/[\w/]+(?:\.py)?", text))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    listed = re.search(r"addprefix tests/unit/, ((?:.*\\\n)*.*)\)", text)
    for path in listed[1].replace("\\", "").split() if listed else ():
        assert (ROOT / "tests/unit" / path).exists(), path
