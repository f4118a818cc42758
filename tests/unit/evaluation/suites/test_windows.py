"""Tests that suites which score windows of text refuse a context of one token.

The first token of a window is never scored, so a window needs at least two tokens.
"""

import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.suites import SUITES, make_suites


def _context(suite: type[Suite]) -> str:
    field = suite.model_fields.get("context")
    return "" if field is None else field.description or ""


WINDOWED = [name for name, suite in SUITES.items() if "of a window" in _context(suite)]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_context_of_one_token_is_refused(name: str) -> None:
    others = ["recall.training=prefix"] if name == "recall" else []
    with pytest.raises(
        UserError, match=f"suite '{name}': context is 1: .*greater than or equal to 2"
    ):
        make_suites([name], {"data": ("text",)}, [f"{name}.context=1", *others], lambda: 8)
