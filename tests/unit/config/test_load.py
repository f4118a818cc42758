"""Tests of ``load_recipe``: extended files, overrides, and errors that name what to change."""

import re
from pathlib import Path

import pytest
import yaml

from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.config import load
from diffmegatron.config.load import dump_recipe, load_recipe, load_resolved, load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.yaml_documents import parse_yaml

BASE = """
run_dir: runs/base
model:
  num_layers: 4
  hidden_size: 96
  attention: {kind: diff_v1, num_heads: 6}
  ffn_hidden_size: 256
  vocab_size: 320
data: {sources: [{path: corpus}]}
training: {seq_length: 64, global_batch_size: 8, steps: 100}
optimizer: {lr: 1.0e-3}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    write_file(BASE, "base.yaml")
    return write_file


@pytest.fixture
def base(write, tmp_path: Path) -> Path:
    return tmp_path / "base.yaml"


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 1000
    return sentence


# Reading and merging


def test_extends_merges_key_by_key_and_later_files_win(write):
    write("optimizer: {lr: 2.0e-3, weight_decay: 0.05}\nmodel: {num_layers: 8}", "other.yaml")
    path = write("extends: [base.yaml, other.yaml]\nmodel: {num_layers: 2}\nrun_dir: mine")
    recipe = load_recipe(path)
    assert (recipe.model.num_layers, recipe.model.hidden_size) == (2, 96)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (2e-3, 0.05)
    assert recipe.run_dir == "mine"


def test_extends_is_relative_to_its_file_and_recursive(write):
    write("extends: ../base.yaml\nrun_dir: middle", "sizes/middle.yaml")
    path = write("extends: sizes/middle.yaml\nmodel: {num_layers: 3}")
    recipe = load_recipe(path)
    assert (recipe.run_dir, recipe.model.num_layers) == ("middle", 3)


def test_a_path_with_a_leading_dot_is_relative_to_its_file(write, tmp_path, monkeypatch):
    write("data: {sources: [{path: ./web}, {path: bare}]}", "sizes/sources.yaml")
    path = write(
        "extends: [base.yaml, sizes/sources.yaml]\nrun_dir: ../runs/mine\n"
        "data: {cache_dir: /cache, tokenizer: bytes}"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(path, ["checkpoint.start_from=./before"])
    assert [source.path for source in recipe.data.sources] == [f"{tmp_path}/sizes/web", "bare"]
    assert (recipe.data.cache_dir, recipe.data.tokenizer) == ("/cache", "bytes")
    assert recipe.run_dir == str(tmp_path.parent / "runs/mine")
    assert recipe.checkpoint.start_from == str(elsewhere / "before")
    assert load_recipe(write(dump_recipe(recipe), "runs/mine/recipe.yaml")) == recipe


def test_a_stage_path_with_a_leading_dot_is_relative_to_the_recipe(write, tmp_path):
    path = write(
        "extends: base.yaml\nrun_dir: ./run\nstages:\n"
        "- {name: first, data: {sources: [{path: ./web}]}}\n- {name: second}"
    )
    first, second = load_stages(path)
    assert first.data.sources[0].path == f"{tmp_path}/web"
    assert second.checkpoint.start_from == first.run_dir == f"{tmp_path}/run/first"


def test_lists_are_replaced_not_merged(write):
    path = write("extends: base.yaml\ndata: {sources: [{path: a}, {path: b, weight: 3}]}")
    assert [source.path for source in load_recipe(path).data.sources] == ["a", "b"]


def test_a_file_that_is_extended_twice_is_parsed_once(write, monkeypatch):
    parsed = []

    def parse(text: str, name: str) -> object:
        parsed.append(Path(name).name)
        return parse_yaml(text, name)

    monkeypatch.setattr(load, "parse_yaml", parse)
    write("extends: base.yaml", "left.yaml")
    write("extends: base.yaml", "right.yaml")
    path = write("extends: [left.yaml, right.yaml]")
    assert load_recipe(path).run_dir == "runs/base"
    assert sorted(parsed) == ["base.yaml", "left.yaml", "recipe.yaml", "right.yaml"]


def test_overrides_win_over_files(base):
    overrides = ["optimizer.schedule.kind=cosine", "optimizer.betas=[0.8, 0.9]", "run_dir=x"]
    recipe = load_recipe(base, overrides)
    assert recipe.optimizer.schedule.kind == "cosine"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.run_dir == "x"
    assert load_recipe(base, ["model.num_layers=3", "model.num_layers=5"]).model.num_layers == 5


@pytest.mark.parametrize(("text", "number"), [("1e-6", 1e-6), ("1E+2", 100.0), ("3", 3.0)])
def test_floats_are_read_as_yaml_1_2_writes_them(base, text, number):
    assert load_recipe(base, [f"optimizer.lr={text}"]).optimizer.lr == number
    assert isinstance(load_recipe(base, [f"optimizer.lr={text}"]).optimizer.lr, float)


def test_whole_floats_are_accepted_for_integer_keys(base):
    recipe = load_recipe(base, ["training.steps=null", "training.tokens=1e12"])
    assert recipe.training.tokens == 10**12
    assert isinstance(recipe.training.tokens, int)
    assert recipe.training.total_steps == -(-(10**12) // 512)
    assert "training.tokens is 1.5" in error_of(base, "training.tokens=1.5")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.steps=null", "training.tokens=1e12"),
        (
            "model.attention.lambda_init.policy=constant",
            "model.attention.lambda_init.value=0.5",
        ),
        (
            "model.attention.headwise_norm=false",
            "model.attention.num_kv_heads=2",
            "optimizer.eps=1e-12",
        ),
        ("model.attention.kind=softmax", "model.attention.headwise_norm=true"),
        ("model.attention.kind=diff_v2", "model.attention.signal_per_noise=3"),
        ("model.attention.kind=grouped", "model.attention.signal_per_noise=2"),
    ],
)
def test_a_dumped_recipe_loads_to_the_same(base, write, overrides):
    recipe = load_recipe(base, overrides)
    assert load_recipe(write(dump_recipe(recipe), "dumped.yaml")) == recipe


def test_a_dump_shows_every_key_resolved(base):
    values = yaml.safe_load(dump_recipe(load_recipe(base)))
    attention = values["model"]["attention"]
    assert (attention["head_dim"], attention["num_kv_heads"]) == (8, 6)
    assert set(attention) == set(DiffV1.model_fields)
    assert set(values) == set(Recipe.model_fields)


def test_a_dumped_baseline_is_the_transformer_with_its_own_numbers(base, write):
    dumped = write(dump_recipe(load_recipe(base, ["model.baseline=true"])), "dumped.yaml")
    model = yaml.safe_load(dumped.read_text())["model"]
    assert "baseline" not in model
    assert (model["attention"]["kind"], model["attention"]["num_heads"]) == ("softmax", 12)
    again = load_recipe(dumped).model
    assert again.model_dump() == load_recipe(base, ["model.baseline=true"]).model.model_dump()


def test_a_recipe_is_frozen(base):
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(base).model.num_layers = 3


# Files that cannot be read


def test_a_missing_file_is_named(tmp_path):
    assert error_of(tmp_path / "no.yaml").endswith("no.yaml: No such file or directory")


def test_a_missing_parent_is_named(write):
    assert "gone.yaml: No such file" in error_of(write("extends: gone.yaml"))


def test_circular_extends_are_refused(write):
    write("extends: recipe.yaml", "other.yaml")
    assert "extend each other in a circle" in error_of(write("extends: other.yaml"))
    assert "circle" in error_of(write("extends: self.yaml", "self.yaml"))


def test_a_recipe_may_have_at_most_32_files(write):
    for number in range(40):
        write(f"extends: chain{number + 1}.yaml", f"chain{number}.yaml")
        parents = [f"diamond{number + 1}.yaml", f"diamond{number + 2}.yaml"]
        write(f"extends: [{', '.join(parents)}]", f"diamond{number}.yaml")
    for path in ("chain0.yaml", "diamond0.yaml"):
        sentence = error_of(write(f"extends: {path}"))
        assert sentence.endswith("a recipe may have at most 32 files")
    for name in ("chain30.yaml", "diamond14.yaml", "diamond15.yaml"):
        write("extends: base.yaml", name)
    assert load_recipe(write("extends: chain1.yaml")).run_dir == "runs/base"
    assert load_recipe(write("extends: diamond0.yaml")).run_dir == "runs/base"


def test_a_file_extended_twice_is_merged_at_both_places(write):
    write("extends: base.yaml\nmodel: {num_layers: 8}", "deeper.yaml")
    assert load_recipe(write("extends: [base.yaml, deeper.yaml]")).model.num_layers == 8
    assert load_recipe(write("extends: [deeper.yaml, base.yaml]")).model.num_layers == 4


def test_extends_of_another_type_is_refused(write):
    assert "extends is 5; give a path" in error_of(write("extends: 5"))
    assert "extends is [1]; give a path" in error_of(write("extends: [1]"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", "recipe.yaml is not valid YAML"),
        ("run_dir: a\nrun_dir: b\n", "key 'run_dir' occurs twice; keep one"),
        ("model: {num_layers: 1, num_layers: 2}", "key 'num_layers' occurs twice"),
        ("? {a: 1}\n: 2\n", "unhashable key"),
        ("- a list", "must be a mapping of sections, not list"),
        ("", "must be a mapping of sections, not NoneType"),
    ],
)
def test_an_invalid_recipe_file_is_refused(write, text, said):
    assert said in error_of(write(text))


def test_a_recipe_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in error_of(path)


# Keys and values


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("modle: {}", "modle", "model"),
        ("model: {num_layer: 4}", "model.num_layer", "num_layers"),
        ("optimizer: {schedule: {warmup: 3}}", "optimizer.schedule.warmup", "warmup_steps"),
        (
            "model: {attention: {lambda_init: {polcy: constant}}}",
            "model.attention.lambda_init.polcy",
            "policy",
        ),
        ("model: {attention: {num_head: 4}}", "model.attention.num_head", "num_heads"),
        ("data: {sources: [{path: a, wieght: 2}]}", "data.sources.0.wieght", "weight"),
    ],
)
def test_an_unknown_key_names_the_file_and_the_nearest_key(write, text, key, near):
    sentence = error_of(write(f"extends: base.yaml\n{text}"))
    assert sentence.endswith(f"recipe.yaml: unknown key {key!r}; did you mean {near!r}?")


def test_a_mistyped_required_key_is_called_mistyped_not_missing(write):
    text = BASE.replace("num_layers", "num_layer").replace("optimizer:", "optimiser:")
    sentence = error_of(write(text))
    assert "unknown key" in sentence
    assert "missing" not in sentence


@pytest.mark.parametrize(
    ("key", "elsewhere"),
    [
        ("training.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("optimizer.steps", "training.steps"),
        ("training.num_heads", "model.attention.num_heads"),
        ("data.decay_ratio", "optimizer.schedule.decay_ratio"),
    ],
)
def test_an_unknown_key_of_another_section_is_found_there(base, key, elsewhere):
    assert error_of(base, f"{key}=1").endswith(f"unknown key {key!r}; did you mean {elsewhere!r}?")


def test_an_inherited_key_that_does_not_fit_can_be_set_to_null(write):
    write("extends: base.yaml\noptimizer: {schedule: {kind: wsd, decay_ratio: 0.1}}", "wsd.yaml")
    child = write("extends: wsd.yaml\noptimizer: {schedule: {kind: constant}}")
    assert "set it to null if another file gives it" in error_of(child)
    assert load_recipe(child, ["optimizer.schedule.decay_ratio=null"]).run_dir == "runs/base"


@pytest.mark.parametrize(
    ("number", "written"), [("1B", "1e9"), ("1.5M", "1.5e6"), ("300 k", "300e3"), ("2T", "2e12")]
)
def test_a_number_with_an_ending_is_refused_with_its_digits(base, number, written):
    sentence = error_of(base, f"training.tokens={number}")
    assert sentence.endswith(f"; write {written}")
    assert load_recipe(base, ["training.steps=null", f"training.tokens={written}"])


def test_an_unknown_key_without_a_near_match_lists_the_known_keys(write):
    sentence = error_of(write("extends: base.yaml\nparallel: {xyz: 1}"))
    assert "pipeline, sequence_parallel, tensor, virtual_pipeline, zero_stage" in sentence


def test_the_error_names_the_file_that_set_the_key_or_the_command_line(write, base):
    write("extends: base.yaml\nmodel: {num_layer: 4}", "parent.yaml")
    child = write("extends: parent.yaml\nrun_dir: child")
    assert "parent.yaml: unknown key" in error_of(child, "run_dir=x")
    assert error_of(base, "model.num_layer=4").startswith("the command line: unknown key")


def test_a_missing_key_error_names_the_recipe_file(write):
    path = write(BASE.replace("run_dir: runs/base", ""))
    sentence = error_of(path, "optimizer.lr=1e-3")
    assert sentence.endswith("recipe.yaml: key 'run_dir' is missing; give it a value")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_layers=many", "model.num_layers is 'many': input should be a valid integer"),
        ("model.num_layers=0", "model.num_layers is 0: input should be greater than or equal to 1"),
        ("optimizer.lr=nan", "optimizer.lr is"),
        ("optimizer.lr=.nan", "optimizer.lr is nan: input should be a finite number"),
        ("optimizer.lr=1e400", "optimizer.lr is inf: input should be a finite number"),
        (f"optimizer.lr={10**200}{10**200}", "finite number"),
        ("optimizer.betas=[.inf, 0]", "finite number"),
        ("training.steps=" + 6_000 * "9", "training.steps is '999"),
        ("training.steps=1:30", "training.steps is '1:30': input should be a valid integer"),
        ("training.steps=2001-01-01", "training.steps is '2001-01-01'"),
        (f"training.steps={2**62 + 1}", f"less than or equal to {2**62}"),
        (f"training.seed={2**63}", f"less than or equal to {2**63 - 1}"),
        ("training.seed=-1", "greater than or equal to 0"),
        (f"data.split_seed={2**63}", f"less than or equal to {2**63 - 1}"),
        (f"model.hidden_size={2**31}", f"less than or equal to {2**31 - 1}"),
        (f"model.attention.num_heads={10**290}", f"less than or equal to {2**31 - 1}"),
        ("training.seq_length=1", "seq_length is 1: input should be greater than or equal to 2"),
        ("guard.window=7", "greater than or equal to 8"),
        ("parallel.pipeline=5000", "less than or equal to 4096"),
        ("model.attention.num_kv_heads=many", "attention.num_kv_heads is 'many': input should be"),
        ("model.attention.head_dim=-2", "model.attention.head_dim is -2: input should be greater"),
        ("run_dir=", "run_dir is None"),
        ("run_dir=''", "run_dir is '': it is empty; give a path"),
        ('run_dir="a\\0b"', "run_dir is 'a\\x00b': a path must be text without control characters"),
        ('run_dir="\\ud800"', "run_dir is '\\ud800': a path must be text"),
        (f"run_dir={201 * 'x'}", "a name within a path may have at most 200 bytes"),
        (f"run_dir={101 * 'é'}", "a name within a path may have at most 200 bytes"),
        (f"data.tokenizer={300 * 'x/'}", "a path may have at most 512 bytes"),
        (f"data.cache_dir={201 * 'x'}", "data.cache_dir is 'xxx"),
        (f"checkpoint.start_from={201 * 'x'}", "checkpoint.start_from is 'xxx"),
        (f"data.sources=[{{path: {201 * 'x'}}}]", "data.sources.0.path is 'xxx"),
        (f"data.sources=[{129 * '{path: a}, '}]", "data.sources is"),
        ("data.sources=[{path: a, weight: 1e308}, {path: b, weight: 1e308}]", "their sum a finite"),
        ("data.sources=[{path: a, weight: 0}]", "one must be above zero"),
        ("parallel.zero_stage=4", "parallel.zero_stage is 4: input should be 1, 2 or 3"),
    ],
)
def test_an_invalid_value_error_shows_the_value(base, override, said):
    sentence = error_of(base, override)
    assert sentence.startswith("the command line: ")
    assert said in sentence


@pytest.mark.parametrize("name", ["exp #2", "&a", "*a", "!a", "a: b", "- a", "a, b"])
def test_an_override_names_the_folder_that_was_typed(base, name):
    assert load_recipe(base, [f"run_dir={name}"]).run_dir == name


@pytest.mark.parametrize("value", ["yes", "1e3", "007"])
def test_unquoted_text_that_is_a_number_in_yaml_is_refused(base, value):
    sentence = error_of(base, f"run_dir={value}")
    assert "quote it, because YAML reads it as a " in sentence
    assert sentence.endswith("""in a shell, text in quotes is run_dir='"TEXT"'""")
    assert load_recipe(base, [f'run_dir="{value}"']).run_dir == value


def test_a_boolean_in_a_list_of_numbers_is_refused(base):
    for override in ("optimizer.betas=[true, 0.9]", "optimizer.lr_multipliers={'*': true}"):
        assert "give a number, not a boolean" in error_of(base, override)


def test_an_override_of_too_many_dots_is_refused(base):
    assert "too many dots" in error_of(base, f"{5_000 * 'model.'}num_layers=1")


@pytest.mark.parametrize("override", ["model.num_layers", "=3"])
def test_an_override_without_key_or_value_is_refused(base, override):
    assert "is not of the form section.key=value" in error_of(base, override)


def test_an_override_with_invalid_yaml_is_refused(base):
    said = "the value of override 'optimizer.betas=[0.9' is not valid YAML: expected ',' or ']'"
    assert said in error_of(base, "optimizer.betas=[0.9")


# Cross-checks


@pytest.mark.parametrize(
    ("overrides", "clash", "fits"),
    [
        (
            ["parallel.tensor=4"],
            "model.attention.num_kv_heads 6 is not a multiple of parallel.tensor 4",
            "divides all it shards is 2",
        ),
        (
            ["parallel.tensor=3", "model.vocab_size=321"],
            "model.ffn_hidden_size 256 is not a multiple of parallel.tensor 3",
            "divides all it shards is 1",
        ),
        (
            ["parallel.tensor=6", "model.ffn_hidden_size=288", "model.vocab_size=320"],
            "model.vocab_size 320 is not a multiple of parallel.tensor 6",
            "divides all it shards is 2",
        ),
        (
            ["parallel.tensor=2", "parallel.sequence_parallel=true", "training.seq_length=63"],
            "training.seq_length 63 is not a multiple of parallel.tensor 2",
            "is 1",
        ),
        (["parallel.sequence_parallel=true"], "with parallel.tensor 1", "at least 2"),
        (["parallel.pipeline=3"], "num_layers 4 is not a multiple of parallel.pipeline 3", "is 2"),
        (
            ["parallel.pipeline=2", "parallel.zero_stage=2"],
            "parallel.zero_stage 2 with parallel.pipeline 2",
            "parallel.zero_stage 1",
        ),
        (
            ["parallel.overlap_gradients=true", "parallel.pipeline=2"],
            "parallel.overlap_gradients is on with parallel.pipeline 2",
            "parallel.pipeline 1 or leave",
        ),
        (
            ["parallel.overlap_gradients=true", "parallel.zero_stage=3"],
            "parallel.overlap_gradients is on with parallel.zero_stage 3",
            "parallel.zero_stage 1 or leave",
        ),
        (
            ["parallel.overlap_gradients=true", "parallel.offload_optimizer=true"],
            "parallel.overlap_gradients is on with parallel.offload_optimizer true",
            "parallel.offload_optimizer false or leave",
        ),
        (
            ["optimizer.schedule.warmup_steps=100"],
            "warmup_steps 100 leaves no step of the run's 100",
            "at most 99",
        ),
        (
            ["optimizer.schedule.warmup_steps=3", "optimizer.schedule.warmup_ratio=0.1"],
            "warmup_steps is 3 and optimizer.schedule.warmup_ratio is 0.1",
            "give one of them",
        ),
        (
            ["optimizer.schedule.kind=wsd"],
            "kind 'wsd' needs the length of its decay",
            "optimizer.schedule.decay_ratio",
        ),
        (
            ["optimizer.schedule.decay_ratio=0.1"],
            "decay_ratio belongs to kind 'wsd' and optimizer.schedule.kind is 'linear'",
            "leave it out",
        ),
        (
            [
                "optimizer.schedule={kind: wsd, decay_steps: 95}",
                "optimizer.schedule.warmup_steps=9",
            ],
            "decay_steps 95 and optimizer.schedule.warmup_steps 9 are more than the run",
            "at most 91 steps",
        ),
        (
            ["optimizer.schedule.final_lr=1"],
            "final_lr 1 is above optimizer.lr 0.001",
            "give at most optimizer.lr",
        ),
        (["training.tokens=1000"], "steps is 100 and training.tokens is 1000", "exactly one"),
        (["training.steps=null"], "steps is None and training.tokens is None", "exactly one"),
        (
            ["model.attention.lambda_init.policy=constant"],
            "value is None with policy",
            "give a value",
        ),
        (
            ["model.attention.lambda_init.value=0.5"],
            "value is 0.5 with policy",
            "none with 'exponential'",
        ),
    ],
)
def test_a_conflict_error_names_its_numbers_and_valid_values(base, overrides, clash, fits):
    sentence = error_of(base, *overrides)
    assert clash in sentence
    assert fits in sentence.partition(clash)[2]


def test_a_conflict_error_names_the_files_of_its_numbers(write, base):
    child = write("extends: base.yaml\nparallel: {tensor: 3}")
    sentence = error_of(child, "run_dir=x")
    assert re.search(r"base\.yaml and \S+recipe\.yaml: model\.ffn_hidden_size 256", sentence)
    assert error_of(base, "parallel.pipeline=3").endswith("that divides it is 2")
    assert "the command line: model.num_layers 4" in error_of(base, "parallel.pipeline=3")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            3,
            "3 ranks do not fill parallel.tensor 2 x parallel.context 1 x parallel.pipeline 1; "
            "start a multiple of 2, the nearest is 4",
        ),
        (
            6,
            "batch_size 8 is not a multiple of micro_batch_size 1 x data parallel 3; 9 would",
        ),
    ],
)
def test_a_wrong_rank_count_is_refused_with_a_valid_value(base, ranks, said):
    recipe = load_recipe(base, ["parallel.tensor=2"])
    with pytest.raises(UserError, match=re.escape(said)):
        recipe.data_parallel(ranks)


def test_ranks_divide_the_batch(base):
    recipe = load_recipe(base, ["parallel.tensor=2", "training.micro_batch_size=2"])
    assert (recipe.data_parallel(4), recipe.num_microbatches(4)) == (2, 2)


def test_a_removed_key_is_refused_in_recipes_and_ignored_in_stored_ones(base, tmp_path):
    error = error_of(base, "data.reset_position_ids=false")
    assert error == (
        "the command line: key 'data.reset_position_ids' is not used any more, because rotary "
        "embeddings depend only on the distance between tokens; remove it"
    )
    recipe, stored = load_recipe(base), tmp_path / "stored.yaml"
    text = dump_recipe(recipe)
    stored.write_text(text.replace("data:\n", "data:\n  reset_position_ids: true\n"))
    assert load_resolved(stored) == recipe
    # A recipe may extend the stored one, which earlier versions wrote with the default.
    stored.write_text(text.replace("data:\n", "data:\n  reset_position_ids: false\n"))
    (tmp_path / "next.yaml").write_text("extends: stored.yaml\ntraining: {steps: 7}\n")
    assert load_recipe(tmp_path / "next.yaml").training.steps == 7


def test_stored_keys_of_another_rotary_scaling_are_dropped(base, tmp_path):
    linear = "model.rope_scaling={kind: linear, factor: 4}"
    recipe, stored = load_recipe(base, [linear]), tmp_path / "stored.yaml"
    text = dump_recipe(recipe)
    assert "original_length: 8192" in text
    stored.write_text(text.replace("original_length: 8192", "original_length: 4096"))
    assert load_resolved(stored) == recipe
    assert "belongs to kind 'llama3'" in error_of(
        base, linear.replace("}", ", original_length: 4096}")
    )


def test_betas_are_between_zero_and_one(base):
    assert "optimizer.betas is [0.9, 2.0]" in error_of(base, "optimizer.betas=[0.9, 2.0]")


def test_a_conflict_error_with_many_heads_lists_valid_values(base):
    heads = [
        "model.attention.num_heads=735134400",
        "model.attention.num_kv_heads=735134399",
        "model.attention.head_dim=2",
    ]
    assert "num_heads 735134400; choose one of [1, 2, 3, 4, 5, 6," in error_of(base, *heads)


def test_steps_are_exact_beyond_the_integers_of_floats(base):
    overrides = ["training.steps=null", f"training.tokens={2**60 + 1}"]
    assert load_recipe(base, overrides).training.total_steps == 2**60 // 512 + 1


def test_the_largest_recipe_is_read_back_from_its_dump(base, write):
    path = "/".join([199 * "'", 49 * "\U0001f600", 28 * "\u2028" + "0x_1e5"])[:512]
    assert len(path.encode()) > 480
    sources = [{"path": path, "weight": 1e-308} for _ in range(128)]
    text = yaml.safe_dump({"extends": "base.yaml", "data": {"sources": sources}})
    recipe = load_recipe(write(text))
    assert load_recipe(write(dump_recipe(recipe), "dumped.yaml")) == recipe
