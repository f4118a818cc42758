"""Tests of import and export of pretrained models against transformers, and of refused models."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from diffmegatron.checkpoint.checkpoint_format import check_same_run, open_checkpoint
from diffmegatron.checkpoint.weights import write_checkpoint
from diffmegatron.cli import app
from diffmegatron.config.load import load_recipe, load_resolved
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf import configuration
from diffmegatron.hf import import_model as importing
from diffmegatron.hf.export_checkpoint import export_checkpoint, sample, training_logits
from diffmegatron.hf.import_model import import_model
from diffmegatron.hf.pretrained_files import find_original
from diffmegatron.hf.write_export import logit_difference
from tests.paths import DOCS
from tests.pretrained import FAMILIES, LLAMA3, random_weights, write_pretrained

CHECKPOINT = Path("checkpoints/step_00000000")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_round_trip(source: Path, exported: Path) -> None:
    expected, found = all_tensors(source), all_tensors(exported)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (source / name).read_bytes(), name


@torch.no_grad()
def own_rounding(source: Path) -> float:
    """Return the relative difference between transformers' logits in float32 and in float64."""
    tokens = sample(load_tokenizer("bytes"))
    single, double = (
        AutoModelForCausalLM.from_pretrained(source, dtype=dtype)(tokens).logits.double()
        for dtype in (torch.float32, torch.float64)
    )
    return logit_difference(single, double).relative


