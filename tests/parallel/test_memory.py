"""Tests that the peak memory predicted by ``plan`` is close to the peak of a training step."""

import json
from pathlib import Path

import pytest

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import memory
from diffmegatron.model.accounting.memory import StageMemory, memory_by_stage
from tests.ranks import launch

# Elements per gradient bucket. A bucket of 50 million elements, the default, would need much more
# memory than all other tensors of a small network, and would hide errors in their prediction.
BUCKET = 250_000
BF16 = {"precision": "bf16"}
# Four microbatches: two on each of two data-parallel ranks, or four for a pipeline of two stages.
FOUR = {"global_batch_size": 4}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
RING = {"context": 2, "context_communication": "ring"}
MUP = {"initialization": {"scheme": "mup", "base_hidden_size": 32}}
OFFLOAD = {"offload_optimizer": True}
V2 = {"kind": "diff_v2", "num_heads": 8}
GROUPED = {"kind": "grouped", "signal_per_noise": 2}

# Name of a layout -> (number of ranks, changes of the recipe's sections).
LAYOUTS: dict[str, tuple[int, dict]] = {
    "alone-fp32": (1, {}),
    "alone-softmax": (1, {"model": {"baseline": True}, "training": BF16}),
    "alone-v2": (1, {"attention": V2}),
    "alone-grouped": (1, {"attention": GROUPED}),
    "recompute-groups": (1, {"recompute": {"granularity": "full", "layers": 2}}),
    "recompute-block": (
        1,
        {"training": BF16, "recompute": {"granularity": "full", "method": "block", "layers": 2}},
    ),
    "loss-chunk": (1, {"training": BF16 | {"loss_chunk": 32, "z_loss": 1e-4}}),
    "sequence": (2, {"parallel": SEQUENCE, "training": BF16}),
    "zero1": (2, {"training": BF16 | FOUR}),
    "zero1-muon": (2, {"training": BF16 | FOUR, "optimizer": {"kind": "muon"}, "model": MUP}),
    "zero2": (2, {"parallel": {"zero_stage": 2}, "training": BF16 | FOUR}),
    "zero2-fp32": (2, {"parallel": {"zero_stage": 2}, "training": FOUR}),
    "zero2-muon-fp32": (
        2,
        {"parallel": {"zero_stage": 2}, "training": FOUR, "optimizer": {"kind": "muon"}},
    ),
    "zero3": (2, {"parallel": {"zero_stage": 3}, "training": BF16 | FOUR}),
    "zero1-offload": (2, {"parallel": OFFLOAD, "training": BF16 | FOUR}),
    "zero3-offload": (2, {"parallel": OFFLOAD | {"zero_stage": 3}, "training": BF16 | FOUR}),
    "pipeline": (2, {"parallel": {"pipeline": 2}, "training": BF16 | FOUR}),
    "pipeline-fp32": (2, {"parallel": {"pipeline": 2}, "training": FOUR, "model": MUP}),
    "interleaved": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "training": BF16 | FOUR},
    ),
    "ring": (2, {"parallel": RING, "training": BF16}),
    "all-gather": (
        2,
        {"parallel": {"context": 2, "context_communication": "all_gather"}, "training": BF16},
    ),
    "v2-sequence": (2, {"attention": V2, "parallel": SEQUENCE}),
    "v2-ring": (2, {"attention": V2, "parallel": RING}),
    "grouped-ring": (2, {"attention": GROUPED, "parallel": RING}),
    "ulysses": (
        2,
        {"parallel": {"context": 2, "context_communication": "ulysses"}, "training": BF16},
    ),
}


def make_recipe(name: str) -> Recipe:
    """Return a recipe whose activations, weights and logits need similar amounts of memory.

    An error in one of them is then visible in their total. The network is small, because a CPU
    without bf16 instructions multiplies bf16 up to a hundred times slower.
    """
    _, changes = LAYOUTS[name]
    model = {
        "num_layers": 4,
        "hidden_size": 128,
        "attention": {"kind": "diff_v1", "num_heads": 4} | changes.get("attention", {}),
        "ffn_hidden_size": 352,
        "vocab_size": 2048,
    }
    training = {"seq_length": 256, "global_batch_size": 2, "steps": 4, "precision": "fp32"}
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": model | changes.get("model", {}),
            "data": {"sources": [{"path": "unused"}]},
            "training": training | changes.get("training", {}),
            "optimizer": {"lr": 1e-3} | changes.get("optimizer", {}),
            "parallel": changes.get("parallel", {}),
            "recompute": changes.get("recompute", {}),
        }
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the measurements of every rank of every layout."""
    out = tmp_path_factory.mktemp("memory")
    for ranks in (1, 2):
        names = [name for name, (size, _) in LAYOUTS.items() if size == ranks]
        launch(ranks, "tests.parallel.memory_worker", *([str(out), name] for name in names))
    return out


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch):
    """Return a function that predicts the memory of a rank, as ``plan`` does."""
    monkeypatch.setattr(memory, "REDUCE_BUCKET", BUCKET)

    def count(name: str, rank: int) -> StageMemory:
        recipe, (ranks, _) = make_recipe(name), LAYOUTS[name]
        # With two ranks and two pipeline stages, the rank is the number of its stage.
        stage = rank if recipe.parallel.pipeline > 1 else 0
        return memory_by_stage(recipe, ranks, "cpu")[stage]

    return count


RANKS = [(name, rank) for name, (ranks, _) in LAYOUTS.items() for rank in range(ranks)]


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_plan_predicts_the_peak_memory(name, rank, measured, counted):
    values, stage = read(measured, name, rank), counted(name, rank)
    peak = max(values["backward"], values["update"])
    # On a CPU, offloaded tensors are in the same memory, so the measured peak includes them.
    assert stage.total + stage.host == pytest.approx(peak, rel=0.07)


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_plan_predicts_the_memory_of_activations_and_logits(name, rank, measured, counted):
    """Check the predicted temporary memory of the forward and backward passes.

    Memory that is allocated for the whole run is subtracted, because it would hide an error.
    """
    values, stage = read(measured, name, rank), counted(name, rank)
    passing = values["backward"] - stage.allocated - stage.host
    assert stage.activations + stage.passes.change == pytest.approx(passing, rel=0.15)


def read(folder: Path, name: str, rank: int) -> dict[str, int]:
    return json.loads((folder / f"{name}.{rank}.json").read_text())
