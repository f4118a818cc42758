"""Tests that networks and training runs do not depend on the host of the layers.

The host of a network is the library that its layers come from: Transformer Engine or Megatron-core,
whose layers are called local.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.model.accounting.memory import memory_by_stage
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.parallel.matrix import (
    COMMON,
    FP8_LAYOUTS,
    FP8_MODELS,
    LAYOUTS,
    call,
    gradient_difference,
    loss_difference,
    run_fp8_layouts,
    run_models,
    series,
)
from tests.paths import ROOT
from tests.ranks import launch
from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, simulate
from tests.transformer_engine import FOLDER, emulates_fp8, environment, python_files
from tests.transformer_engine.fp8 import RECORDS, read_records
from tests.transformer_engine.fp8_runs import KEPT, LAYERS, RECIPES, SIZES, in_fp8
from tests.transformer_engine.networks import BATCH, KINDS, LENGTH, NETWORKS

pytestmark = pytest.mark.skipif(
    python_files() is None,
    reason=f"{FOLDER} names no folder with Transformer Engine's Python files; "
    "'python -m tests.transformer_engine.fetch FOLDER' fills one",
)

ROWS = (
    "gqa:tp2", "gqa:tp2+sp", "gqa:tp2+sp+recompute+loss-chunks",
    "gqa:dp2-zero-1", "gqa:dp2-zero-2", "gqa:dp2-zero-3",
    "gqa:pp2", "deep:pp2-interleaved", "gqa:cp2-ring", "gqa:cp2-ulysses",
    "v2:tp2", "v2:tp2+sp", "grouped:tp2+sp", "dex:tp2+sp", "bf16:tp2+sp", "bf16:dp2-zero-3",
    "part:tp2+sp+recompute+loss-chunks", "part:dp2-zero-3",
)  # fmt: skip
CHOSEN = [{layout.name: layout for layout in LAYOUTS if layout.ranks == 2}[name] for name in ROWS]
each_layout = pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
needs_fp8 = pytest.mark.skipif(
    not emulates_fp8(), reason="the stand-in has no FP8 for this version of Transformer Engine"
)
HALF = ("optimizer.schedule.warmup_steps=1", "training.micro_batch_size=2", "training.steps=3")
WHOLE = (*HALF, "training.steps=6")


def run(module: str, *arguments: object, **options: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict]]:
    """Run ``networks.py`` with each host; return the folder of its runs, and results by host."""
    out = tmp_path_factory.mktemp("networks")
    worker = "tests.transformer_engine.networks"
    run(worker, corpus, out / "local.pt")
    recording = environment() | {RECORDS: str(out)}
    run(worker, corpus, out / "transformer_engine.pt", env=recording)
    found = {host: torch.load(out / f"{host}.pt", weights_only=False) for host in HOSTS}
    assert {host: each["host"] for host, each in found.items()} == {host: host for host in HOSTS}
    return out, found


@pytest.fixture(scope="module")
def networks(results: tuple[Path, dict[str, dict]]) -> dict[str, dict]:
    """Return results by host, then (network, precision)."""
    return {host: each["networks"] for host, each in results[1].items()}


HOSTS = ("local", "transformer_engine")
each_network = pytest.mark.parametrize(
    "key", [(name, precision) for name in NETWORKS for precision in TOLERANCE], ids=": ".join
)


@each_network
def test_the_classes_are_those_of_the_host(key, networks):
    local, other = (set(networks[host][key]["classes"]) for host in HOSTS)
    assert {"ColumnParallelLinear", "RowParallelLinear"} <= local
    assert not [name for name in local if name.startswith("TE")]
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= other
    # V2's lambda and the headwise gate of "softmax" are computed from the normalised input, so this
    # norm is not fused.
    assert ("TEColumnParallelLinear" in other) == ("v2" in key[0] or key[0] == "softmax")
    assert "RowParallelLinear" not in other


@each_network
def test_parameters_have_the_same_names_places_and_initial_bits(key, networks):
    local, other = (networks[host][key]["parameters"] for host in HOSTS)
    assert local.keys() == other.keys()
    for name in local:
        assert torch.equal(local[name]["weight"], other[name]["weight"]), name
        for what in ("requires_grad", "dtype", "shape", "offset", "is_primary"):
            assert local[name][what] == other[name][what], f"{what} of {name}"


@each_network
def test_loss_and_gradients_are_the_same(key, networks):
    local, other = (networks[host][key] for host in HOSTS)
    tolerance = TOLERANCE[key[1]]
    torch.testing.assert_close(other["loss"], local["loss"], rtol=tolerance, atol=0)
    for name, parameter in local["parameters"].items():
        expected, found = parameter["gradient"], other["parameters"][name]["gradient"]
        assert (expected is None) == (found is None) == (not parameter["requires_grad"]), name
        if expected is None:
            continue
        # In the gradient of a lambda vector, large terms cancel. The relative rounding error can
        # therefore be 100 times larger.
        allowed = tolerance * (100 if ".lambda_" in name else 1)
        difference, norm = (x.float().norm().item() for x in (found - expected, expected))
        assert difference <= allowed * norm, f"{name}: {difference} of {norm}"


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", KINDS)
def test_transformer_engine_saves_only_the_input_of_a_norm(name, precision, networks):
    """Check that Transformer Engine's RMSNorm saves only its input for the backward pass.

    ``plan`` assumes this for a GPU. On a CPU, torch's RMSNorm also saves a float32 copy of its
    result, and it saves a bf16 input as float32.
    """
    local, other = (networks[host][name, precision]["kept"] for host in HOSTS)
    norms, hidden = 5, 64
    assert (
        local - other == norms * BATCH * LENGTH * hidden * {"fp32": 4, "bf16": 4 + 4 - 2}[precision]
    )


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with both hosts, and return the folder of the runs.

    Runs with local layers use one process. Runs with Transformer Engine's layers use two ranks. The
    run ``then_other`` starts in one process with local layers. Two tensor-parallel ranks with
    Transformer Engine's layers resume it. The run ``then_local`` is the reverse.
    """
    out = tmp_path_factory.mktemp("runs")
    file = out / "tiny.yaml"
    file.write_text(TINY.format(run_dir=out / "unused", corpus=corpus))
    run_models(file, out, [*sorted({layout.model for layout in CHOSEN}), *FP8_MODELS])

    def train_here(name: str, *overrides: str) -> None:
        train(load_recipe(file, [*COMMON, *overrides, f"run_dir={out}/{name}"]))

    def there(name: str, *overrides: str) -> list[str]:
        layout = ("parallel.tensor=2", "parallel.sequence_parallel=true")
        return [str(file), str(out), name, *COMMON, *overrides, *layout]

    train_here("local", *HALF)
    train_here("local", *WHOLE)
    train_here("then_other", *HALF)
    launch(
        2,
        "tests.parallel.worker",
        *(call(file, out, layout) for layout in CHOSEN),
        there("then_local", *HALF),
        there("then_other", *WHOLE),
        *(call(file, out, each) for each in FP8_LAYOUTS if emulates_fp8() and each.ranks == 2),
        environment=environment() | {RECORDS: str(out)},
    )
    if emulates_fp8():
        (out / "eight").mkdir()
        run_fp8_layouts(file, out, 8, {RECORDS: str(out / "eight")})
    train_here("then_local", *WHOLE)
    return out