DTYPES = {
    "llama 2": torch.float16,
    "llama 3.2": torch.bfloat16,
    "qwen3": torch.bfloat16,
    "diffllama": torch.bfloat16,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_round_trips_unchanged(family: str, tmp_path: Path) -> None:
    dtype = DTYPES.get(family, torch.float32)
    source = write_pretrained(tmp_path / "hf", family, dtype)
    difference = import_model(source, tmp_path / "run")
    assert difference is not None
    # For a model that subtracts two maps, transformers' own logits in float32 and float64 differ
    # by 1.2e-6.
    assert difference.relative < max(1e-6, 2 * own_rounding(source))
    export_checkpoint(tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert_round_trip(source, tmp_path / "out")
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


@pytest.mark.parametrize("family", ["mistral, windows", "qwen2, windows", "qwen3, windows"])
def test_an_export_has_the_windows_of_the_recipe(family: str, tmp_path: Path) -> None:
    """Check the export of a run that started from a model with windows and has others or none."""
    import_model(write_pretrained(tmp_path / "hf", family), tmp_path / "run", verify=False)
    recipe = load_recipe(tmp_path / "run/recipe.yaml")
    attention, layers = recipe.model.attention, recipe.model.num_layers
    expected = [9] * 2 if "mistral" in family else [None] + [9] * (layers - 1)
    assert [attention.of_layer(layer).window for layer in range(layers)] == expected
    assert attention.title == "Transformer"
    original = find_original(recipe)
    assert original is not None
    for window in (None, 5):
        kind = attention.kinds[0].model_copy(update={"window": window})
        changed = attention.model_copy(update={"kinds": (kind,), "layers": (None,)})
        model = recipe.model.model_copy(update={"attention": changed})
        out = tmp_path / f"out {window}"
        out.mkdir()
        original.write_config(recipe.model_copy(update={"model": model}), out)
        cache = DynamicCache(config=AutoConfig.from_pretrained(out))
        assert [each.is_sliding for each in cache.layers] == [window is not None] * layers
        assert {getattr(each, "sliding_window", None) for each in cache.layers} == {window}


def test_dex_over_windows_is_exported_with_them(tmp_path: Path) -> None:
    import_model(write_pretrained(tmp_path / "hf", "mistral, windows"), tmp_path / "run")
    dex = "{kind: dex, num_heads: 6, num_kv_heads: 2, window: 9, selected_heads: [[0], [1, 5]], "
    dex += "annealing_steps: null}"
    before = load_recipe(tmp_path / "run/recipe.yaml")
    recipe = load_recipe(tmp_path / "run/recipe.yaml", [f"model.attention={dex}"])
    check_can_start_from(before, "before", recipe, "now")
    weights = random_weights(recipe.model)
    checkpoint = write_checkpoint(weights.items(), recipe, tmp_path / "dex")
    verified = export_checkpoint(checkpoint, tmp_path / "out")
    assert verified is not None and verified.relative < 1e-5
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 9)


def test_shards_and_a_padded_vocabulary_round_trip(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "qwen2.5", shard_size="30KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    difference = import_model(source, tmp_path / "run", vocab_multiple=100)
    assert difference is not None
    assert difference.relative < 1e-6
    checkpoint = open_checkpoint(tmp_path / "run" / CHECKPOINT)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = checkpoint.tensors.read_tensor("weight", name)
        assert len(rows) == 300
        assert not rows[264:].any()
    export_checkpoint(tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert_round_trip(source, tmp_path / "out")


def test_mixed_dtypes_round_trip_and_lambda_is_not_rounded(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "diffllama", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    exact = "model.layers.1.self_attn.lambda_k2"
    tensors[exact] = torch.rand(8)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    import_model(source, tmp_path / "run")
    export_checkpoint(tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert_round_trip(source, tmp_path / "out")


def test_an_imported_recipe_gets_its_precision_from_the_models_dtype(tmp_path: Path) -> None:
    for dtype, precision in ((torch.bfloat16, "bf16"), (torch.float16, "fp32")):
        source = write_pretrained(tmp_path / precision, "smollm2", dtype)
        import_model(source, tmp_path / f"run {precision}", verify=False)
        recipe = load_resolved(tmp_path / f"run {precision}" / "recipe.yaml")
        assert recipe.training.precision == precision
        assert (recipe.training.seq_length, recipe.model.attention.num_heads) == (64, 9)


def test_old_configurations_and_copies_of_tied_weights_are_imported(tmp_path: Path) -> None:
    """Check that a model in an old format is imported if its copies of tied weights are equal.

    The configuration has rope_theta beside a rope_scaling with the key "type". The weights include
    both copies of the tied weights, and rotary frequencies.
    """
    source = write_pretrained(tmp_path / "hf", "llama 3.2")
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    difference = import_model(source, tmp_path / "run")
    assert difference is not None
    assert difference.relative < 1e-6
    tensors["lm_head.weight"] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"different lm_head\.weight .*tie_word_embeddings"):
        import_model(source, tmp_path / "again")


def test_a_misread_configuration_is_detected_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 3.2")
    right = configuration.model_section
    for key, value in (("rope_scaling", None), ("norm_eps", 0.5), ("rope_theta", 60.0)):
        monkeypatch.setattr(
            importing, "model_section", lambda *a, k=key, v=value: right(*a) | {k: v}
        )
        with pytest.raises(UserError, match="logits differ from those of transformers"):
            import_model(source, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)


def a_missing_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    write_pretrained(folder, "llama 2", shard_size="30KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()


def an_index_out_of_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, **{name: value})


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def rope(kind: str, **values: object) -> Callable[[Path], None]:
    described = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | values
    return config(rope_parameters=described)


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (only_a_pickle, r"pytorch_model\.bin, a pickle"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors"),
    "cut short": (cut_short, r"model\.safetensors is not a complete safetensors file"),
    "missing shard": (a_missing_shard, r"cannot read .*model-00002-of-"),
    "index": (an_index_out_of_the_folder, r"weight_map must have .* not '\.\./x\.safetensors'"),
    "shape": (tensor(Q, torch.ones(48, 40)), rf"{Q} with shape \[48, 40\].*\[48, 48\]"),
    "dtype": (tensor(Q, torch.ones(48, 48).double()), f"has {Q} in F64; only F16"),
    "missing tensor": (tensor(NORM, None), f"no tensor {NORM}, which its config.json requires"),
    "unknown tensor": (tensor("x.y", torch.ones(1)), "has x.y, which is not a tensor of the model"),
    "not finite": (tensor(NORM, torch.full((48,), torch.nan)), "not finite"),
    "other config": (config(num_hidden_layers=3), r"no tensor model\.layers\.2\."),
    "tied config": (config(tie_word_embeddings=True), r"different lm_head\.weight"),
    "tokenizer": (config(vocab_size=200), "uses 257 ids, and config.json has vocab_size 200"),
    "family": (config(model_type="gpt2"), "model_type 'gpt2', which has no equivalent"),
    "bias": (config(attention_bias=True), "attention_bias True, which has no equivalent"),
    "mlp": (config(mlp_bias=True), "mlp_bias True, which has no equivalent"),
    "act": (config(hidden_act="gelu"), "hidden_act 'gelu', which has no equivalent"),
    "dropout": (config(attention_dropout=0.1), "attention_dropout 0.1, which has no"),
    "quantised": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantization_config .* which has no equivalent",
    ),
    "dynamic": (rope("dynamic"), r"rope_parameters\.rope_type 'dynamic', which has no"),
    "partial": (rope("default", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "window of llama": (config(sliding_window=32), "sliding_window 32, which has no equivalent"),
    "no window": (
        config(model_type="qwen2", layer_types=["full_attention", "sliding_attention"]),
        "sliding_window None; give a number",
    ),
    "chunks": (
        config(model_type="qwen3", layer_types=["full_attention", "chunked_attention"]),
        r"layer_types \['chunked_attention', 'full_attention'\], which has no equivalent",
    ),
    "layers of mistral": (
        config(model_type="mistral", layer_types=["full_attention", "sliding_attention"]),
        "layer_types .*, which has no equivalent",
    ),
    "not causal": (config(is_causal=False), "is_causal False, which has no equivalent"),
    "two halves": (config(is_encoder_decoder=True), "is_encoder_decoder True, which has no"),
    "nested": (
        config(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        r"rope_parameters\.full_attention .* which has no equivalent",
    ),
    "text": (
        rope("default", rope_theta="10000"),
        "rope_theta '10000', a text; give a number",
    ),
    "text of a factor": (rope("linear", factor="2"), "factor '2', a text; give a number"),
    "two lengths": (
        config(rope_parameters=LLAMA3, original_max_position_embeddings=16),
        "original_max_position_embeddings 16, but in rope_parameters it is 32",
    ),
    "two thetas": (config(rope_theta=500.0), "rope_theta 500.0, but in rope_parameters"),
    "own code": (
        config(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
        "auto_map .*modeling_mine.*, code that is not run here",
    ),
    "own code of the tokenizer": (
        lambda f: edit_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.X", None]}),
        r"tokenizer_config\.json has auto_map .*x\.X.*, code that is not run here",
    ),
    "adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        r"has an adapter_config\.json beside its config\.json",
    ),
    "kernel": (
        config(attn_implementation="/tmp/kernel"),
        "attn_implementation '/tmp/kernel', whose code would be downloaded",
    ),
    "kernel of the hub": (
        config(_attn_implementation="kernels-community/flash-attn"),
        "attn_implementation 'kernels-community/flash-attn', whose code",
    ),
    "no tensors": (
        lambda f: save_file({}, f / "model.safetensors"),
        r"model\.safetensors contains no tensor",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"cannot read .*config\.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"cannot read .*tokenizer\.json"),
    "no factor": (rope("linear", factor=None), r"model\.rope_scaling\.factor is None"),
    "no heads": (
        config(model_type="qwen2", num_attention_heads=0),
        "num_attention_heads 0; give a number",
    ),
    "many layers": (
        config(num_hidden_layers=10**12),
        "num_hidden_layers 1000000000000; give a number",
    ),
    "heads": (config(num_key_value_heads=4), "num_kv_heads 4 does not divide num_heads 6"),
}


@pytest.mark.parametrize("kind", BAD)
def test_models_that_cannot_be_imported_are_one_line_errors(kind: str, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 2")
    spoil, message = BAD[kind]
    spoil(source)
    with pytest.raises(UserError, match=message) as caught:
        import_model(source, tmp_path / "run", verify=False)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_an_unavailable_attention_function_in_config_json_is_ignored(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 2")
    edit_json(source / "config.json", attn_implementation="flash_attention_2")
    difference = import_model(source, tmp_path / "run")
    assert difference is not None
    assert difference.relative < 1e-6


def test_a_model_that_transformers_cannot_load_is_an_error(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 2")
    edit_json(source / "config.json", pad_token_id=10**6)
    with pytest.raises(UserError, match="hf does not load as a model: Padding_idx must be within"):
        import_model(source, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        import_model(source, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_moved_import_is_exported_and_trained(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 2")
    import_model(source, tmp_path / "run", verify=False)
    start = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", start)
    # A recipe of a run that began before the move, and one that extends the moved recipe.
    before = load_recipe(tmp_path / "run/recipe.yaml", ["run_dir=old"])
    (tmp_path / "run").rename(tmp_path / "moved")
    for place in (start, tmp_path / "moved"):
        recipe = load_recipe(place / "recipe.yaml", ["run_dir=new"])
        assert recipe.data.tokenizer == str(place / "hugging_face")
        opened = open_checkpoint(place / CHECKPOINT)
        assert opened.recipe.data.tokenizer == recipe.data.tokenizer
        check_can_start_from(opened.recipe, "it", recipe, "the recipe")
        check_same_run(place, before.model_copy(update={"data": opened.recipe.data}), recipe)
    one, other = (load_recipe(each / "recipe.yaml") for each in (start, tmp_path / "moved"))
    check_can_start_from(one, "the copy", other, "the recipe")
    export_checkpoint(start / CHECKPOINT, tmp_path / "exported", verify=False)
    assert_round_trip(source, tmp_path / "exported")
    with (start / "hugging_face/tokenizer_config.json").open("a") as stream:
        stream.write(" ")
    with pytest.raises(UserError, match=r"has data.tokenizer '.*copy/hugging_face' and"):
        check_can_start_from(one, "the copy", other, "the recipe")


def test_changes_of_the_recipe_change_the_exported_configuration(tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "hf", "llama 3.2")
    import_model(source, tmp_path / "run", verify=False)
    recipe = load_resolved(tmp_path / "run/recipe.yaml")
    original = AutoConfig.from_pretrained(source)
    assert configuration.changed_keys(original, recipe) == {}
    model = recipe.model.model_copy(update={"rope_theta": 90.0})
    longer = recipe.training.model_copy(update={"seq_length": 128})
    changed = recipe.model_copy(update={"model": model, "training": longer})
    assert configuration.changed_keys(original, changed) == {
        "rope_parameters": LLAMA3 | {"rope_theta": 90.0},
        "max_position_embeddings": 128,
    }


@pytest.mark.skipif(
    "DIFFMEGATRON_SMOLLM2" not in os.environ,
    reason="DIFFMEGATRON_SMOLLM2 does not name a folder of SmolLM2-135M-Instruct",
)
def test_smollm2_round_trips_unchanged(tmp_path: Path) -> None:
    source = Path(os.environ["DIFFMEGATRON_SMOLLM2"])
    difference = import_model(source, tmp_path / "run")
    assert difference is not None
    assert difference.relative < 1e-5
    exported = export_checkpoint(tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert exported is not None
    assert exported.relative < 1e-5
    assert_round_trip(source, tmp_path / "out")


def test_logits_of_the_training_network_equal_those_of_transformers(tmp_path: Path) -> None:
    """Check that the logits of random tokens differ by at most 1e-6 of the largest logit."""
    source = write_pretrained(tmp_path / "hf", "qwen3", torch.bfloat16)
    import_model(source, tmp_path / "run", verify=False)
    tokens = torch.randint(0, 264, (2, 60), generator=torch.Generator().manual_seed(1))
    found = training_logits(open_checkpoint(tmp_path / "run" / CHECKPOINT), tokens)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


# Each control run of docs/pretrained.md has a pattern for names of imported tensors that the run
# trains. The run ``low_rank`` trains only its new LoRA matrices, so its pattern matches no name.
CONTROLS = {
    "without_term": r"linear_(qkv|proj)\.weight",
    "full": "",
    "low_rank": "^$",
}


def test_the_commands_of_the_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the commands of docs/pretrained.md train the expected tensors of a tiny model."""
    text = (DOCS / "pretrained.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    write_pretrained(Path("models/smollm2"), "smollm2")
    for name, recipe in re.findall(r"`(\w+\.yaml)`\n\n```yaml\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(recipe)
    Path("texts").mkdir()
    for number in range(20):
        Path(f"texts/{number}.txt").write_text("What was learned is learned again. " * 20)
    short = ["training.seq_length=32"]
    sizes = ["global_batch_size=2", "steps=2", "eval_batches=0"]
    small = [*short, *(f"training.{size}" for size in sizes)]
    small += ["optimizer.schedule.warmup_steps=1", "data.validation_fraction=0.1"]
    added = {"plan": small, "train": small, "dex": short}
    names = []
    for command in commands:
        program, name, *arguments = shlex.split(command, comments=True)
        if program == "hf":  # The download of the model that write_pretrained() replaces.
            continue
        arguments = [each.replace("step_00001000", "step_00000002") for each in arguments]
        app([name, *arguments, *added.get(name, [])], standalone_mode=False)
        names.append(name)
    again = ["plan", "train", "export"]
    controls = ["train"] * 3
    assert names == ["import", "prepare", *again, "dex", *again, *controls, *again]
    before = all_tensors(Path("models/smollm2"))
    query = "model.layers.0.self_attn.q_proj.weight"
    for out, is_trained in (("continued_hf", True), ("dex_hf", False), ("lora_hf", True)):
        config = Path(f"runs/{out}/config.json").read_bytes()
        assert config == Path("models/smollm2/config.json").read_bytes()
        after = all_tensors(Path(f"runs/{out}"))
        assert after.keys() == before.keys()
        assert torch.equal(after[query], before[query]) != is_trained, out
        output = "model.layers.0.self_attn.o_proj.weight"
        assert not torch.equal(after[output], before[output]), out
    # Each control run must have changed exactly the imported tensors that it trains.
    imported = open_checkpoint(Path("runs/smollm2") / CHECKPOINT).tensors
    for run, trained in CONTROLS.items():
        after = open_checkpoint(Path(f"runs/{run}/checkpoints/step_00000002")).tensors
        changed = {
            name
            for name in imported.names()
            if not torch.equal(
                after.read_tensor("weight", name), imported.read_tensor("weight", name)
            )
        }
        assert changed == {name for name in imported.names() if re.search(trained, name)}, run
        added = {name.rpartition(".")[2] for name in {*after.names()} - {*imported.names()}}
        assert added == ({"lora_a", "lora_b"} if run == "low_rank" else set())
    after, rows = (
        tensors.read_tensor(
            "weight", "decoder.layers.1.self_attention.linear_qkv.weight"
        ).unflatten(0, (3, 5, 8))
        for tensors in (
            open_checkpoint(Path("runs/without_term/checkpoints/step_00000002")).tensors,
            imported,
        )
    )
    # The five blocks of rows of a key-value head are three queries, a key and a value. The run
    # ``without_term`` trains only keys and values, not queries.
    assert torch.equal(after[:, :3], rows[:, :3])
    assert not torch.equal(after[:, 3], rows[:, 3])
    assert not torch.equal(after[:, 4], rows[:, 4])
