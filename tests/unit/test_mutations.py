"""Tests that the list of deliberate mistakes fits the code; ``tests/mutations.py`` makes them."""

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.paths import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.wrong[:40])
def test_a_mistake_replaces_one_text_and_names_tests_that_exist(mutation: Mutation):
    code = (ROOT / "diffmegatron" / mutation.file).read_text()
    assert code.count(mutation.right) == 1
    files = [word.partition("::")[0] for word in mutation.tests.split() if word.startswith("tests")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