@each_layout
def test_every_layout_matches_the_run_with_local_layers(layout, runs):
    run_dir, reference = runs / layout.name, runs / layout.model
    initial = [(folder / "initial.txt").read_text() for folder in (run_dir, reference)]
    assert initial[0] == initial[1]
    of_all, of_one_parameter = gradient_difference(run_dir, reference)
    if layout.model == "bf16":
        assert loss_difference(run_dir, reference) < 1e-3
        assert of_all < 2e-2
    else:
        assert loss_difference(run_dir, reference) < 1e-5
        assert of_all < 1e-5
        assert of_one_parameter < 1e-3


@pytest.mark.parametrize("name", ["then_other", "then_local"])
def test_a_checkpoint_of_one_host_is_resumed_by_the_other(name, runs):
    expected, found = (
        [entry["train/loss"] for entry in read_metrics(runs / each) if "train/loss" in entry]
        for each in ("local", name)
    )
    assert len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("environment_of", "name"),
    [
        (dict, "fp8:tp2+sp+recompute+loss-chunks" if emulates_fp8() else "v2:tp2"),
        (environment, "v2:tp2+sp"),
    ],
    ids=HOSTS,
)
def test_a_transformer_engine_checkpoint_exports_in_both_hosts(
    environment_of, name, runs, tmp_path
):
    checkpoint = CheckpointStore(runs / name).latest()
    options = {"env": environment_of()} if environment_of is environment else {}
    run("diffmegatron", "export", checkpoint, tmp_path / "hf", **options)
    assert (tmp_path / "hf" / "model.safetensors").exists()


