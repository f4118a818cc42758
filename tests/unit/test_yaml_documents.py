"""``parse_yaml`` returns values or raises an error of one sentence, within seconds."""

import contextlib
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis.strategies import text

from diffmegatron.errors import UserError
from diffmegatron.yaml_documents import MAX_YAML_BYTES, dump_yaml, parse_value, parse_yaml


def refused(text: str) -> str:
    with pytest.raises(UserError, match=r"^it is not valid YAML: ") as caught:
        parse_yaml(text, "it")
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 300
    return sentence


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, -2, +3, 1_000, 007, 0o17, 0x1F]", [1, -2, 3, 1000, 7, 15, 31]),
        ("[1., .5, 1e-6, 1E+2, -1_0.5e3]", [1.0, 0.5, 1e-6, 100.0, -1.05e4]),
        ("[.inf, -.INF]", [math.inf, -math.inf]),
        ("[true, No, on, OFF, ~, null, ]", [True, False, True, False, None, None]),
        ("['1', \"2\", =, 1e, e5]", ["1", "2", "=", "1e", "e5"]),
        ("{a: &a [1, 2], b: *a}", {"a": [1, 2], "b": [1, 2]}),
        ("{a: &a {b: 4}, c: {<<: *a, d: 5}}", {"a": {"b": 4}, "c": {"b": 4, "d": 5}}),
        ("", None),
    ],
)
def test_values_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text, "it") == value


@pytest.mark.parametrize("text", ["1:30", "2001-01-01", "2001-99-99", "0b1", "0x_", "._", "0o9"])
def test_yaml_1_1_numbers_and_dates_are_text(text):
    assert parse_yaml(text, "it") == text


@pytest.mark.parametrize(
    "text",
    ["1e5", "0o17", "0x1F", "1_0", ".5", "2001-01-01", "1:30", "yes", "~", "", " a", "=", "<<",
     "1.", "a: b", "#a", "/a\udcff", "a\x85b", "\u2028", "\ufffe", "\U0001f600", "'", "-", "\t",
     "a\nb"],
)  # fmt: skip
def test_text_stays_text_in_a_dump(text):
    assert parse_yaml(dump_yaml({text: [text]}), "it") == {text: [text]}


@pytest.mark.parametrize(
    "text",
    ["exp #2", "&a x", "*x", "!x", "a: b", "- a", "|x", ">", "%a", "@a", "`", "?", "? a", "#", "<<",
     "1 # x", "12 ", " 5", "it's", "---", "a\nb", "a\tb", "}", "]", ",", "\x85", "...", "a\\n"],
)  # fmt: skip
def test_text_of_the_command_line_stays_as_it_was_typed(text):
    assert parse_value(text, "it") == text


@given(text())
def test_a_value_of_the_command_line_is_its_text_or_a_value_that_shows_all_of_it(typed):
    """Check that a value that is not the typed text is YAML in which no character is left out."""
    try:
        value = parse_value(typed, "it")
    except UserError:
        return
    if value != typed:
        assert isinstance(value, int | float | None) or typed[0] in "[{'\""


@pytest.mark.parametrize(
    ("typed", "value"),
    [("yes", True), ("1e3", 1000), ("007", 7), ("", None), ("~", None), ("[1, a]", [1, "a"]),
     ("{a: b}", {"a": "b"}), ("'exp #2'", "exp #2"), ('"a\\tb"', "a\tb"), ("[a#b]", ["a#b"])],
)  # fmt: skip
def test_values_of_the_command_line_have_yaml_types(typed, value):
    assert parse_value(typed, "it") == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("[1] #x", "'#' has a meaning in YAML; put the text that contains it in quotes"),
        ("'exp'#2", "'#' has a meaning in YAML"),
        ("{a: exp #2}", "'#' has a meaning in YAML"),
        ("[1,\n #c\n2]", "'#' has a meaning in YAML"),
        ("{path: &x y}", "'&' has a meaning in YAML"),
        ("{path: *x}", "undefined alias 'x'"),
        ("[!x y]", "tag '!x' is not allowed"),
        ("'a' b", "expected '<document start>'"),
    ],
)
def test_a_value_of_the_command_line_is_refused_if_yaml_drops_a_part(typed, said):
    with pytest.raises(UserError, match=f"^it is not valid YAML: .*{re.escape(said)}"):
        parse_value(typed, "it")


