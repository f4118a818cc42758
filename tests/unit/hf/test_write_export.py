"""Tests of the exported directory: its logits in plain transformers, and its files."""

import json
import math
import multiprocessing
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf import tokenizer as hf_tokenizer
from diffmegatron.hf.atomic_directory import atomic_directory
from diffmegatron.hf.export_checkpoint import serving_form
from diffmegatron.hf.import_model import import_model
from diffmegatron.hf.kinds import HuggingFace, export_problem
from diffmegatron.hf.kinds.softmax import SoftmaxExport
from diffmegatron.hf.tokenizer import convert
from diffmegatron.hf.weight_mapping import to_hf
from diffmegatron.hf.write_export import (
    Verified,
    loading_code,
    logit_difference,
    verify_export,
    write_export,
)
from tests.pretrained import random_weights
from tests.unit.hf.test_weight_mapping import (
    DIFF,
    END,
    FREE_HEAD_DIM,
    GQA,
    MHA,
    SOFTMAX,
    TIED,
    make_recipe,
    make_tokens,
    make_weights,
    paper_logits,
)


def export(
    recipe: Recipe, out: Path, dtype: torch.dtype = torch.float32, **options: object
) -> Path:
    weights = make_weights(recipe.model)
    write_export(weights, recipe, load_tokenizer("bytes"), out, dtype, **options)
    return out


