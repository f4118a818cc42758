"""The section model.attention: keys of each kind, derived sizes, the baseline, bad input."""

from pathlib import Path

import pytest

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kinds import KINDS, AttentionKind, LayerKinds, read_kind, register
from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.config.load import load_recipe
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.errors import UserError
from diffmegatron.section import Section

RECIPE = """
run_dir: run
model:
  num_layers: 4
  hidden_size: 96
  attention: {kind: %s, num_heads: 6}
  ffn_hidden_size: 256
  vocab_size: 320
data: {sources: [{path: corpus}]}
training: {seq_length: 64, global_batch_size: 8, steps: 100}
optimizer: {lr: 1.0e-3}
"""


@pytest.fixture
def load(tmp_path: Path):
    """Return a function that loads the ``model`` section of a recipe with six heads of a kind.

    Overrides are keys of ``model.attention``, or of the whole recipe if they begin with "/".
    """

    def load_kind(kind: str, *overrides: str):
        file = tmp_path / "recipe.yaml"
        file.write_text(RECIPE % kind)
        dotted = (f"model.attention.{each}" if each[0] != "/" else each[1:] for each in overrides)
        return load_recipe(file, [*dotted]).model

    return load_kind


def only(model: ModelConfig) -> AttentionKind:
    """Return the kind of attention of all layers."""
    (kind,) = model.attention.kinds
    return kind


def sizes(attention: AttentionKind | LayerKinds) -> tuple[int, int, int]:
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


# Sizes


@pytest.mark.parametrize(
    ("kind", "overrides", "expected", "queries", "keys"),
    [
        ("softmax", [], (6, 6, 16), 6, 6),
        ("softmax", ["num_kv_heads=2"], (6, 2, 16), 6, 2),
        ("diff_v1", [], (6, 6, 8), 12, 12),
        ("diff_v1", ["num_kv_heads=2"], (6, 2, 8), 12, 4),
        ("diff_v1", ["num_heads=0", "head_dim=12"], (4, 4, 12), 8, 8),
        ("diff_v1", ["num_heads=4", "head_dim=6"], (4, 4, 6), 8, 8),
        ("diff_v2", [], (6, 6, 16), 12, 6),
        ("diff_v2", ["signal_per_noise=3"], (6, 2, 16), 8, 2),
        ("diff_v2", ["signal_per_noise=2", "num_kv_heads=1"], (6, 1, 16), 9, 1),
        ("grouped", ["signal_per_noise=3"], (6, 2, 8), 8, 4),
        ("grouped", ["signal_per_noise=2", "num_kv_heads=1"], (6, 1, 8), 9, 2),
        ("grouped", ["signal_per_noise=1"], (6, 6, 8), 12, 12),
    ],
)
def test_derived_sizes_are_filled_in(kind, overrides, expected, queries, keys, load):
    attention = only(load(kind, *overrides))
    assert sizes(attention) == expected
    assert (attention.heads.queries, attention.heads.keys) == (queries, keys)


@pytest.mark.parametrize("number", ["4", "4.0", "0.4e1", "'4'"])
def test_sizes_are_derived_from_a_number_in_any_notation(number, load):
    assert sizes(load("diff_v1", f"num_heads={number}").attention) == (4, 4, 12)


def test_a_transformer_may_have_an_odd_number_of_heads(load):
    """Check the sizes of SmolLM2-135M: 9 query heads and 3 key-value heads of width 64."""
    attention = load("softmax", "/model.hidden_size=576", "num_heads=9", "num_kv_heads=3").attention
    assert sizes(attention) == (9, 3, 64)


def test_motif_2_is_32_signal_heads_in_the_terms_of_v1(load):
    """Check that a grouped recipe with 32 signal and 8 key-value heads has the sizes of Motif 2.

    Motif 2 has 32 signal and 8 noise heads, and 16 key and 16 value heads of width 128 (arXiv
    2510.06949).
    """
    sections = ["num_heads=32", "signal_per_noise=4", "num_kv_heads=8", "head_dim=128"]
    heads = only(load("grouped", *sections)).heads
    assert (heads.queries, heads.keys, heads.head_dim) == (40, 16, 128)
    assert heads.output_channels == 32 * 2 * 128


# The baseline: the Transformer with the same width and key-value cache


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("softmax", ["num_kv_heads=3"], (6, 3, 16)),
        ("diff_v1", [], (12, 12, 8)),
        ("diff_v1", ["num_kv_heads=2"], (12, 4, 8)),
        ("diff_v2", ["num_kv_heads=2"], (6, 2, 16)),
        ("diff_v2", ["signal_per_noise=3"], (6, 2, 16)),
        ("grouped", ["signal_per_noise=3"], (12, 4, 8)),
    ],
)
def test_the_baseline_has_equal_width_and_key_value_cache(kind, overrides, expected, load):
    own, pair = (load(kind, *overrides, *more) for more in ([], ["/model.baseline=true"]))
    assert isinstance(only(pair), Softmax)
    assert sizes(pair.attention) == expected
    # The width and the size of the key-value cache are the same.
    assert only(pair).heads.output_channels == only(own).heads.output_channels
    caches = [costs_of(only(each)).kv_cache_bytes(2) for each in (own, pair)]
    assert caches[0] == caches[1]
    others = {"attention", "baseline"}
    assert pair.model_dump(exclude=others) == own.model_dump(exclude=others)