# Classes and formats that NVIDIA's recipes of Megatron-Bridge have.
CLASSES = {
    "tensorwise": "Float8CurrentScaling, HYBRID",
    "delayed": "TEDelayedScaling, HYBRID",
    "blockwise": "Float8BlockScaling, E4M3",
    "mxfp8": "MXFP8BlockScaling, E4M3",
}


def in_fp8_steps(recipe: str, layers: Sequence[int], ranks: Sequence[int]) -> list[list[Any]]:
    """Return the recorded contexts of layers in FP8."""
    return [[CLASSES[recipe], layer, [*ranks]] for layer in layers]


@needs_fp8
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_losses_in_fp8_are_those_of_bf16_within_a_percent(recipe, results):
    expected, found = (series(results[0] / name, "train/loss") for name in ("bf16", recipe))
    assert len(expected) == 20 and expected[-1] < 0.75 * expected[0]
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected


@needs_fp8
def test_a_run_in_fp8_resumes_to_the_bit(results):
    whole, resumed = (series(results[0] / name, "train/loss") for name in ("tensorwise", "resumed"))
    assert resumed == whole[10:]


@needs_fp8
def test_a_checkpoint_is_resumed_with_and_without_fp8(results):
    out = results[0]
    train(load_recipe(out / "local.yaml", [*SIZES, f"run_dir={out}/then bf16"]))
    expected = series(out / "bf16", "train/loss")[10:]
    for name in ("then bf16", "then fp8"):
        assert series(out / name, "train/loss") == pytest.approx(expected, rel=0.01)


@needs_fp8
def test_every_layer_of_every_microbatch_enters_the_context_of_its_recipe(results):
    """Check recipe, layer and group of each context, also when layers are recomputed.

    Evaluations enter no context. A layer outside FP8 has no recipe.
    """
    out, layers = results[0], range(LAYERS)
    runs = read_records(out)
    assert [recipe for recipe, _ in runs] == [*RECIPES, *4 * ["tensorwise"], "delayed"]
    for recipe, contexts in runs[: len(RECIPES)]:
        entered = [-1] if recipe == "delayed" else layers
        assert contexts == 20 * in_fp8_steps(recipe, entered, [0])
    *_, (_, some), (_, recomputed), (_, delayed) = runs
    forward = [[None, 0, None], *in_fp8_steps("tensorwise", [1], [0]), [None, 2, None]]
    steps, microbatches = 3, 2
    assert some == steps * microbatches * [*forward, *reversed(forward)]
    assert recomputed == 3 * 2 * in_fp8_steps("tensorwise", layers, [0])
    # Transformer Engine itself enters the context of a recomputed pass with delayed scaling.
    assert delayed == 3 * in_fp8_steps("delayed", [-1], [0])


@needs_fp8
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recomputed_layers_in_fp8_have_the_same_losses(recipe, results):
    expected = series(results[0] / recipe, "train/loss")[:3]
    assert series(results[0] / f"{recipe}, recomputed", "train/loss") == expected


@needs_fp8
def test_delayed_scaling_forgets_the_networks_of_earlier_runs(results):
    """Count the modules whose largest values are reduced; two runs in the process had some."""
    projections = 4 * LAYERS
    assert results[1]["transformer_engine"]["scaled_modules"] == projections


@needs_fp8
@pytest.mark.parametrize("name", KINDS)
def test_plan_counts_the_bytes_that_products_in_fp8_save(name, results):
    """Compare the saved bytes with plan's; Transformer Engine's quantizers store 8 bits here.

    An operand's scale has 4 bytes, which plan does not count.
    """
    out, found = results
    in_bf16 = found["transformer_engine"]["networks"][name, "bf16"]["kept"]
    executed = found["transformer_engine"]["fp8_kept"][name] - in_bf16
    batch = (f"training.micro_batch_size={BATCH}", f"training.seq_length={LENGTH}")
    fp8 = load_recipe(out / "local.yaml", [*KEPT, *NETWORKS[name], *batch])
    bf16 = load_recipe(out / "local.yaml", [*KEPT, *NETWORKS[name], *batch, "training.fp8=null"])
    planned = [memory_by_stage(recipe, 1)[0] for recipe in (fp8, bf16)]
    copies, inputs = (
        getattr(planned[0], part) - getattr(planned[1], part) for part in ("weights", "activations")
    )
    projections, operands, layers = 4, 2, 2
    assert executed == copies + inputs + layers * projections * operands * 4


