"""Tests of the plan of a recipe: numbers and warnings, printed as text and as JSON."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from diffmegatron.config.load import load_recipe, load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.memory import memory_by_stage, peak_memory
from diffmegatron.plan import Plan, plan_recipe, print_plan, run_plan
from tests.paths import CONFIGS

LARGE = CONFIGS / "scaling" / "diff_13.1b.yaml"
HEADS = "model.attention.num_heads"
BIASES_AND_WINDOW = "model.attention={kind: softmax, num_heads: 24, qkv_bias: true, window: 64}"


def load(*overrides: str, path: Path = CONFIGS / "diff_3b_1t.yaml") -> Recipe:
    return load_recipe(path, overrides)


def printed(plan: Plan, width: int = 400) -> str:
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=width))
    return out.getvalue()


def test_the_plan_of_the_3b_run_matches_a_calculation_by_hand():
    plan = plan_recipe(load(), world_size=64)
    assert plan.parameters.total == 2 * 100_288 * 3072 + 28 * (
        4 * 3072**2 + 3 * 3072 * 8192 + 4 * 128 + 256 + 2 * 3072
    ) + (3072)
    assert plan.tokens_per_step == 4096 * 1024
    assert plan.steps == 238_419  # 1e12 / 4,194,304, rounded up
    assert plan.tokens == 238_419 * 4096 * 1024
    assert plan.total_flops == plan.tokens * plan.flops_per_token.training
    assert (plan.layout.data, plan.layout.microbatches) == (64, 16)


def test_the_fewest_ranks_that_fill_the_layout_are_the_default():
    assert plan_recipe(load()).layout.world_size == 1
    recipe = load("parallel.tensor=4", "parallel.pipeline=2")
    assert plan_recipe(recipe).layout.world_size == 8


def test_ranks_that_do_not_fill_the_layout_are_refused():
    with pytest.raises(UserError, match="6 ranks do not fill"):
        plan_recipe(load("parallel.tensor=4"), world_size=6)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="micro_batch_size 1 x data parallel 3"):
        plan_recipe(load(), world_size=3)


def test_the_shipped_recipes_fit_their_gpus_without_a_warning():
    """Plan the 3B model on 2 ranks, and the 13.1B model on the fewest ranks of its layout."""
    assert plan_recipe(load(), world_size=2).warnings == ()
    assert plan_recipe(load(path=LARGE)).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        # The recipe has 12 heads. Half of them are tried with the recipe's head_dim 128, and with
        # head_dim 0, for which head_dim is derived from hidden_size.
        ([f"{HEADS}=6"], 2, "num_heads 6 is fewer"),
        ([f"{HEADS}=6", "model.attention.head_dim=0"], 2, "head_dim 256 is above the paper's 128"),
        ([f"{HEADS}=6"], 2, "is 1536, narrower than hidden_size 3072"),
        (["model.attention.headwise_norm=false"], 2, "3.122 instead of 3.062"),
        (["parallel.tensor=16", f"{HEADS}=16"], 16, "exceeds a node of 8 GPUs"),
        (
            ["model.attention.window=4096"],
            2,
            "window 4096 hides nothing in sequences of training.seq_length 4096 tokens",
        ),
        (
            ["model.rope_scaling={kind: yarn, factor: 2, original_length: 1024}"],
            2,
            "reaches 2,048 tokens, and training.seq_length is 4096; give factor 4",
        ),
        (["parallel.tensor=2"], 2, "sequence_parallel is off with parallel.tensor 2"),
        (["parallel.pipeline=4"], 2048, "2 microbatches do not fill parallel.pipeline 4"),
        (["model.num_layers=56", "training.micro_batch_size=1"], 2, "an estimated"),
    ],
)
def test_warnings_name_the_questionable_numbers(overrides, ranks, said):
    warnings = plan_recipe(load(*overrides), ranks).warnings
    assert [warning for warning in warnings if said in warning], warnings


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "DiffLlamaForCausalLM"),
        (["model.attention.qk_norm=true"], "GroupedDiffForCausalLM"),
        (["model.attention.qk_norm=true", "model.baseline=true"], "Qwen3ForCausalLM"),
        (["model.attention.headwise_norm=false"], "GroupedDiffForCausalLM"),
        (["model.attention={kind: softmax, num_heads: 24, headwise_norm: true}"], "none"),
        ([BIASES_AND_WINDOW], "none"),
        ([BIASES_AND_WINDOW, "checkpoint.start_from=runs/qwen2"], "Qwen2ForCausalLM"),
    ],
)
def test_the_class_of_the_export_is_printed(overrides, name):
    plan = plan_recipe(load(*overrides))
    (line,) = (row for row in printed(plan).splitlines() if "class of an export" in row)
    assert name in line


def test_an_export_that_only_a_pretrained_model_has_is_warned_about():
    said = "only a run that started from a Qwen2 model can be exported"
    for start, count in (("null", 1), ("runs/qwen2", 0)):
        recipe = load(BIASES_AND_WINDOW, f"checkpoint.start_from={start}")
        assert sum(said in each for each in plan_recipe(recipe).warnings) == count


def test_the_learning_rate_of_a_large_differential_model_is_warned_about():
    high = load("optimizer.lr=1e-4", path=LARGE)
    assert any("loss spikes" in warning for warning in plan_recipe(high).warnings)
    baseline = load("optimizer.lr=1e-4", "model.baseline=true", path=LARGE)
    assert plan_recipe(baseline).warnings == ()


def test_heads_of_the_transformer_are_not_warned_about():
    baseline = load(f"{HEADS}=3", "model.baseline=true")
    assert plan_recipe(baseline, 2).warnings == ()


def test_too_little_memory_names_gpus_and_ranks_that_fit():
    (warning,) = plan_recipe(load()).warnings
    assert "on 1 rank each needs" in warning
    assert (
        "it fits H100 NVL, H200, B200; recompute.granularity=full fits, or 2 ranks fit" in warning
    )
    assert max(stage.total for stage in memory_by_stage(load(), 2)) < 0.9 * 80 * 2**30


def test_a_memory_warning_reports_that_no_gpu_fits():
    (warning,) = plan_recipe(load("training.seq_length=65536")).warnings
    assert "it fits no known GPU; diffmegatron plan --search GPUS ranks the layouts" in warning
    assert warning.endswith("and the recipes of configs/at_scale have some")


def test_a_smaller_microbatch_is_advised_before_anything_else():
    (warning,) = plan_recipe(load("training.micro_batch_size=8"), 8).warnings
    assert "; training.micro_batch_size=2 fits, or recompute.granularity=full fits" in warning
    assert not plan_recipe(load("training.micro_batch_size=2"), 8).warnings


def test_an_indivisible_batch_error_suggests_only_a_micro_batch_size():
    with pytest.raises(UserError, match=r"data parallel 128; give training.micro_batch_size 8$"):
        plan_recipe(load("training.micro_batch_size=12"), 128)


@pytest.mark.parametrize(
    "name",
    [
        "diff_3b_64k",
        "diff_3b_64k_yarn",
        "grouped_3b_64k",
        "diff_v2_3b_64k",
        "pattern_3b_64k",
        "diff_3b_math",
    ],
)
def test_long_sequences_fit_two_gpus_of_80_gb(name):
    for recipe in load_stages(CONFIGS / f"{name}.yaml", allow_missing_files=True):
        assert plan_recipe(recipe, 2).warnings == ()


def test_every_rate_has_a_line_with_its_origin_and_optimistic_ones_are_marked():
    text = printed(plan_recipe(load(), 2)).partition("Times are an estimate, with:")[2]
    lines = [line for line in text.replace("\n    ", " ").splitlines() if line]
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "  - FLOP/s",
        "  - matrix products",
        "  - attention diff_v1",
        "  - MFU",
    ]
    assert "990" in lines[0] or "989" in lines[0]
    assert "measured" not in text
    assert text.count("(assumed") == 9 and text.count("optimistic)") == 5


def test_the_table_shows_every_number():
    plan = plan_recipe(load("parallel.pipeline=2"), 8)
    text = printed(plan)
    for number in ("1,056,964,608", "3.17B", "3.79B", "238,419", "4,194,304", "8 ranks", "ZeRO"):
        assert number in text
    assert "diff_v1 attention: 12 heads of 128\nBaseline Transformer: 24 heads, 3.79B param" in text
    assert "stage 1 of 2" in text
    assert f"{plan.largest_stage.total / 2**30:.2f}" in text


def test_memory_of_a_tiny_network_is_printed_in_mib():
    plan = plan_recipe(
        load_recipe(
            CONFIGS / "quickstart.yaml",
            ["model.num_layers=1", "parallel.tensor=1", "training.micro_batch_size=1"],
        )
    )
    memory, sent = printed(plan).split("Memory per rank")[1].split("Sent per step and rank")
    assert "MiB" in memory and f"{plan.largest_stage.total / 2**20:.2f}" in memory
    (weights,) = (line for line in memory.splitlines() if "weights" in line)
    assert f"{plan.largest_stage.weights / 2**20:.2f}" in weights
    # One rank sends nothing. A run that takes less than a minute has no table of times.
    assert "GB" in sent and "0.00" in sent
    assert "The run would take less than a minute" in " ".join(sent.split())
    large = plan_recipe(load("parallel.pipeline=2"), 8)
    assert "GiB" in printed(large)


def test_a_figure_far_below_its_unit_is_not_printed_as_nothing():
    """Plan LoRA with few weights; the optimizer state is far below 1 GiB, the table's unit."""
    plan = plan_recipe(load("model.lora={rank: 1, alpha: 1, targets: [linear_qkv]}"), 8)
    assert 0 < plan.largest_stage.optimizer / 2**30 < 0.005
    memory = printed(plan).split("Memory per rank")[1].split("Sent per step and rank")[0]
    (line,) = (line for line in memory.splitlines() if "optimizer" in line)
    assert "<0.01" in line


