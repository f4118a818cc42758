"""Steps of every kind of attention, layout and setting on a simulated GPU, with few layers."""

import json
from collections import Counter

import pytest

from tests.simulated_cuda.comparison import compare
from tests.simulated_cuda.layer_kernels import JSON
from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, SimulationError, try_simulate

SMALL = ("model.num_layers=2", "training.seq_length=512")
LONG = ("model.num_layers=2", "training.seq_length=4096")
V1 = "configs/at_scale/diff_3b_64gpus.yaml"
MUON = "configs/at_scale/diff_3b_muon_64gpus.yaml"
LORA = ("model.lora={rank: 8, alpha: 16}",)
ZERO2 = ("parallel.zero_stage=2",)
FP32 = ("training.precision=fp32",)
TWO = ("training.micro_batch_size=2",)
QK_NORM = ("model.attention.qk_norm=true",)
GATE = ("model.attention.output_gate=elementwise",)
HEAD_GATE = ("model.attention.output_gate=headwise",)
YARN = ("model.rope_scaling={kind: yarn, factor: 8, original_length: 512}",)
MUP = ("model.initialization={scheme: mup, base_hidden_size: 256}",)
SELECTED = ("model.attention.selected_heads=[[0, 1], [2, 3, 4]]",)
CASES = {
    "v1 by Triton": Case(V1, 64, (*SMALL, "training.attention_backend=triton")),
    "v2": Case("configs/at_scale/diff_v2_3b_64gpus.yaml", 64, SMALL),
    "grouped": Case("configs/at_scale/grouped_3b_64gpus.yaml", 64, SMALL),
    "softmax": Case("configs/at_scale/transformer_3b_64gpus.yaml", 64, SMALL),
    "ulysses": Case(
        "configs/at_scale/diff_v2_3b_64k_64gpus.yaml", 64, (*LONG, *QK_NORM, *GATE, *MUP), rank=3
    ),
    "all-gather": Case(
        "configs/at_scale/diff_3b_64k_64gpus.yaml",
        64,
        (*LONG, *QK_NORM, *YARN, "parallel.context_communication=all_gather"),
        rank=3,
    ),
    "last stage": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        ("model.num_layers=8", "training.seq_length=512"),
        rank=63,
        microbatches=4,
    ),
    "first stage": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        ("model.num_layers=8", "training.seq_length=2048"),
        microbatches=8,
    ),
    "middle stage": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        (
            "model.num_layers=8",
            "training.seq_length=2048",
            "parallel.virtual_pipeline=1",
        ),
        rank=32,
        microbatches=8,
    ),
    # With this window, rank 4 sends most, which plan counts.
    "ring with windows": Case(
        "configs/at_scale/diff_3b_64k_64gpus.yaml",
        64,
        (*LONG, "model.attention.window=1000"),
        rank=4,
    ),
    "windows by Triton": Case(
        V1, 64, (*SMALL, "training.attention_backend=triton", "model.attention.window=100")
    ),
    "windows of softmax": Case(
        "configs/at_scale/transformer_3b_64gpus.yaml", 64, (*SMALL, "model.attention.window=100")
    ),
    "ring": Case("configs/at_scale/diff_3b_64k_64gpus.yaml", 64, LONG, rank=3),
    "tensor": Case(V1, 64, (*SMALL, *GATE, "parallel.tensor=2")),
    "sequence": Case(
        V1,
        64,
        (*SMALL, *QK_NORM, *HEAD_GATE, "parallel.tensor=2", "parallel.sequence_parallel=true"),
    ),
    "documents": Case(V1, 64, (*SMALL, "data.reset_attention_mask=true")),
    "reference": Case(V1, 64, (*SMALL, "training.attention_backend=reference")),
    # Rank 42 has a part of the output layer, of which it keeps no more after the sum over ranks.
    "zero 2, long": Case(
        V1,
        64,
        (*SMALL, *ZERO2, "training.seq_length=8192", "training.loss_chunk=512"),
        rank=42,
        microbatches=2,
    ),
    "zero 2, one microbatch": Case(V1, 64, (*SMALL, *ZERO2), rank=42, microbatches=1),
    "zero 2, float32": Case(V1, 64, (*SMALL, *ZERO2, *FP32), microbatches=2),
    "zero 2, float32, tied": Case(
        V1, 64, (*SMALL, *ZERO2, *FP32, "model.tied_embeddings=true"), microbatches=2
    ),
    "offloaded optimizer": Case(
        V1, 64, (*SMALL, "parallel.offload_optimizer=true"), microbatches=2
    ),
    "two sequences": Case(V1, 64, (*SMALL, *TWO)),
    "two sequences, loss in chunks": Case(V1, 64, (*SMALL, *TWO, "training.loss_chunk=128")),
    "four sequences, sequence parallelism, loss in chunks": Case(
        V1,
        64,
        (
            *SMALL,
            "training.micro_batch_size=4",
            "training.loss_chunk=200",
            "training.z_loss=1e-4",
            "parallel.tensor=2",
            "parallel.sequence_parallel=true",
        ),
    ),
    "recomputed": Case(V1, 64, (*SMALL, *YARN, "recompute.granularity=full")),
    # The peak of memory of this case is in the backward pass of SwiGLU in a recomputed layer.
    "recomputed, long": Case(
        V1,
        64,
        (
            "model.num_layers=2",
            "training.seq_length=16384",
            "training.loss_chunk=1024",
            "recompute.granularity=full",
        ),
    ),
    "deterministic": Case(V1, 64, (*SMALL, "training.deterministic=true")),
    "offloaded activations": Case(V1, 64, (*SMALL, "training.offload_activations=true")),
    "lora": Case("configs/continue_llama_3.2_1b.yaml", 8, (*SMALL, *LORA)),
    "dex in a pipeline": Case(
        "configs/dex/llama_3.2_1b.yaml",
        8,
        (
            "model.num_layers=4",
            "training.seq_length=2048",
            "parallel.pipeline=4",
            "model.attention.selected_heads=[[0, 1], [2], [0, 3], [1]]",
        ),
        microbatches=4,
    ),
    "frozen embedding": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        ("model.num_layers=8", "training.seq_length=2048", "optimizer.trainable=[decoder.*]"),
        microbatches=8,
    ),
    "muon": Case(MUON, 64, SMALL),
    # The first rank sends most. Only with tied embeddings, it also needs most memory.
    "muon, zero 2": Case(MUON, 64, (*SMALL, *ZERO2, "model.tied_embeddings=true"), microbatches=2),
    "muon, zero 2, float32": Case(MUON, 64, (*SMALL, *ZERO2, *FP32), microbatches=2),
    "muon, zero 3": Case(MUON, 64, (*SMALL, "parallel.zero_stage=3")),
    "muon, tensor and sequence": Case(
        "configs/at_scale/diff_v2_3b_64gpus.yaml",
        8,
        (
            *SMALL,
            "optimizer.kind=muon",
            "optimizer.muon.per_head=true",
            "parallel.tensor=2",
            "parallel.sequence_parallel=true",
        ),
    ),
    "dex": Case("configs/dex/llama_3.2_1b.yaml", 8, (*SMALL, *SELECTED)),
    "dex, tensor and sequence": Case(
        "configs/dex/llama_3.1_8b.yaml",
        64,
        (*LONG, "model.attention.selected_heads=[[0, 16], [2, 20]]"),
    ),
    "dex by Ulysses": Case("configs/dex/llama_3.2_3b.yaml", 64, (*LONG, *SELECTED)),
    "zero 2": Case(V1, 64, (*SMALL, *ZERO2), rank=42, microbatches=2),
    "zero 3": Case(V1, 64, (*SMALL, "parallel.zero_stage=3")),
    # The weights of this case exceed the number of elements that DeepSpeed keeps gathered at once.
    "zero 3, deep": Case(
        V1, 8, ("model.num_layers=8", "training.seq_length=512", "parallel.zero_stage=3")
    ),
    "tied": Case(V1, 64, (*SMALL, "model.tied_embeddings=true")),
    "flex": Case(V1, 64, (*SMALL, "training.attention_backend=flex")),
    "blocked": Case(V1, 64, (*SMALL, "training.attention_backend=blocked")),
}