@pytest.mark.parametrize(
    "number", [0, -1, 10**30, 1e-6, 1e300, -0.1, math.inf, -math.inf, True, None]
)
def test_numbers_stay_numbers_in_a_dump(number):
    value = parse_yaml(dump_yaml([number]), "it")[0]
    assert (value, type(value)) == (number, type(number))


def doubled(first: str, step: str) -> str:
    """Return YAML of 26 values; each after the first contains the previous value twice, by alias.

    Args:
        first: YAML of the first value, a list or a mapping.
        step: YAML of each later value, with two ``%d`` for the number of the previous value.
    """
    steps = (f"a{n + 1}: &a{n + 1} {step % (n, n)}" for n in range(25))
    return "\n".join([f"a0: &a0 {first}", *steps])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (20_000 * "[", "deeper than 32 levels at line 1, column 33"),
        (20_000 * "{a: ", "deeper than 32 levels"),
        (20_000 * "- ", "deeper than 32 levels"),
        (20_000 * "? ", "deeper than 32 levels"),
        ("\n".join(f"{n * ' '}a{n}:" for n in range(400)), "deeper than 32 levels"),
        ("- &a0 [x]\n" + "\n".join(f"- &a{n + 1} [*a{n}]" for n in range(60)), "deeper than"),
        ("&a [*a]", "alias *a is within its own value at line 1, column 5"),
        ("a: &a {b: {c: *a}}", "alias *a is within"),
        ("a: &a {<<: *a}", "alias *a is within"),
        (doubled("[x, x]", "[*a%d, *a%d]"), "more than 5000 values and keys"),
        (doubled("{x: 1}", "{<<: [*a%d, *a%d]}"), "more than 5000 values and keys"),
        ("[" + 5_001 * "a," + "]", "more than 5000 values and keys"),
        ("!!int x", "tag 'tag:yaml.org,2002:int' is not allowed in a recipe"),
        ("!!python/object/apply:os.system [ls]", "is not allowed in a recipe"),
        ("!!timestamp x", "is not allowed in a recipe"),
        ("! x", "tag '!' is not allowed"),
        ('"\\UFFFFFFFF"', "not valid YAML"),
        ('"\\U00110000"', "not in range"),
        (f"%YAML {5_000 * '9'}.1\n--- a", "Exceeds the limit"),
        ("\0", "#x0000"),
        ("\ud800", "#xd800"),
        ("{a: 1, a: 2}", "key 'a' occurs twice"),
        ("<<: 5", "expected a mapping"),
        ("*a", "undefined alias"),
        ("--- a\n--- b", "found another document"),
        ("{[a]: 1}", "unhashable key"),
    ],
)
def test_invalid_and_oversized_documents_are_refused_within_a_second(text, said):
    started = time.process_time()
    assert said in refused(text)
    assert time.process_time() - started < 1


def test_depth_and_node_count_at_the_limits_are_accepted():
    assert parse_yaml(31 * "[" + "x" + 31 * "]", "it")
    assert "deeper" in refused(32 * "[" + "x" + 32 * "]")
    assert len(parse_yaml("[" + 4_999 * "a," + "]", "it")) == 4_999
    assert "more than" in refused("[" + 5_000 * "a," + "]")


@pytest.mark.parametrize("piece", ["a", "a\n", '"\\x41', "# a\n", "|\n a\n", ": ", " ", "1", "!"])
def test_a_document_of_maximum_size_is_handled_within_3_seconds(piece):
    text = (MAX_YAML_BYTES // len(piece)) * piece
    started = time.process_time()
    with contextlib.suppress(UserError):
        parse_yaml(text, "it")
    # An idle machine needs one second, and a busy machine needs more.
    assert time.process_time() - started < 3