# Each override of the 3B model has these values: the kind of attention, heads, key-value heads, d
# (head_dim) and heads of the baseline. Two more values are differences from the baseline per layer:
# the number of parameters, and the FLOPs per token of a forward pass at sequence length 4,096.
PAIRS = {
    "baseline=true": ("softmax", 24, 24, 128, 24, 0, 0),
    "attention.kind=diff_v1": ("diff_v1", 12, 12, 128, 24, 4 * 128 + 256, 0),
    # diff_v2 adds W_lambda and 24 noise heads. Each noise head has a query projection to d
    # channels, scores over d channels, and a product with V of d channels.
    "attention.kind=diff_v2": (
        "diff_v2", 24, 24, 128, 24, 24 * 129 * 3072, 2 * 24 * 129 * 3072 + 4096 * 24 * 2 * 128,
    ),
    # grouped has 3 noise heads instead of the 12 of diff_v1, so it lacks the queries and scores of
    # 9 heads. It has the same lambda parameters and norm as diff_v1.
    "attention.kind=grouped": (
        "grouped", 12, 3, 128, 24,
        4 * 128 + 256 - 9 * 128 * 3072, -2 * 9 * 128 * 3072 - 4096 * 9 * 128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("override", PAIRS)
def test_model_and_baseline_are_both_counted(override, capsys):
    kind, heads, kv_heads, head_dim, baseline_heads, parameters, flops = PAIRS[override]
    recipe = load(f"model.{override}")
    run_plan([recipe], 2, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["attention"] == kind
    assert (values["num_heads"], values["num_kv_heads"]) == (heads, kv_heads)
    assert (values["head_dim"], values["baseline_num_heads"]) == (head_dim, baseline_heads)
    more = values["parameters"]["total"] - values["baseline_parameters"]
    assert more == 28 * parameters
    own, baseline = (values[f"{each}flops_per_token"] for each in ("", "baseline_"))
    assert own["forward"] - baseline["forward"] == 28 * flops
    assert own["training"] - baseline["training"] == 3 * 28 * flops
    text = printed(plan_recipe(recipe, 2))
    assert f"{kind} attention: {heads} heads of {head_dim}" in text
    assert f"Baseline Transformer: {baseline_heads} heads" in text
    assert f"{values['kv_cache_bytes_per_token']:,} bytes" in text


@pytest.mark.parametrize(
    ("overrides", "channels"),
    [
        ([], 2 * 12 * 128),
        (["baseline=true"], 24 * 128),
        (["attention.kind=diff_v2"], 24 * 128),
        (["attention.num_kv_heads=4"], 2 * 4 * 128),
        (["attention.num_kv_heads=4", "attention.kind=diff_v2"], 4 * 128),
        (["attention.kind=grouped"], 2 * 3 * 128),
    ],
)
def test_the_cache_holds_keys_and_values_of_every_layer_in_bf16(overrides, channels):
    plan = plan_recipe(load(*(f"model.{each}" for each in overrides)), 2)
    assert plan.kv_cache_bytes_per_token == 28 * 2 * 2 * channels
    has_two_maps = plan.attention in ("diff_v1", "grouped")
    assert plan.served_cache_bytes_per_token == (1 + has_two_maps) * plan.kv_cache_bytes_per_token


def test_json_names_the_run_dir_of_every_stage(capsys):
    run_plan(load_stages(CONFIGS / "diff_3b_math.yaml"), as_json=True)
    named = [values["run_dir"] for values in json.loads(capsys.readouterr().out)]
    assert named == ["runs/diff_3b_math/continuation", "runs/diff_3b_math/reasoning"]


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"uses 100277 ids, but .* is 100270; raise .* at least 7,"):
        plan_recipe(load("model.vocab_size=100280", "model.vocab_padding=10"), 2)


def test_unknown_hardware_is_refused():
    with pytest.raises(UserError, match="'V100' is unknown; give one of H100 PCIe, "):
        plan_recipe(load(), 2, "V100")


def test_memory_is_judged_by_the_hardware_named():
    assert plan_recipe(load(), 1, "H200").warnings == ()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.pipeline=2"],
        ["parallel.pipeline=7", "parallel.virtual_pipeline=2", "training.global_batch_size=28"],
        ["parallel.pipeline=14", "model.tied_embeddings=true", "training.global_batch_size=2"],
        ["parallel.pipeline=4", "model.vocab_size=1024", "data.tokenizer=bytes"],
        ["parallel.pipeline=28", "parallel.offload_optimizer=true"],
    ],
)
def test_the_peak_is_that_of_the_largest_stage(overrides):
    recipe = load(*overrides)
    ranks = recipe.parallel.model_ranks * 2
    largest = max(stage.total for stage in memory_by_stage(recipe, ranks))
    assert peak_memory(recipe, ranks) == largest


