"""Tests that training from imported weights begins with transformers' loss, on every layout."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.import_model import import_model
from diffmegatron.hf.weight_mapping import from_hf
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.batches import open_loader
from diffmegatron.training.trainer import train
from tests.parallel.matrix import gradient_difference, launch, series
from tests.pretrained import LLAMA3, TIED, write_pretrained

STEPS = 2
RECIPE = """
extends: {imported}/recipe.yaml
run_dir: {folder}/one
data: {{sources: [{{path: {corpus}}}], validation_fraction: 0.2}}
training:
  seq_length: 48
  global_batch_size: 4
  micro_batch_size: 2
  steps: 2
  precision: fp32
  log_interval: 1
  eval_batches: 0
optimizer: {{lr: 1.0e-3, clip_grad_norm: 1.0e+9, weight_decay: 0.01}}
checkpoint: {{start_from: {imported}, interval: 1}}
"""
# A model with three key-value heads and 260 token ids; the import pads the vocabulary to 264 rows,
# a multiple of 12.
THREE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 260}
MODELS = {
    "biases": ("qwen2", THREE | TIED | {"intermediate_size": 48}),
    "norms": ("qwen3", {"rope_parameters": LLAMA3, "num_hidden_layers": 4}),
}
SMALL = ("training.micro_batch_size=1",)
LAYOUTS = {
    "biases:TP3": (3, ("parallel.tensor=3",)),
    "biases:PP2": (2, ("parallel.pipeline=2",)),
    "biases:CP2": (2, ("parallel.context=2",)),
    "biases:DP2 ZeRO 1": (2, ("training.loss_chunk=20", *SMALL)),
    "biases:DP2 ZeRO 3": (2, ("parallel.zero_stage=3", *SMALL)),
    "norms:TP2 + SP": (2, ("parallel.tensor=2", "parallel.sequence_parallel=true")),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def models(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder per model: Hugging Face files, an import, a recipe and a run of one process.

    Return the parent of these folders.
    """
    out = tmp_path_factory.mktemp("pretrained")
    for name, (family, changes) in MODELS.items():
        folder = out / name
        folder.mkdir()
        write_pretrained(folder / "hf", family, **changes)
        import_model(folder / "hf", folder / "imported", vocab_multiple=12)
        # Both models have the same tokenizer, so one corpus is enough.
        prefix = out / "words"
        if name == next(iter(MODELS)):
            tokenizer = str(folder / "imported/hugging_face")
            prepare([corpus.parent], prefix, tokenizer, pattern="*.jsonl", show_progress=False)
        text = RECIPE.format(imported=folder / "imported", folder=folder, corpus=prefix)
        (folder / "recipe.yaml").write_text(text)
        train(load_recipe(folder / "recipe.yaml"))
    return out


@pytest.fixture(scope="module")
def run(models: Path) -> Callable[[str], Path]:
    """Return a function from the name of a layout to the folder of its finished run.

    The first call for a number of ranks trains all layouts with this number in one launch.
    """

    @cache
    def launched(ranks: int) -> None:
        calls = []
        for name, (needed, overrides) in LAYOUTS.items():
            if needed == ranks:
                recipe = models / name.partition(":")[0] / "recipe.yaml"
                calls.append([str(recipe), f"run_dir={models / name}", *overrides])
        launch(ranks, "tests.parallel.pretrained_worker", *calls)

    def folder(name: str) -> Path:
        launched(LAYOUTS[name][0])
        return models / name

    return folder


def first_step(recipe: Recipe) -> list:
    """Return the microbatches of the first step."""
    with (
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        open_loader(recipe, parallel_state, "train") as loader,
    ):
        return next(loader)


@pytest.mark.parametrize("model", MODELS)
def test_the_first_loss_and_gradient_are_those_of_transformers(model, models):
    folder = models / model
    recipe = load_recipe(folder / "recipe.yaml")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    losses = [
        torch.nn.functional.cross_entropy(
            theirs(batch.tokens).logits.flatten(0, 1), batch.labels.flatten()
        )
        for batch in first_step(recipe)
    ]
    assert len(losses) == 2
    expected = torch.stack(losses).mean()
    assert series(folder / "one", "train/loss")[0] == pytest.approx(expected.item(), rel=1e-6)

    expected.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    saved = open_checkpoint(folder / "one/checkpoints/step_00000001").tensors
    off = whole = torch.zeros(())
    for name, gradient in from_hf(gradients, recipe.model):
        # Adam's first moment after one step is a tenth of the gradient.
        difference = 10 * saved.read_tensor("exp_avg", name) - gradient
        off, whole = off + difference.square().sum(), whole + gradient.square().sum()
    assert (off / whole).sqrt() < 1e-5


@each_layout
def test_every_layout_has_the_same_losses_and_gradients(layout, run, models):
    expected = series(models / layout.partition(":")[0] / "one", "train/loss")
    assert len(expected) == STEPS
    assert series(run(layout), "train/loss") == pytest.approx(expected, rel=1e-5)
    of_all, of_one = gradient_difference(run(layout), models / layout.partition(":")[0] / "one")
    assert of_all < 1e-5
    assert of_one < 1e-3


@pytest.mark.parametrize("layout", ["biases:TP3", "norms:TP2 + SP"])
def test_a_trained_model_exports_with_its_original_config(layout, run, models, tmp_path):
    newest = run(layout) / "checkpoints" / f"step_{STEPS:08d}"
    difference = export_checkpoint(newest, tmp_path / "hf")
    assert difference.relative < 1e-5
    source = models / layout.partition(":")[0] / "hf"
    assert (tmp_path / "hf/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_padding_rows_of_the_vocabulary_stay_zero(run):
    rows = open_checkpoint(run("biases:TP3") / "checkpoints/step_00000002").tensors.read_tensor(
        "weight", "embedding.word_embeddings.weight"
    )
    assert rows.shape == (264, 72)
    assert not rows[260:].any()
    assert rows[:257].any(1).all()


def test_two_tensor_ranks_cannot_share_three_key_value_heads(models):
    with pytest.raises(UserError, match=r"num_kv_heads 3 .* is 1 of \[1, 3\]"):
        load_recipe(models / "biases/recipe.yaml", ["parallel.tensor=2"])


def test_resuming_without_optimizer_state_is_refused(models):
    imported = models / "biases/imported"
    recipe = load_recipe(models / "biases/recipe.yaml", [f"run_dir={imported}"])
    with pytest.raises(UserError, match=r"no optimizer state.*checkpoint\.start_from"):
        train(recipe)
    state = json.loads((imported / "checkpoints/step_00000000/state.json").read_text())
    assert (state["contents"], state["step"]) == ("weights", 0)
