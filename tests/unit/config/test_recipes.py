"""Every recipe in configs/ is compared with numbers that are copied here from the papers."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.attention.kinds.dex import assumptions
from diffmegatron.config.load import load_recipe, load_stages
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.config.tensors import network_tensors
from diffmegatron.config.trainable_patterns import learning_rate_factor, trained_parts
from diffmegatron.errors import UserError
from diffmegatron.hf.configuration import model_section, read_config
from diffmegatron.model.accounting.parameters import count_parameters, count_trained
from diffmegatron.plan import plan_recipe
from diffmegatron.plan.rehearse import small_recipe
from tests.paths import CONFIGS

# Files in base/ and clusters/ are not recipes.
FILES = sorted(
    path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("base", "clusters")
)
NAMES = [str(path.relative_to(CONFIGS).with_suffix("")) for path in FILES]

# Each size has these values: hidden size, number of layers, number of differential heads, head
# dimension d, feed-forward size, learning rate, and the number of parameters in the name of the
# size. Hidden size, layers and heads are from Ye et al., Differential Transformer, ICLR 2025,
# appendix E, table 10. The learning rate is from section 3.2 of the same paper. The feed-forward
# size is 8/3 of the hidden size, rounded up to a multiple of 64.
SCALING = {
    "830m": (1536, 24, 8, 96, 4096, 1.5e-4, 830e6),
    "1.4b": (2048, 24, 8, 128, 5504, 1.5e-4, 1.4e9),
    "2.8b": (2560, 32, 10, 128, 6848, 1.5e-4, 2.8e9),
    "6.8b": (4096, 32, 16, 128, 10944, 7.5e-5, 6.8e9),
    "13.1b": (5120, 40, 20, 128, 13696, 7.5e-5, 13.1e9),
}
# Each recipe has three values: the number of tokens; ``num_heads`` and ``num_kv_heads``; and three
# numbers per layer that follow from the kind of attention. The three numbers are the query heads of
# all softmax maps, the key heads of all softmax maps, and the output channels divided by 128.
THREE_BILLION = {
    "diff_3b_1t": (10**12, (12, 12), (24, 24, 24)),
    "diff_3b_350b": (350 * 10**9, (12, 12), (24, 24, 24)),
    "transformer_3b_350b": (350 * 10**9, (24, 24), (24, 24, 24)),
    # The next four recipes have other kinds of attention. "grouped" has three signal heads per
    # noise head. The last recipe is the baseline of "grouped_3b_350b".
    "diff_v2_3b_1t": (10**12, (24, 24), (48, 24, 24)),
    "diff_v2_3b_350b": (350 * 10**9, (24, 24), (48, 24, 24)),
    "grouped_3b_1t": (10**12, (12, 4), (16, 8, 24)),
    "grouped_3b_350b": (350 * 10**9, (12, 4), (16, 8, 24)),
    "transformer_8kv_3b_350b": (350 * 10**9, (24, 8), (24, 8, 24)),
}


# The beginning of a recipe's name determines its kind of attention. The first match counts, so
# longer beginnings come first.
KINDS = {
    "diff_v2": "diff_v2",
    "grouped": "grouped",
    "diff": "diff_v1",
    "transformer": "softmax",
    "pattern": "pattern",
    "continue_diffllama": "diff_v1",
    "continue_llama": "softmax",
}


def kind_of(name: str) -> str:
    """Return the kind of attention that the name of a recipe requires."""
    folder, _, stem = name.rpartition("/")
    if folder == "dex":
        return "dex"
    return next(kind for begins, kind in KINDS.items() if stem.startswith(begins))


def load(name: str, *overrides: str) -> Recipe:
    return load_recipe(CONFIGS / f"{name}.yaml", overrides, allow_missing_files=True)


def stages(name: str) -> tuple[Recipe, ...]:
    return load_stages(CONFIGS / f"{name}.yaml", allow_missing_files=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_plans(name):
    for recipe in stages(name):
        plan = plan_recipe(recipe)
        assert plan.tokens >= recipe.training.total_steps
        if name != "quickstart":
            assert Path(recipe.run_dir).is_relative_to(f"runs/{name}")
            assert recipe.model.attention.kind == kind_of(name)


@pytest.mark.parametrize("prefix", ["diff", "transformer", "diff_v2", "grouped"])
def test_the_long_context_stage_is_section_3_3(prefix):
    recipe = load(f"{prefix}_3b_64k")
    assert recipe.training.seq_length == 65_536
    assert recipe.training.tokens == 1_500_000_000
    assert recipe.optimizer.lr == 8e-5
    assert recipe.model.rope_theta == 640_000
    assert recipe.data.upsampling.mode == "per_source"
    assert recipe.data.upsampling.keep_short == 0.1
    assert recipe.data.upsampling.long_tokens == 4096
    assert recipe.training.tokens_per_step == 2**22
    pretrained = load("transformer_3b_350b" if prefix == "transformer" else f"{prefix}_3b_1t")
    assert recipe.checkpoint.start_from == pretrained.run_dir


def test_the_yarn_recipe_differs_from_the_papers_in_its_rotary_embedding():
    yarn, papers = load("diff_3b_64k_yarn"), load("diff_3b_64k")
    scaling = yarn.model.rope_scaling
    assert scaling.kind == "yarn"
    assert yarn.model.rope_theta == load("diff_3b_1t").model.rope_theta
    assert scaling.original_length == load("diff_3b_1t").training.seq_length
    assert scaling.factor * scaling.original_length == yarn.training.seq_length
    rotary = {"rope_theta": papers.model.rope_theta, "rope_scaling": None}
    model = yarn.model.model_copy(update=rotary)
    assert yarn.model_copy(update={"model": model, "run_dir": papers.run_dir}) == papers


@pytest.mark.parametrize("prefix", ["diff", "transformer"])
def test_the_math_stages_are_appendix_c(prefix):
    continuation, reasoning = stages(f"{prefix}_3b_math")
    assert continuation.checkpoint.start_from == load(f"{prefix}_3b_64k").run_dir
    assert continuation.training.tokens == 20 * 10**9
    assert continuation.optimizer.lr == 8e-5
    assert continuation.training.tokens_per_step == 2**22
    assert reasoning.checkpoint.start_from == continuation.run_dir
    assert reasoning.training.tokens == 2 * 10**9
    assert reasoning.optimizer.lr == 1e-5
    assert reasoning.training.tokens_per_step == 2**20
    assert continuation.model.rope_theta == reasoning.model.rope_theta == 640_000


def test_the_recipes_of_the_paper_are_all_there():
    pair = ("diff", "transformer")
    expected = {f"scaling/{prefix}_{size}" for prefix in pair for size in SCALING}
    assert set(NAMES) >= expected | set(THREE_BILLION) | {"quickstart"}


def test_every_base_is_extended_by_a_recipe():
    def parents(path: Path) -> set[Path]:
        extends = yaml.safe_load(path.read_text()).get("extends", [])
        names = [extends] if isinstance(extends, str) else extends
        direct = {(path.parent / name).resolve() for name in names}
        return direct.union(*map(parents, direct))

    used = set().union(*map(parents, FILES))
    assert {path for path in used if path.parent.name == "base"} == set(
        CONFIGS.resolve().glob("base/*")
    )


@pytest.mark.parametrize("name", THREE_BILLION)
def test_the_3b_recipes_are_those_of_section_3_1_and_table_9(name):
    recipe = load(name)
    model, training, optimizer = recipe.model, recipe.training, recipe.optimizer
    assert (model.hidden_size, model.num_layers, model.ffn_hidden_size) == (3072, 28, 8192)
    tokens, own, ordinary = THREE_BILLION[name]
    attention = model.attention
    heads = attention.kinds[0].heads
    assert (attention.num_heads, attention.num_kv_heads) == own
    assert attention.head_dim == 128
    assert (heads.queries, heads.keys, heads.output_channels // 128) == ordinary
    assert model.vocab_size == 100_288
    assert recipe.data.tokenizer == "cl100k_base"
    assert training.seq_length == 4096
    assert training.tokens_per_step == 4 * 2**20
    assert training.tokens == tokens
    assert training.precision == "bf16"
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (3.2e-4, (0.9, 0.95), 0.1)
    assert (optimizer.eps, optimizer.clip_grad_norm) == (1e-6, 1.0)
    schedule = optimizer.schedule
    assert (schedule.kind, schedule.warmup_steps, schedule.final_lr) == ("linear", 1000, 1.28e-5)
    assert len(recipe.data.sources) == 5


@pytest.mark.parametrize("prefix", ["diff", "transformer"])
@pytest.mark.parametrize("size", SCALING)
def test_the_scaling_suite_is_that_of_appendix_e(size, prefix):
    recipe = load(f"scaling/{prefix}_{size}")
    model, training, optimizer = recipe.model, recipe.training, recipe.optimizer
    hidden, layers, heads, head_dim, ffn, lr, named = SCALING[size]
    attention, own = model.attention, heads if prefix == "diff" else 2 * heads
    assert (model.hidden_size, model.num_layers, attention.num_heads) == (hidden, layers, own)
    assert (attention.num_kv_heads, attention.head_dim) == (own, head_dim)
    assert attention.kinds[0].heads.queries == 2 * heads
    assert model.ffn_hidden_size == ffn
    assert 0 <= ffn - hidden * 8 / 3 < 64
    assert ffn % 64 == 0
    assert training.seq_length == 2048
    assert training.tokens_per_step == 2**18
    assert training.total_steps == 40_000
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (lr, (0.9, 0.98), 0.05)
    schedule = optimizer.schedule
    assert (schedule.kind, schedule.warmup_steps, schedule.final_lr) == ("linear", 375, 0.0)
    assert count_parameters(model).total == pytest.approx(named, rel=0.015)


@pytest.mark.parametrize(
    ("differential", "transformer"),
    [(f"scaling/diff_{size}", f"scaling/transformer_{size}") for size in SCALING]
    + [
        ("diff_3b_350b", "transformer_3b_350b"),
        ("diff_v2_3b_350b", "transformer_3b_350b"),
        ("grouped_3b_350b", "transformer_8kv_3b_350b"),
    ],
)
def test_a_pair_differs_in_attention_and_run_dir_alone(differential, transformer):
    attention = load(differential).model.attention
    first, second = (load(name).model_dump() for name in (differential, transformer))
    assert first.pop("run_dir") != second.pop("run_dir")
    assert first["model"].pop("attention")["kind"] == kind_of(differential)
    assert second["model"].pop("attention") == attention.baseline().model_dump()
    assert first == second


@pytest.mark.parametrize("kind", ["diff_v2", "grouped"])
@pytest.mark.parametrize("length", ["1t", "350b", "64k"])
def test_the_other_kinds_differ_from_v1_in_attention_alone(length, kind):
    first, second = (load(f"{each}_3b_{length}").model_dump() for each in ("diff", kind))
    for values in (first, second):
        values.pop("run_dir")
        values["checkpoint"].pop("start_from")
        assert values["model"].pop("attention")["head_dim"] == 128
    assert first == second


# Number of signal heads per noise head in a "grouped" model of each size. The number of signal
# heads divided by this number is the number of noise heads and of key-value heads. The quotient
# must be a multiple of the recipe's tensor-parallel size.
SIGNAL_PER_NOISE = {"830m": 4, "1.4b": 4, "2.8b": 2, "6.8b": 4, "13.1b": 5}


@pytest.mark.parametrize("kind", ["diff_v2", "grouped"])
@pytest.mark.parametrize("size", SCALING)
def test_an_override_makes_the_scaling_suite_of_another_kind(size, kind):
    """Check that the overridden recipe has an attention output of ``hidden_size`` channels."""
    hidden, _, heads, *_ = SCALING[size]
    overrides = [f"model.attention.kind={kind}"]
    if kind == "grouped":
        overrides.append(f"model.attention.signal_per_noise={SIGNAL_PER_NOISE[size]}")
    recipe = load_recipe(CONFIGS / "scaling" / f"diff_{size}.yaml", overrides)
    attention = recipe.model.attention
    assert attention.kind == kind
    assert attention.num_heads == (heads if kind == "grouped" else 2 * heads)
    assert attention.kinds[0].heads.output_channels == hidden
    assert plan_recipe(recipe).steps == 40_000


def test_the_350b_run_is_the_1t_run_cut_short():
    long, short = (load(name).model_dump() for name in ("diff_3b_1t", "diff_3b_350b"))
    for values in (long, short):
        values.pop("run_dir")
        values["training"].pop("tokens")
    assert long == short


# LLAMA_3 and QWEN2_5 have keys and values of the published config.json files of pretrained models.
# PRETRAINED below adds the values of each model, and its published number of parameters.
LLAMA_3 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN2_5 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def sizes(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


ONE_B = LLAMA_3 | sizes(2048, 16, 32, 8192) | {"head_dim": 64}
EIGHT_B = {"rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 8.0}, "tie_word_embeddings": False}
PRETRAINED = {
    "dex/llama_3.1_8b": (LLAMA_3 | sizes(4096, 32, 32, 14336) | EIGHT_B, 8.03e9),
    "dex/llama_3.2_3b": (LLAMA_3 | sizes(3072, 28, 24, 8192) | {"head_dim": 128}, 3.21e9),
    "dex/llama_3.2_1b": (ONE_B, 1.24e9),
    "dex/qwen2.5_1.5b": (QWEN2_5 | sizes(1536, 28, 12, 8960), 1.54e9),
    "dex/qwen2.5_0.5b": (QWEN2_5 | sizes(896, 24, 14, 4864), 0.494e9),
    "continue_llama_3.2_1b": (ONE_B, 1.24e9),
    "continue_diffllama_1b": (ONE_B | {"model_type": "diffllama", "lambda_std_dev": 0.1}, 1.24e9),
}
DEX = sorted(name for name in PRETRAINED if name.startswith("dex/"))
# Overrides of the control experiments in docs/pretrained.md.
CONTROLS = {
    "without the term": ["model.baseline=true"],
    "full": ["model.baseline=true", "optimizer.trainable=null", "optimizer.lr=1e-5"],
    "lora": [
        "model.baseline=true",
        "optimizer.trainable=null",
        "model.lora={rank: 16, alpha: 32}",
    ],
}


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_recipe_of_a_pretrained_model_starts_with_its_import(name, tmp_path):
    fields, parameters = PRETRAINED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    imported = ModelConfig.model_validate(model_section(read_config(tmp_path), 0))
    assert count_parameters(imported).total == pytest.approx(parameters, abs=0.006e9)
    recipe = load(name)
    attention, foundation = recipe.model.attention, recipe.model.attention.foundation
    if foundation is not None:
        attention = LayerKinds(kinds=(foundation.kind,))
    own = recipe.model.model_copy(update={"attention": attention})
    assert own.model_dump() == imported.model_dump()
    # Build the recipe that an import of the model writes.
    folder = recipe.checkpoint.start_from
    tokenizer = recipe.data.model_copy(
        update={"tokenizer": str(Path(folder).resolve() / "hugging_face")}
    )
    before = recipe.model_copy(update={"model": imported, "data": tokenizer})
    check_can_start_from(before, folder, recipe, name)
    other = before.data.model_copy(update={"tokenizer": "runs/other/hugging_face"})
    with pytest.raises(UserError, match=r"has data\.tokenizer 'runs/other/hugging_face'"):
        check_can_start_from(before.model_copy(update={"data": other}), folder, recipe, name)


V1, V2, SOFTMAX = (
    f"{{kind: {kind}, num_heads: {heads}"
    for kind, heads in (("diff_v1", 12), ("diff_v2", 24), ("softmax", 24))
)
PATTERN = f"[{V1}, layers: 15-28}}, {SOFTMAX}}}]"


@pytest.mark.parametrize(
    ("pattern", "is_same"),
    [
        (PATTERN, True),
        (f"[{SOFTMAX}, layers: '8-14, 1-7'}}, {V1}}}]", True),
        (f"[{SOFTMAX}, layers: 2, window: 64}}, {V1}, layers: 15-28}}, {SOFTMAX}}}]", True),
        (f"[{V1}, layers: 1-14}}, {SOFTMAX}}}]", False),
        (f"[{V1}, layers: 15-28}}, {V2}, layers: 3}}, {SOFTMAX}}}]", False),
    ],
)
def test_a_run_starts_from_the_same_layers_however_the_pattern_is_written(pattern, is_same):
    written, other = (load("diff_3b_1t", f"model.attention={each}") for each in (PATTERN, pattern))
    for before, now in ((written, other), (other, written)):
        refused = pytest.raises(UserError, match=r"has model\.attention\.\[")
        with nullcontext() if is_same else refused:
            check_can_start_from(before, "before", now, "now")


@pytest.mark.parametrize("name", DEX)
def test_the_recipes_of_dex_are_the_papers_setting(name):
    recipe = load(name)
    training, optimizer = recipe.training, recipe.optimizer
    assert training.seq_length == 32_768
    assert training.tokens == 887_000_000
    assert training.tokens_per_step == 2**20
    assert training.total_steps == 846
    assert [source.weight for source in recipe.data.sources] == [74.3, 6.5, 7.9, 11.3]
    assert (optimizer.lr, optimizer.schedule.kind) == (1e-4, "cosine")
    assert optimizer.schedule.warmup(846) == 25
    (attention,) = recipe.model.attention.kinds
    assert attention.annealing_steps == 423
    trained = {
        tensor.name.partition("self_attention.")[2]: trained_parts(tensor, recipe)
        for tensor in network_tensors(recipe.model)
        if trained_parts(tensor, recipe)
    }
    assert trained == {
        "linear_qkv.weight": ("k", "v"),
        "linear_proj.weight": ("",),
        "dex_projection": ("",),
        "lambda_learn": ("",),
    }
    factors = {
        own: learning_rate_factor(own, recipe) for own in ("a.lambda_learn", "a.linear_proj.weight")
    }
    assert factors == {"a.lambda_learn": 30, "a.linear_proj.weight": 1}
    (assumption,) = assumptions([attention])
    assert f"{recipe.checkpoint.start_from}_heads.yaml" in assumption


@pytest.mark.parametrize("name", sorted(PRETRAINED))
def test_the_recipes_of_pretrained_models_fit_8_a100_and_so_do_the_controls(name):
    layout = None
    for overrides in ([], *(CONTROLS.values() if name in DEX else ())):
        recipe = load_recipe(CONFIGS / f"{name}.yaml", overrides, allow_missing_files=True)
        plan = plan_recipe(recipe, 8, "A100")
        assert plan.warnings == ()
        assert plan.largest_stage.total < 0.9 * 80 * 2**30
        layout = layout or plan.layout
        assert plan.layout == layout


@pytest.mark.parametrize("name", DEX)
def test_a_control_is_one_change_of_the_recipe(name):
    dex, control, full, lora = (
        load_recipe(CONFIGS / f"{name}.yaml", overrides, allow_missing_files=not overrides)
        for overrides in ([], *CONTROLS.values())
    )
    own = {"*.dex_projection", "*.lambda_learn"}
    assert {*dex.optimizer.trainable} - {*control.optimizer.trainable} == own
    layers, d = dex.model.num_layers, dex.model.attention.head_dim
    assert count_trained(dex) - count_trained(control) == layers * (d * d + 1)
    assert count_trained(full) == count_parameters(full.model).total
    assert full.optimizer.lr == 1e-5
    assert count_trained(lora) == count_parameters(lora.model).total - count_trained(full)
    for recipe in (control, full, lora):
        assert recipe.model.attention == dex.model.attention.baseline()
        assert recipe.optimizer.lr_multipliers == {}
        assert (recipe.training, recipe.data) == (dex.training, dex.data)


def gpus_of(name: str) -> int:
    """Return the number of GPUs in the name of a recipe at scale, such as ``diff_3b_64gpus``."""
    return int(name.removesuffix("gpus").rpartition("_")[2])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("at_scale/")])
def test_recipes_at_scale_fit_h100_without_a_warning(name):
    plan = plan_recipe(load(name), gpus_of(name))
    assert plan.warnings == ()
    assert plan.largest_stage.total < 0.9 * 80 * 2**30


def test_the_64k_pattern_has_windows_in_three_of_four_layers_and_starts_from_whole_attention():
    recipe, whole = load("pattern_3b_64k"), load("diff_3b_1t")
    windows = [recipe.model.attention.of_layer(layer).window for layer in range(28)]
    assert windows == [4096, 4096, 4096, None] * 7
    assert whole.training.seq_length == 4096
    check_can_start_from(whole, "diff_3b_1t", recipe, "pattern_3b_64k")
    plan, papers = plan_recipe(recipe, 2), plan_recipe(load("diff_3b_64k"), 2)
    # 21 of 28 layers have 4096 (1 - 4096 / 131072) instead of 32,768 visible keys per token.
    share = (7 + 21 * 4096 * (1 - 4096 / 131072) / 32768) / 28
    # A key costs 2 FLOPs in each of 24 x 128 channels of the queries and of the outputs.
    per_key = 28 * 2 * 2 * 24 * 128
    saved = papers.flops_per_token.training - plan.flops_per_token.training
    assert saved == pytest.approx(3 * (1 - share) * 32768 * per_key, rel=1e-9)
    # A token has keys and values of 24 x 128 channels each, in bf16.
    assert plan.kv_cache_bytes == 2 * 24 * 128 * 2 * (7 * 65536 + 21 * 4096)
    assert papers.kv_cache_bytes is None


@pytest.mark.parametrize(
    "name", ["3b_64gpus", "3b_256gpus", "3b_64k_64gpus", "6.8b_64gpus", "13.1b_64gpus"]
)
def test_recipes_at_scale_are_pairs_of_the_papers_runs(name):
    baseline = load(f"at_scale/diff_{name}").model.attention.baseline().model_dump()
    own, other = (load(f"at_scale/{each}_{name}").model_dump() for each in ("diff", "transformer"))
    size = name.removesuffix("_64gpus").removesuffix("_256gpus")
    papers = {"3b": "diff_3b_350b", "3b_64k": "diff_3b_64k"}.get(size, f"scaling/diff_{size}")
    paper = load(papers).model_dump()
    for values in (own, other, paper):
        values.pop("run_dir")
        values["checkpoint"].pop("start_from")
    assert other["model"].pop("attention") == baseline
    attention = own["model"].pop("attention")
    assert attention == paper["model"].pop("attention")
    assert attention["kind"] == "diff_v1"
    assert own == other
    for values in (own, paper):
        # Remove the settings that change only how the run is computed.
        values.pop("parallel")
        values.pop("recompute")
        values["training"].pop("loss_chunk")
    assert own == paper


def test_the_64k_recipe_shares_a_sequence_over_a_node():
    recipe = load("at_scale/diff_3b_64k_64gpus")
    assert recipe.parallel.context == 8
    assert recipe.training.seq_length == 65_536
    loss = plan_recipe(recipe, 64).largest_stage.loss
    assert 65_536 / 8 * 100_288 < loss.beside < 65_536 / 8 * 100_288 * 6


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"quickstart"}))
def test_every_recipe_has_a_small_rehearsal_with_its_layout_settings(name, tmp_path):
    for recipe in stages(name):
        ranks = gpus_of(name) if name.startswith("at_scale/") else None
        ranks = 8 if name in PRETRAINED else ranks
        rehearsal = small_recipe(recipe, ranks, tmp_path)
        small = rehearsal.recipe
        assert small.data_parallel(rehearsal.world_size) in (1, 2)
        assert rehearsal.world_size <= 16
        kept = ("zero_stage", "virtual_pipeline", "sequence_parallel", "offload_optimizer")
        for key in kept:
            assert getattr(small.parallel, key) == getattr(recipe.parallel, key)
        assert small.training.precision == recipe.training.precision
        assert small.data.reset_attention_mask == recipe.data.reset_attention_mask


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "model.attention.num_heads=1073741824",
            "model.attention.num_kv_heads=1",
            "model.attention.head_dim=2",
        ],
        ["model.ffn_hidden_size=2147483647"],
        [
            "parallel.tensor=1024",
            "model.attention.num_heads=1024",
            "model.attention.head_dim=2",
            "model.vocab_size=101376",
        ],
        ["parallel.context=2048", "training.global_batch_size=2048"],
        ["parallel.pipeline=4096", "model.num_layers=4096"],
    ],
)
def test_the_largest_recipes_have_a_small_rehearsal(overrides, tmp_path):
    recipe = load_recipe(CONFIGS / "diff_3b_1t.yaml", overrides)
    rehearsal = small_recipe(recipe, None, tmp_path)
    assert rehearsal.world_size <= 16
    assert count_parameters(rehearsal.recipe.model).total < 10**8


def test_a_rehearsal_of_mup_has_heads_of_another_width(tmp_path):
    overrides = ["model.initialization.base_head_dim=128"]
    recipe = load_recipe(CONFIGS / "diff_3b_350b_mup.yaml", overrides)
    small = small_recipe(recipe, None, tmp_path).recipe.model
    assert small.initialization.scheme == "mup"
    assert small.attention.head_dim != recipe.model.attention.head_dim == 128


def test_a_pipeline_of_too_many_stages_is_not_rehearsed(tmp_path):
    overrides = ["model.num_layers=4096", "parallel.pipeline=2", "parallel.virtual_pipeline=2048"]
    recipe = load_recipe(CONFIGS / "diff_3b_1t.yaml", overrides)
    with pytest.raises(
        UserError, match="virtual_pipeline 2048 would be rehearsed with 4096 layers"
    ):
        small_recipe(recipe, None, tmp_path)


# The next test excludes these recipes. Sequences of 64K tokens (_3b_64k, _yarn) need two ranks.
# The math recipes (_3b_math) have stages, which ``load`` refuses.
LONG = {name for name in NAMES if name.endswith(("_3b_64k", "_yarn", "_3b_math"))}


@pytest.mark.parametrize(
    "name", sorted(name for name in set(NAMES) - LONG - {"quickstart"} if "at_scale" not in name)
)
def test_the_layouts_of_the_recipes_need_no_warning_on_80_gib(name):
    """Check that recipes fit 80 GiB per GPU on the fewest ranks that fill their layout.

    There are two exceptions: the 3B recipes are planned on two ranks, and the recipes of pretrained
    models on eight ranks.
    """
    on_two = {*THREE_BILLION, "pattern_3b_350b", "diff_v2_3b_350b_gated", "diff_3b_350b_mup"}
    ranks = 2 if name in on_two else 8 if name in PRETRAINED else None
    assert plan_recipe(load(name), ranks).warnings == ()


def test_a_rehearsal_of_several_kinds_has_heads(tmp_path):
    """Check kinds whose numbers of heads have common divisors that no kind has itself."""
    kinds = (
        "[{kind: diff_v2, num_heads: 16, head_dim: 64, signal_per_noise: 4, layers: 1-2}, "
        "{kind: diff_v1, num_heads: 8, head_dim: 64}]"
    )
    recipe = load_recipe(
        CONFIGS / "diff_3b_1t.yaml", [f"model.attention={kinds}", "model.hidden_size=1024"]
    )
    model = small_recipe(recipe, None, tmp_path).recipe.model
    assert model.attention.num_heads > 0
    assert model.hidden_size > 0
