"""Tests that the head scores of ``dex select`` equal scores computed with transformers.

DEX changes only some heads of a pretrained model. ``dex select`` selects these heads by their
scores, which must be the same on every layout.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.cli import app
from diffmegatron.config.load import load_recipe
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.dex.select_heads import METHODS, select_heads, select_layer_heads
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.ranks import launch

SOFTMAX = "model.attention={kind: softmax, num_heads: 8, num_kv_heads: 4}"
TENSOR = ("parallel.tensor=2", "parallel.sequence_parallel=true")
LAYOUTS = [
    ("tensor", "entropy", TENSOR),
    ("tensor", "gradient", TENSOR),
    ("pipeline", "gradient", ("parallel.pipeline=2",)),
    ("data", "entropy", ()),
    ("data", "gradient", ()),
    ("context", "entropy", ("parallel.context=2", "training.micro_batch_size=2")),
    ("context", "gradient", ("parallel.context=2", "parallel.context_communication=all_gather")),
    ("documents", "entropy", ("parallel.context=2", "data.reset_attention_mask=true")),
]
HEADS, LENGTH, SEQUENCES = 8, 64, 6


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model until its softmax attention is not uniform, and return its run_dir."""
    folder = tmp_path_factory.mktemp("dex")
    (folder / "tiny.yaml").write_text(TINY.format(run_dir=folder / "run", corpus=corpus))
    train(load_recipe(folder / "tiny.yaml", [SOFTMAX]))
    return folder / "run"


@pytest.fixture(scope="module")
def selected(run: Path, corpus: Path) -> dict[str, dict]:
    """Return, for each method, the heads that one process selects and the scores of all heads."""
    found = {}
    for method in METHODS:
        out = run.parent / f"one_{method}.yaml"
        select_heads(run, corpus, out, [], method=method, share=0.5, sequences=SEQUENCES)
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        found[method] = read(out)
    return found


def read(out: Path) -> dict:
    described = json.loads(out.with_suffix(".scores.json").read_text())
    heads = yaml.safe_load(out.read_text())
    assert heads == {key: described[key] for key in heads}
    return described


def calibration_tokens(run: Path, corpus: Path) -> torch.Tensor:
    """Return the token ids of the first training sequences [SEQUENCES, LENGTH + 1]."""
    data = load_recipe(run / "recipe.yaml", ["data.validation_fraction=0"]).data
    samples = open_samples(data, LENGTH, 1234, "train")
    return torch.stack([torch.as_tensor(samples[n].tokens) for n in range(SEQUENCES)]).long()