@pytest.mark.parametrize(("layers", "end"), [(40, 0), (20, -1)])
def test_either_end_of_a_pipeline_may_be_the_largest(layers, end):
    overrides = ["parallel.pipeline=5", "recompute.granularity=full", f"model.num_layers={layers}"]
    recipe = load(*overrides, path=LARGE)
    totals = [stage.total for stage in memory_by_stage(recipe, 20)]
    assert peak_memory(recipe, 20) == max(totals) == totals[end]


@pytest.mark.parametrize("width", [80, 120])
def test_no_table_is_cut_off(width):
    recipe = load("parallel.tensor=4", "parallel.context=2", "parallel.sequence_parallel=true")
    text = printed(plan_recipe(recipe, 64), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_tied_output_layer_is_printed_as_tied():
    assert "tied to embedding" in printed(plan_recipe(load(path=LARGE)))


def test_warnings_are_printed():
    plan = plan_recipe(load())
    assert f"warning: {plan.warnings[0]}" in printed(plan)


def test_json_has_everything_and_adds_up(capsys):
    run_plan([load("parallel.pipeline=2")], 8, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"]["total"] == plan_recipe(load(), 2).parameters.total
    assert values["layout"]["data"] == 4
    assert [stage["stage"] for stage in values["memory"]] == [0, 1]
    for stage in values["memory"]:
        held = sum(stage[name] for name in ("weights", "gradients", "optimizer", "communication"))
        passes = [
            stage["activations"] - moment["freed"] + moment["beside"] + moment["gathered"]
            for moment in map(stage.get, ("loss", "reduction", "layer", "embedding"))
        ]
        assert held + max(*passes, stage["update"]) == stage["total"]
    assert values["total_flops"] == values["tokens"] * values["flops_per_token"]["training"]


def test_stages_are_planned_on_ranks_that_fill_each_of_them(capsys):
    batch = "training.global_batch_size=28"
    stages = [
        load("parallel.tensor=4", batch),
        load("parallel.tensor=2", "parallel.pipeline=7", batch),
    ]
    run_plan(stages, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert [value["layout"]["world_size"] for value in values] == [28, 28]
    assert [value["layout"]["data"] for value in values] == [7, 2]


def test_a_later_stage_prints_only_its_changes(tmp_path, capsys):
    recipe = tmp_path / "stages.yaml"
    recipe.write_text(
        f"extends: {CONFIGS}/quickstart.yaml\nrun_dir: r\nstages:\n  - name: a\n  - name: b\n"
        "    model: {rope_theta: 5.0e+5}\n    training: {seq_length: 512}\n"
        "    data: {packing: best_fit}\n"
    )
    run_plan(load_stages(recipe))
    first, second = capsys.readouterr().out.split("r/b ")
    assert "Parameters" in first and "changes of" not in first
    assert "changes of r/a: model.rope_theta 10000.0 -> 500000.0" in second
    assert "training.seq_length 256 -> 512" in second
    assert "same as r/a: the network, " in second and "Parameters" not in second
    assert "Memory per rank" in second and "tokens per step" in second


def test_all_changes_of_a_later_stage_are_printed_as_yaml(tmp_path, capsys):
    recipe = tmp_path / "stages.yaml"
    recipe.write_text(
        f"extends: {CONFIGS}/quickstart.yaml\nrun_dir: r\nstages:\n  - name: a\n  - name: b\n"
        "    model: {rope_scaling: {kind: yarn, factor: 4.0, original_length: 256}}\n"
        "    training: {seq_length: 512, global_batch_size: 16, loss_chunk: 64}\n"
        "    data: {upsampling: {mode: per_source, long_tokens: 128}}\n"
        "    optimizer: {lr: 8.0e-4}\n  - name: c\n"
        "    model: {rope_scaling: {kind: yarn, factor: 8.0, original_length: 256}}\n"
        "    parallel: {zero_stage: 2}\n"
    )
    a, b, c = load_stages(recipe)
    run_plan((a, b, c))
    _, second, third = capsys.readouterr().out.split("changes of ")
    assert second.splitlines()[0] == (
        "r/a: model.rope_scaling null -> {kind: yarn, factor: 4.0, original_length: 256}; "
        "data.upsampling.mode none -> per_source; data.upsampling.long_tokens 4096 -> 128; "
        f"training.seq_length 256 -> 512; training.global_batch_size "
        f"{a.training.global_batch_size} -> 16; training.loss_chunk "
        f"null -> 64; optimizer.lr {a.optimizer.lr} -> 0.0008"
    )
    assert "model.rope_scaling.factor 4.0 -> 8.0; data.upsampling.mode per_source -> none" in third
    assert "parallel.zero_stage 1 -> 2" in third


def test_a_longer_context_without_a_change_of_rope_is_a_warning(tmp_path, capsys):
    def warned(*changes: str) -> bool:
        recipe = tmp_path / "stages.yaml"
        names = "".join(f"  - {{name: s{n}, {each}}}\n" for n, each in enumerate(changes))
        recipe.write_text(f"extends: {CONFIGS}/quickstart.yaml\nrun_dir: r\nstages:\n{names}")
        run_plan(load_stages(recipe), as_json=True)
        return json.loads(capsys.readouterr().out)[-1]["warnings"][-1:] == [
            "training.seq_length rises from 256 (r/s0) to 512, and model.rope_theta and "
            "model.rope_scaling are unchanged; a longer context usually needs a larger "
            "model.rope_theta, or model.rope_scaling"
        ]

    longer = "training: {seq_length: 512}"
    assert warned("", longer)
    assert warned("", "training: {seq_length: 128}", longer)
    assert not warned("", "training: {seq_length: 256}")
    assert not warned("", f"{longer}, model: {{rope_theta: 5.0e+5}}")
    assert not warned(longer, "training: {seq_length: 128}", longer)
    assert not warned(f"checkpoint: {{start_from: {tmp_path}/unknown}}", longer)


def test_the_equal_baseline_is_that_of_the_study_and_has_as_many_parameters():
    """Compare with the pair of the studies: V2 with 444 channels, and softmax with 512."""
    study = CONFIGS.parent / "tools/benchmarks/studies/english_small.yaml"
    v2 = ["model.attention.kind=diff_v2", "model.ffn_hidden_size=444", "run_dir=r"]
    plan = plan_recipe(load_recipe(study, [*v2, "optimizer.lr=1e-3"]))
    assert plan.baseline_equal_ffn == 512
    assert "model.baseline=true model.ffn_hidden_size=512\n" in printed(plan)
    large = ["model.attention.kind=diff_v2", "parallel.tensor=8"]
    plan = plan_recipe(load(*large, path=LARGE))
    pasted = ["model.baseline=true", f"model.ffn_hidden_size={plan.baseline_equal_ffn}"]
    baseline = plan_recipe(load(*large, *pasted, path=LARGE))
    assert baseline.attention == "softmax" and plan.attention == "diff_v2"
    # Eight channels of every layer are 0.02% of the network.
    assert abs(baseline.parameters.total / plan.parameters.total - 1) < 1e-3
    assert plan.baseline_parameters < 0.995 * plan.parameters.total
    assert plan_recipe(load()).baseline_equal_ffn is baseline.baseline_equal_ffn is None


def test_a_run_dir_is_printed_as_it_is(capsys):
    stages = [load("run_dir='[/x] [bold]y'"), load("run_dir=z")]
    run_plan(stages)
    assert "[/x] [bold]y" in capsys.readouterr().out


def test_no_torch_is_needed():
    """Check that a plan does not import torch; it starts fast and works without torch."""
    code = (
        "import sys; from diffmegatron.config.load import load_recipe; "
        f"from diffmegatron.plan import run_plan; run_plan([load_recipe({str(LARGE)!r})]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