@pytest.mark.parametrize("kind", ["softmax", "diff_v1", "diff_v2", "grouped"])
def test_the_transformer_of_a_pair_has_its_qk_norm(kind, load):
    more = ["signal_per_noise=2"] if kind == "grouped" else []
    for value in ("true", "false"):
        given = [f"qk_norm={value}", *more]
        assert only(load(kind, *given, "/model.baseline=true")).qk_norm == (value == "true")


@pytest.mark.parametrize("kind", ["softmax", "diff_v1", "diff_v2", "grouped"])
def test_the_transformer_of_a_pair_has_its_gate(kind, load):
    more = ["signal_per_noise=2"] if kind == "grouped" else []
    for value in ("elementwise", "headwise"):
        given = [f"output_gate={value}", *more]
        assert only(load(kind, *given, "/model.baseline=true")).output_gate == value


@pytest.mark.parametrize("kind", ["softmax", "diff_v1", "diff_v2", "grouped"])
def test_the_transformer_of_a_pair_has_its_window(kind, load):
    more = ["signal_per_noise=2"] if kind == "grouped" else []
    for value in (16, None):
        given = [f"window={value or 'null'}", *more]
        assert only(load(kind, *given)).window == value
        assert only(load(kind, *given, "/model.baseline=true")).window == value


def test_a_window_shows_one_token_or_more(load):
    with pytest.raises(UserError, match=r"window.*greater than or equal to 1|window.* 1"):
        load("diff_v1", "window=0")


def test_dex_refuses_a_gate(load):
    given = ["selected_heads=[[0], [1]]", "annealing_steps=null", "/model.num_layers=2"]
    with pytest.raises(UserError, match=r"output_gate is 'headwise' with kind 'dex'.*give null"):
        load("dex", *given, "output_gate=headwise")


def test_the_transformer_of_a_pair_has_no_headwise_norm(load):
    assert only(load("diff_v1")).headwise_norm
    assert not only(load("diff_v1", "/model.baseline=true")).headwise_norm


# Bad input