@pytest.fixture(scope="module")
def llama(run: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("llama") / "hf"
    export_checkpoint(CheckpointStore(run).latest(), out)
    return AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")


def test_entropy_scores_equal_the_entropy_of_the_attention_maps(selected, llama, run, corpus):
    tokens = calibration_tokens(run, corpus)[:, :-1]
    with torch.no_grad():
        maps = llama(tokens, output_attentions=True).attentions
    expected = [torch.special.entr(each.double()).sum(-1).mean((0, 2)).tolist() for each in maps]
    for mine, theirs in zip(selected["entropy"]["scores"], expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for heads, scores in zip(selected["entropy"]["heads"], expected, strict=True):
        assert (
            sorted(heads, key=lambda head: -scores[head])
            == sorted(range(HEADS), key=lambda head: -scores[head])[:4]
        )


def test_importance_is_the_gradient_of_a_factor_on_the_head(selected, llama, run, corpus):
    tokens = calibration_tokens(run, corpus)
    totals = torch.zeros(2, HEADS)
    for row in tokens:
        factors = [torch.ones(HEADS, requires_grad=True) for _ in range(2)]
        handles = [
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args, xi=xi: (args[0] * xi.repeat_interleave(args[0].shape[-1] // HEADS),)
            )
            for layer, xi in zip(llama.model.layers, factors, strict=True)
        ]
        logits = llama(row[None, :-1]).logits
        torch.nn.functional.cross_entropy(logits[0], row[1:]).backward()
        totals += torch.stack([xi.grad.abs() for xi in factors])
        for handle in handles:
            handle.remove()
    expected = (totals / len(tokens)).tolist()
    for mine, theirs in zip(selected["gradient"]["scores"], expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-7)
    for heads, scores in zip(selected["gradient"]["heads"], expected, strict=True):
        assert (
            sorted(heads, key=lambda head: scores[head])
            == sorted(range(HEADS), key=lambda head: scores[head])[:4]
        )


def test_every_layout_selects_the_same(selected, run, corpus, tmp_path):
    calls = (
        [str(run), str(corpus), f"{tmp_path}/{name}_{method}.yaml", method, *overrides]
        for name, method, overrides in LAYOUTS
    )
    launch(2, "tests.parallel.dex_worker", *calls)
    within = ["data.reset_attention_mask=true"]
    alone = tmp_path / "alone.yaml"
    select_heads(run, corpus, alone, within, method="entropy", share=0.5, sequences=SEQUENCES)
    for name, method, _ in LAYOUTS:
        found = read(tmp_path / f"{name}_{method}.yaml")
        expected = read(alone) if name == "documents" else selected[method]
        assert found["heads"] == expected["heads"], (name, method)
        assert found["model"] == expected["model"]
        for mine, theirs in zip(found["scores"], expected["scores"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-8), (name, method)


def test_a_run_reads_the_selected_heads(selected, run, corpus):
    heads = run.parent / "one_entropy.yaml"
    start = (f"run_dir={run.parent}/dex", f"checkpoint.start_from={run}")
    dex = f"model.attention={{kind: dex, selected_heads: {heads}, annealing_steps: 2}}"
    recipe = load_recipe(
        run.parent / "tiny.yaml",
        [SOFTMAX, dex, *start, "training.steps=3"],
    )
    (kind,) = recipe.model.attention.kinds
    assert [*map(list, kind.selected_heads)] == selected["entropy"]["heads"]
    assert recipe.model.attention.foundation.fingerprint == open_fingerprint(run)
    train(recipe)


def open_fingerprint(run: Path) -> str:
    return open_checkpoint(CheckpointStore(run).latest()).fingerprint()


def test_the_first_of_equally_scored_heads_are_selected():
    assert select_layer_heads([1.0, 2.0, 2.0, 1.0], 0.5, highest=True) == (1, 2)
    assert select_layer_heads([1.0, 1.0, 1.0], 0.5, highest=False) == (0, 1)
    assert select_layer_heads([3.0, 1.0, 2.0], 0.01, highest=True) == (0,)
    assert select_layer_heads([3.0, 1.0, 2.0], 1.0, highest=True) == (0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "{folder}/one_entropy.yaml"], "exists already; give another --out"),
        (["parallel.tensor=3"], "parallel.tensor"),
        (["training.seq_lengh=2"], "did you mean 'seq_length'"),
        (["--data", "{folder}/nothing"], "nothing"),
    ],
)
def test_an_invalid_selection_is_an_error_and_writes_no_file(arguments, said, run, corpus):
    folder = str(run.parent)
    given = [each.format(folder=folder) for each in arguments]
    defaults = ["--data", str(corpus), "--out", f"{folder}/other.yaml"]
    before = sorted(run.parent.iterdir())
    result = CliRunner().invoke(app, ["dex", "select", str(run), *defaults, *given])
    assert isinstance(result.exception, UserError), result.output
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert sorted(run.parent.iterdir()) == before


def test_selecting_from_a_missing_model_is_an_error(tmp_path, corpus):
    with pytest.raises(UserError, match="nowhere"):
        select_heads(
            tmp_path / "nowhere", corpus, tmp_path / "o.yaml", [], method="entropy",
            share=0.5, sequences=2,
        )  # fmt: skip
