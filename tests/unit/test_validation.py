"""Errors of one sentence about the first problem that pydantic finds in a user's values."""

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import Field, ValidationError, field_validator

from diffmegatron.config.schema import Recipe
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


def every_section(section: type[Section] = Section) -> Iterator[type[Section]]:
    for each in section.__subclasses__():
        yield each
        yield from every_section(each)


def problem_of(section: type[Section], key: str, value: object) -> str | None:
    """Return the type of pydantic's error about one key; None if the value is accepted."""
    with pytest.raises(ValidationError) as caught:
        section.model_validate({key: value, "no such key": 0})
    return next((each["type"] for each in caught.value.errors() if each["loc"][0] == key), None)


def test_no_section_takes_a_boolean_for_a_number_or_a_number_for_a_boolean():
    assert {Recipe, Example} < {*every_section()}
    plain = {
        (section, key): {field.annotation, *get_args(field.annotation)}
        for section in every_section()
        for key, field in section.model_fields.items()
    }
    numbers = {key for key, types in plain.items() if types & {int, float} and bool not in types}
    booleans = {key for key, types in plain.items() if bool in types and not types & {int, float}}
    assert len(numbers) > 50
    assert len(booleans) > 10
    assert {problem_of(*key, True) for key in numbers} == {"number"}
    assert {problem_of(*key, 1) for key in booleans} == {"boolean"}