@pytest.fixture(scope="module")
def results():
    try:
        return dict(zip(CASES, try_simulate(list(CASES.values())), strict=True))
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")


@pytest.mark.parametrize("name", CASES)
def test_plan_matches_the_executed_memory_and_traffic(name, results):
    if isinstance(results[name], SimulationError):
        raise results[name]
    outside = [each for each in compare(CASES[name], results[name]) if not each.is_within()]
    assert list(map(str, outside)) == []


def test_a_loss_in_chunks_lowers_the_peak_by_the_logits_of_the_other_chunks(results):
    whole, chunked = (
        next(row.executed for row in compare(CASES[name], results[name]) if "peak" in row.name)
        for name in ("two sequences", "two sequences, loss in chunks")
    )
    logit, vocabulary = 2, 100288
    assert whole - chunked == pytest.approx(logit * 2 * (512 - 128) * vocabulary, rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_updates_are_applied(name, results):
    if isinstance(results[name], SimulationError):
        raise results[name]
    assert results[name].outcome["applied"] == [True, True]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("v1 by Triton", "diff_v1, triton"),
        ("v2", "diff_v2, sdpa"),
        ("grouped", "grouped, sdpa_4call"),
        ("softmax", "Transformer of diff_v1"),
    ],
)
def test_the_committed_table_counts_the_kernels_of_a_layer(name, column, results):
    """Compare the kernels in layer_kernels.json with those that a layer's forward pass launches.

    If this test fails, run `python -m tests.simulated_cuda.layer_kernels` to update the file.
    """
    found = Counter[str]()
    for each in results[name].launches:
        if ".decoder.layers.1" in each.module:
            found[each.kernel] += each.count
    rows = json.loads(JSON.read_text())["kernels"][column]
    # Kernels with the count 0 are launched once for all layers, with more bytes for each layer.
    rows = [each for each in rows if each["pass"] == "forward" and each["count"]]
    listed = {each["kernel"]: each["count"] for each in rows}
    assert dict(found) == listed
