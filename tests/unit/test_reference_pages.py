"""The generated pages of docs/reference are those of the code."""

import pytest

from diffmegatron.evaluation.suites import SUITES
from diffmegatron.operations.cluster import Cluster, Container
from tests.paths import DOCS
from tools.reference.__main__ import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_that_of_the_code(name: str):
    """Check a page; ``python -m tools.reference`` writes all."""
    written = (DOCS / "reference" / f"{name}.md").read_text()
    assert written == PAGES[name](), f"run python -m tools.reference {name}"


def test_every_setting_has_a_meaning():
    named = [
        f"{name}.{key}"
        for name, section in {**SUITES, "cluster": Cluster, "container": Container}.items()
        for key, field in section.model_fields.items()
        if not field.description
    ]
    assert named == []