@pytest.mark.parametrize("sizes", [MHA, GQA, GQA | TIED, FREE_HEAD_DIM], ids=str)
def test_diffllama_computes_the_papers_equations(
    sizes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffmegatron.hf.write_export.MAX_SHARD_BYTES", 30_000)
    recipe = make_recipe(**DIFF, **sizes)
    expected = paper_logits(make_weights(recipe.model), recipe.model, make_tokens())
    out = export(recipe, tmp_path / "hf")
    assert json.loads((out / "config.json").read_text())["architectures"] == [
        "DiffLlamaForCausalLM"
    ]
    assert verify_export(out, make_tokens(), expected).relative < 1e-5


@pytest.mark.parametrize(
    "keys",
    [
        {"qk_norm": True},
        {"lambda_init": {"policy": "constant", "value": 0.7}},
        {"headwise_norm": False},
        {"window": 4},
    ],
    ids=str,
)
def test_v1_that_diffllama_cannot_compute_is_exported_as_grouped_and_imported_again(
    keys: dict[str, object], tmp_path: Path
) -> None:
    recipe = make_recipe(**DIFF, **GQA, **keys)
    weights = make_weights(recipe.model)
    expected = paper_logits(weights, recipe.model, make_tokens())
    out = export(recipe, tmp_path / "hf")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GroupedDiffForCausalLM"]
    assert verify_export(out, make_tokens(), expected).relative < 1e-5
    difference = import_model(out, tmp_path / "run")
    assert difference is not None
    assert difference.relative < 1e-5
    imported = open_checkpoint(tmp_path / "run/checkpoints/step_00000000")
    (kind,) = imported.recipe.model.attention.kinds
    own = recipe.model.attention.kinds[0].model_dump()
    assert kind.model_dump() == own | {"kind": "grouped", "signal_per_noise": 1}
    for name in imported.tensors.names():
        assert torch.equal(imported.tensors.read_tensor("weight", name), weights[name]), name


# These models have odd numbers of heads, which the baseline of DIFF V1 cannot have. ``NINE`` has
# the numbers of heads of SmolLM2-135M.
NINE = {"kind": "softmax", "num_heads": 9, "num_kv_heads": 3, "hidden_size": 72}
ODD = {"kind": "softmax", "num_heads": 5, "head_dim": 8}


@pytest.mark.parametrize(
    "sizes",
    [
        SOFTMAX | MHA,
        SOFTMAX | GQA | {"hidden_size": 96},
        SOFTMAX | GQA | TIED | {"window": 4},
        NINE,
        ODD,
    ],
    ids=str,
)
def test_llama_computes_the_transformer(sizes: dict[str, object], tmp_path: Path) -> None:
    recipe = make_recipe(**sizes)
    expected = paper_logits(make_weights(recipe.model), recipe.model, make_tokens())
    out = export(recipe, tmp_path / "hf")
    # Llama's configuration refuses a number of heads that does not divide the hidden size, so such
    # a model is exported as Mistral.
    window = sizes.get("window")
    kind = "Mistral" if sizes is ODD or window else "Llama"
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [f"{kind}ForCausalLM"]
    assert config.get("sliding_window") == window
    assert verify_export(out, make_tokens(), expected).relative < 1e-5


@pytest.mark.parametrize(
    "attention",
    [
        {"kind": "softmax", "num_kv_heads": 2},
        {"kind": "softmax", "head_dim": 10},
        {"kind": "dex", "selected_heads": [[0], [1, 5], []], "annealing_steps": None},
    ],
    ids=str,
)
def test_biases_without_a_pretrained_model_are_exported(
    attention: dict[str, object], tmp_path: Path
) -> None:
    recipe = make_recipe(**attention, qkv_bias=True)
    weights = random_weights(recipe.model)
    out = tmp_path / "hf"
    write_export(weights, recipe, load_tokenizer("bytes"), out, torch.float32)
    difference = import_model(out, tmp_path / "run")
    assert difference is not None
    assert difference.relative < 1e-5
    imported = open_checkpoint(tmp_path / "run/checkpoints/step_00000000").tensors
    for name in imported.names():
        # The imported output projection contains DEX's term, so it differs.
        if not (attention["kind"] == "dex" and "linear_proj" in name):
            assert torch.equal(imported.read_tensor("weight", name), weights[name]), name


def test_the_printed_comparison_states_the_tolerance_and_its_reason() -> None:
    assert str(Verified(9.3e-3, 1.2e-3, 5e-2, "weights are rounded to bf16")) == (
        "logits differ by at most 9.3e-03 (1.2e-03 relative, up to 5e-02 passes: weights are "
        "rounded to bf16)"
    )


def test_bf16_export_keeps_lambda_in_fp32_and_folds_before_it_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(**DIFF, **GQA)
    weights = make_weights(recipe.model)
    out = export(recipe, tmp_path / "hf", torch.bfloat16)
    stored = load_file(out / "model.safetensors")
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if "lambda" in name else torch.bfloat16), name
    attention = "decoder.layers.1.self_attention."
    norm = weights[attention + "head_norm"].repeat(6)
    folded = (weights[attention + "linear_proj.weight"] * norm).bfloat16()
    assert torch.equal(stored["model.layers.1.self_attn.o_proj.weight"], folded)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_configuration_and_token_ids_are_exported(tmp_path: Path) -> None:
    out = export(make_recipe(**DIFF, **GQA), tmp_path / "hf")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 700.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 4)
    assert (config["max_position_embeddings"], config["vocab_size"]) == (64, 264)
    assert (config["bos_token_id"], config["eos_token_id"]) == (END, END)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "the files differ in mode"
    generation = json.loads((out / "generation_config.json").read_text())
    assert {generation[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")} == {END}
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer("añ<|endoftext|>").input_ids == [*"añ".encode(), END]
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} == {END}


@pytest.mark.parametrize("kind", [DIFF, SOFTMAX], ids=["diff", "softmax"])
def test_generation_with_cache_equals_without(kind: dict[str, str], tmp_path: Path) -> None:
    out = export(make_recipe(**kind, **GQA), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    prompt, mask = make_tokens(6), torch.ones(2, 6, dtype=torch.long)
    texts = [
        model.generate(
            prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=cache
        )
        for cache in (True, False)
    ]
    assert texts[0].shape[1] > 10
    assert torch.equal(*texts)


def test_the_form_for_serving_has_the_logits_of_diffllama(tmp_path: Path) -> None:
    recipe, tokens = make_recipe(**DIFF, **GQA), make_tokens()
    logits = []
    for name, form in (("v1", recipe), ("serving", serving_form(recipe))):
        weights = make_weights(recipe.model)
        write_export(weights, form, load_tokenizer("bytes"), tmp_path / name, torch.float32)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=False)
        logits.append(model(tokens).logits)
        assert repr(str(tmp_path / name)) in (
            code := loading_code(tmp_path / name, str(tmp_path / name))
        )
        assert code.count("trust_remote_code=True") == 2 * (name == "serving")
    assert logit_difference(*logits).relative < 1e-5


def test_weights_stream_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffmegatron.hf.write_export.MAX_SHARD_BYTES", 50_000)
    recipe = make_recipe(**DIFF, **GQA, num_layers=6)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, weight in make_weights(recipe.model).items():
            copy = weight.clone()
            alive.append(weakref.ref(copy))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, copy

    tokenizer = load_tokenizer("bytes")
    out = tmp_path / "hf"
    write_export(stream(), recipe, tokenizer, out, torch.float32)
    # A weight is freed soon after it is written. A headwise norm is kept until the output
    # projection arrives, because the export multiplies the norm into this projection.
    assert most <= 4
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 3
    assert sorted(set(index["weight_map"].values())) == shards
    sizes = [sum(t.nbytes for t in load_file(out / shard).values()) for shard in shards]
    assert index["metadata"]["total_size"] == sum(sizes)
    largest = max(tensor.nbytes for _, tensor in to_hf(make_weights(recipe.model), recipe.model))
    assert max(sizes) <= max(50_000, largest)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"kind": "softmax", "headwise_norm": True}, "headwise_norm"),
        ({"kind": "softmax", "qkv_bias": True, "qk_norm": True}, "qk_norm"),
        ({"kind": "softmax", "qkv_bias": True, "output_gate": "headwise"}, "output_gate"),
        ({"kind": "softmax", "qkv_bias": True, "window": 4}, "started from a Qwen2 model"),
        (DIFF | {"vocab_size": 256}, "vocab_size"),
    ],
)
def test_unsupported_models_are_refused_before_writing(
    model: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        export(make_recipe(**model), tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_windows_that_transformers_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(*windows: int) -> str:
        kinds = [{"kind": "softmax", "num_heads": 4, "window": each} for each in windows]
        named = [kind | {"layers": layer} for layer, kind in enumerate(kinds, start=1)]
        return str(export_problem(LayerKinds.read(named), 48, len(windows)))

    assert "windows of 4 and 5 tokens" in problem(4, 5)
    assert "window 1 cannot be exported" in problem(1)
    # An own export may name a class that ignores the window.
    llama = HuggingFace("llama", "LlamaForCausalLM", {})
    monkeypatch.setattr(SoftmaxExport, "hugging_face", lambda _: llama)
    assert "model type 'llama'" in problem(4)


def test_existing_output_is_refused_unless_empty(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    export(make_recipe(**DIFF), out)
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(UserError, match="exists already"):
        export(make_recipe(**DIFF), out)
    assert sorted(path.name for path in out.iterdir()) == before
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(UserError, match="cannot create a directory"):
        export(make_recipe(**DIFF), out / "config.json" / "deeper")


def write_for_ever(out: Path, said: Connection) -> None:
    with atomic_directory(out) as partial:
        (partial / "model.safetensors").write_bytes(b"half")
        said.send(partial.name)
        time.sleep(600)


def test_leftovers_of_a_killed_export_are_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "a[b]"
    names = ("a.01234567", "a[b].0123456", "b.76543210")
    others = [tmp_path / f".{name}.partial" for name in names]
    for other in others:
        other.mkdir()
    context = multiprocessing.get_context("fork")
    heard, said = context.Pipe()
    running = context.Process(target=write_for_ever, args=(out, said), daemon=True)
    running.start()
    live = tmp_path / heard.recv()
    try:
        export(make_recipe(**DIFF), out)
        assert (live / "model.safetensors").exists(), "the directory of a running export is gone"
        shutil.rmtree(out)
    finally:
        running.kill()
        running.join()
    assert live.exists()
    export(make_recipe(**DIFF), out)
    assert sorted(tmp_path.iterdir()) == sorted([out, *others])


def test_an_impossible_output_path_is_an_error(tmp_path: Path) -> None:
    for name in ("n" * 250, "n" * 5000):
        with pytest.raises(UserError, match="cannot create a directory beside"):
            export(make_recipe(**DIFF), tmp_path / name)
    out = tmp_path / "hf"
    with pytest.raises(UserError, match="cannot rename the written directory to"):
        export(make_recipe(**DIFF), out, verify=lambda _: out.write_text("in the way"))
    assert list(tmp_path.iterdir()) == [out]


QKV_NAME = "decoder.layers.2.self_attention.linear_qkv.weight"
BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda w: w.pop(QKV_NAME), "1 weights are missing, the first is '.*linear_qkv"),
    "unknown": (
        lambda w: w.update({"decoder.layers.9.x": torch.ones(1)}),
        "is not part of this model",
    ),
    "shape": (lambda w: w.update({QKV_NAME: w[QKV_NAME][1:]}), r"shape \[143, 48\].*\[144, 48\]"),
}


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_weights_that_do_not_fit_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    recipe = make_recipe(**DIFF)
    weights = make_weights(recipe.model)
    spoil, message = BAD_WEIGHTS[kind]
    spoil(weights)
    with pytest.raises(UserError, match=message):
        write_export(weights, recipe, load_tokenizer("bytes"), tmp_path / "hf", torch.float32)
    assert not list(tmp_path.iterdir())


def test_failed_verification_leaves_nothing_behind(tmp_path: Path) -> None:
    recipe = make_recipe(**DIFF)
    expected = paper_logits(make_weights(recipe.model), recipe.model, make_tokens())

    def verify(directory: Path) -> None:
        assert verify_export(directory, make_tokens(), expected).relative < 1e-5
        assert verify_export(directory, make_tokens(), expected * 2).relative > 0.4
        raise UserError("logits differ")

    with pytest.raises(UserError, match="logits differ"):
        export(recipe, tmp_path / "hf", verify=verify)
    assert not list(tmp_path.iterdir())


def test_inexact_tokenizer_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = tiktoken.Encoding(
        "backwards",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([byte]): 255 - byte for byte in range(256)},
        special_tokens={"<|endoftext|>": END},
    )
    converted = convert(backwards)
    monkeypatch.setattr(hf_tokenizer, "convert", lambda encoding: converted)
    with pytest.raises(UserError, match="cannot be exported exactly"):
        export(make_recipe(**DIFF), tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_verification_sees_missing_weights_nan_and_long_input(tmp_path: Path) -> None:
    out = export(make_recipe(**DIFF), tmp_path / "hf")
    stored = load_file(out / "model.safetensors")
    del stored["model.layers.0.self_attn.lambda_q1"]
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"does not load.*lambda_q1"):
        verify_export(out, make_tokens(), torch.ones(2, 20, 264))
    with pytest.raises(ValueError, match="514 tokens to verify"):
        verify_export(out, make_tokens(257), torch.ones(2, 257, 264))
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    assert logit_difference(good, good + 2) == (2, 0.5)
    assert logit_difference(bad, good) == logit_difference(good, bad) == (math.inf, math.inf)