@needs_fp8
def test_a_gpu_of_the_wrong_generation_is_refused(results):
    refusal = results[1]["transformer_engine"]["fp8_refusal"]
    assert refusal == (
        "training.fp8.recipe 'mxfp8' cannot run on this GPU: Device compute capability 10.0 or "
        "higher required."
    )


@needs_fp8
@pytest.mark.parametrize("layout", FP8_LAYOUTS, ids=lambda layout: layout.name)
def test_layouts_in_fp8_have_the_losses_of_bf16_within_a_percent(layout, runs):
    run_dir, reference = runs / layout.name, runs / layout.model
    initial = [(folder / "initial.txt").read_text() for folder in (run_dir, reference)]
    assert initial[0] == initial[1]
    assert loss_difference(run_dir, reference) < 0.01
    assert series(run_dir, "train/loss") != series(reference, "train/loss")


@needs_fp8
def test_layouts_with_three_kinds_of_parallelism_enter_contexts(runs):
    """Check the contexts of ranks of both pipeline stages; a context has all ranks of its stage."""
    steps, microbatches = 6, 2
    for rank in (0, 7):
        pipeline, ring = read_records(runs / "eight", rank)
        stage, rows = rank // 4, range(8)
        entered = in_fp8_steps("tensorwise", [stage], rows[4 * stage : 4 * stage + 4])
        assert pipeline[1] == steps * microbatches * entered
        assert ring[1] == steps * in_fp8_steps("tensorwise", [0, 1], rows)


@needs_fp8
def test_layouts_enter_contexts_with_their_layers_and_groups(runs):
    """Check the contexts of both ranks; layers are numbered over all pipeline stages."""
    by_rank = [read_records(runs, rank) for rank in (0, 1)]
    steps = 6
    for rank, (sequence, pipeline, data, ring) in enumerate(by_rank):
        both = [0, 1]
        # Both layers are recomputed, one by one from the last.
        assert sequence[1] == steps * in_fp8_steps("tensorwise", [0, 1, 1, 0], both)
        # Virtual stages of a rank have the layers 0 and 2, or 1 and 3. The last two are in bf16.
        fp8 = in_fp8_steps("tensorwise", [1], [rank]) if rank else [[None, 0, None]]
        entered = [*fp8, [None, 2 + rank, None]]
        assert sorted(pipeline[1], key=str) == sorted(2 * steps * entered, key=str)
        assert data[1] == 2 * steps * in_fp8_steps("delayed", [-1], both)
        assert ring[1] == steps * in_fp8_steps("mxfp8", [0, 1], both)


@needs_fp8
def test_steps_in_fp8_run_on_a_simulated_gpu(tmp_path):
    """Run two steps of the last of four pipeline stages, with tensor x pipeline x data parallelism.

    Its virtual stages have the layers 3 and 7, of which the last is in bf16. The simulation raises
    an error for a step that waits for the device where a step in bf16 does not.
    """
    overrides = (
        "model.num_layers=8", "training.seq_length=512", "recompute.granularity=full",
        in_fp8("tensorwise", first_layers_bf16=1, last_layers_bf16=1),
    )  # fmt: skip
    recipe = "configs/at_scale/diff_6.8b_64gpus.yaml"
    case = Case(recipe, 64, overrides, rank=63, microbatches=4)
    try:
        (found,) = simulate([case], environment=environment() | {RECORDS: str(tmp_path)})
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")
    assert found.outcome["applied"] == [True, True]
    contexts = [json.loads(line) for line in (tmp_path / "63.jsonl").read_text().splitlines()]
    microbatch = [*in_fp8_steps("tensorwise", [3], range(48, 64)), [None, 7, None]]
    steps, microbatches, passes = 2, 4, 2
    expected = steps * microbatches * passes * microbatch
    assert sorted(contexts, key=str) == sorted(expected, key=str)