EVERY_KIND = "softmax, diff_v1, diff_v2, grouped, dex"


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        # Numbers and sizes of heads that do not fit the hidden size or are invalid.
        ("diff_v1", ["num_heads=7"], "hidden_size 96 is not a multiple of 2 x model.attention.n"),
        ("diff_v2", ["num_heads=7"], "hidden_size 96 is not a multiple of model.attention.num_"),
        ("diff_v1", ["num_heads=0"], "has neither num_heads nor head_dim; give one of them"),
        ("diff_v1", ["num_heads=0", "head_dim=7"], "2 x model.attention.head_dim 7; give one that"),
        ("softmax", ["head_dim=15"], "model.attention.head_dim 15 is odd; rotary embeddings rot"),
        ("diff_v2", ["num_heads=-1"], "model.attention.num_heads is -1: input should be greater"),
        # A signal_per_noise that is below 1 or does not divide the signal heads.
        ("diff_v2", ["signal_per_noise=4"], "signal_per_noise 4 does not divide num_heads 6, the"),
        ("grouped", ["signal_per_noise=4"], "the signal heads; choose one of [1, 2, 3, 6]"),
        ("grouped", ["signal_per_noise=0"], "model.attention.signal_per_noise is 0: input should"),
        # Numbers of key-value heads that would split a group of heads, in the model or over ranks.
        ("diff_v1", ["num_kv_heads=4"], "num_kv_heads 4 does not divide num_heads 6; choose one"),
        ("diff_v2", ["num_kv_heads=12"], "num_kv_heads 12 does not divide num_heads 6; choose"),
        (
            "diff_v2",
            ["signal_per_noise=2", "num_kv_heads=6"],
            "num_kv_heads 6 does not divide num_heads 6 / signal_per_noise 2; choose one of [1, 3]",
        ),
        (
            "grouped",
            ["signal_per_noise=3", "num_kv_heads=3"],
            "num_kv_heads 3 does not divide num_heads 6 / signal_per_noise 3; choose one of [1, 2]",
        ),
        (
            "diff_v2",
            ["num_kv_heads=3", "/parallel.tensor=2"],
            "model.attention.num_kv_heads 3 is not a multiple of parallel.tensor 2; the nearest",
        ),
        (
            "grouped",
            ["signal_per_noise=3", "/parallel.tensor=4"],
            "model.attention.num_kv_heads 2 is not a multiple of parallel.tensor 4; the nearest",
        ),
        (
            "diff_v2",
            ["num_kv_heads=1", "/parallel.context=2", "/parallel.context_communication=ulysses"],
            "'ulysses' divides the 1 key-value heads of a tensor-parallel rank among parallel.cont",
        ),
        # Kinds.
        ("diff_v1", ["kind=dif_v2"], f"is 'dif_v2'; did you mean 'diff_v2', of {EVERY_KIND}?"),
        ("diff_v1", ["kind=group"], "model.attention.kind is 'group'; did you mean 'grouped'"),
        ("diff_v1", ["kind=differential"], f"is 'differential'; give one of {EVERY_KIND}"),
        ("diff_v1", ["kind=linear"], f"model.attention.kind is 'linear'; give one of {EVERY_KIND}"),
        ("diff_v1", ["kind=3"], f"model.attention.kind is 3; give one of {EVERY_KIND}"),
        ("diff_v1", ["kind=[diff_v1]"], "is ['diff_v1']; did you mean 'diff_v1', of softmax, di"),
        ("diff_v1", ["kind=null"], f"model.attention.kind is missing; give one of {EVERY_KIND}"),
        # Keys of another kind.
        ("diff_v1", ["signal_per_noise=2"], "of kind diff_v2, grouped; the recipe's is diff_v1"),
        ("diff_v2", ["headwise_norm=true"], "headwise_norm is a key of kind softmax, diff_v1, gr"),
        ("diff_v2", ["lambda_std=0.1"], "model.attention.lambda_std is a key of kind diff_v1, gr"),
        ("softmax", ["lambda_init.policy=constant"], "lambda_init is a key of kind diff_v1, group"),
        # Recipes in the format of earlier versions.
        ("diff_v1", ["/model.attention=differential"], "is 'differential'; it takes a mapping wi"),
        ("diff_v1", ["/model.attention=softmax"], f"mapping with a kind of {EVERY_KIND}, such as"),
        ("diff_v1", ["/model.num_heads=6"], "'model.num_heads'; give model.attention.num_heads"),
        ("diff_v1", ["/model.head_dim=16"], "key 'model.head_dim'; give model.attention.head_dim"),
        ("diff_v1", ["/model.headwise_norm=true"], "give model.attention.headwise_norm"),
        ("diff_v1", ["/model.lambda_init.value=1"], "give model.attention.lambda_init"),
        ("diff_v1", ["/model.initialization.lambda_std=0.1"], "give model.attention.lambda_std"),
    ],
)  # fmt: skip
def test_invalid_attention_settings_are_refused_in_one_line(kind, overrides, said, load):
    with pytest.raises(UserError) as caught:
        load(kind, *overrides)
    sentence = str(caught.value)
    assert said in sentence
    assert "\n" not in sentence
    assert "the command line" in sentence


def test_an_old_recipe_is_refused_with_the_new_key(tmp_path):
    section = "attention: {kind: %s, num_heads: 6}"
    old = RECIPE.replace(section, "attention: softmax\n  num_heads: 6")
    (tmp_path / "old.yaml").write_text(old)
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "old.yaml")
    sentence = str(caught.value)
    assert "unknown key 'model.num_heads'; give model.attention.num_heads" in sentence
    assert "\n" not in sentence


def test_a_recipe_without_attention_is_refused(tmp_path):
    without = RECIPE.replace("  attention: {kind: %s, num_heads: 6}\n", "")
    (tmp_path / "recipe.yaml").write_text(without)
    with pytest.raises(UserError, match=r"key 'model.attention' is missing; give it a value"):
        load_recipe(tmp_path / "recipe.yaml")


# The registry


def test_a_kind_belongs_to_one_class():
    assert register(DiffV1) is DiffV1
    with pytest.raises(ValueError, match="attention kind 'diff_v1' is DiffV1's; choose another"):
        register(type("Another", (DiffV1,), {}))
    assert KINDS["diff_v1"] is DiffV1


def test_a_kind_has_few_members():
    def members(section: type[Section]) -> set[str]:
        names = {*dir(section)} - {*dir(Section)}
        return {name for name in names if not name.startswith("_")}

    assert len(members(AttentionKind)) == 13
    assert {kind.__name__ for kind in KINDS.values() if len(members(kind)) > 14} == set()
    assert len(members(LayerKinds)) <= 16


def test_reading_a_kind_returns_it_unchanged():
    kind = DiffV1(num_heads=3)
    assert read_kind(kind) is kind


@pytest.mark.parametrize("kind", ["diff_v1", "grouped"])
def test_the_baseline_of_the_largest_head_count_has_twice_as_many_heads(kind, load):
    overrides = ["num_heads=1073741824", "num_kv_heads=1", "head_dim=2"]
    assert load(kind, *overrides).attention.baseline().num_heads == 2**31
