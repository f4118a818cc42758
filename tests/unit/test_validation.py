"""Errors of one sentence about the first problem that pydantic finds in a user's values."""

import pytest
from pydantic import Field, field_validator

from diffmegatron.errors import UserError
from diffmegatron.section import Section
from diffmegatron.validation import validated


class Inner(Section):
    depth: int = 1


class Example(Section):
    name: str
    width: int = Field(default=1, ge=1)
    inner: Inner = Inner()

    @field_validator("name")
    @classmethod
    def _is_short(cls, name: str) -> str:
        if len(name) > 5:
            raise ValueError(f"name {name!r} is longer than 5 letters")
        return name


def test_values_that_fit_are_returned_as_the_model():
    assert validated(Example, {"name": "a"}, "file.yaml") == Example(name="a")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        # The key "name" is missing only because it is mistyped as "nmae".
        ({"nmae": "a"}, "unknown key 'nmae'; did you mean 'name'?"),
        ({"name": "a", "x": 1}, "unknown key 'x'; known keys are inner, name, width"),
        ({}, "key 'name' is missing; give it a value"),
        ({"name": "a", "width": 0}, "width is 0: input should be greater than or equal to 1"),
        ({"name": "a", "inner": {"depth": "b"}}, "inner.depth is 'b': input should be a valid int"),
        ({"name": "abcdef"}, "name 'abcdef' is longer than 5 letters"),
    ],
)
def test_the_error_reports_the_first_mistake(values, problem):
    with pytest.raises(UserError) as caught:
        validated(Example, values, "file.yaml")
    assert str(caught.value).startswith(f"file.yaml: {problem}")
