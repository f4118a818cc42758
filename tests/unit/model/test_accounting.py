"""Counts of parameters, FLOPs and memory, compared with built networks and allocated tensors."""

import gc
import time
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffmegatron.attention.kernels import call as attention_call
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model import build
from diffmegatron.model.accounting.flops import count_flops
from diffmegatron.model.accounting.hardware import ACCELERATORS, find_accelerator
from diffmegatron.model.accounting.memory import REDUCE_BUCKET, memory_by_stage
from diffmegatron.model.accounting.mfu import model_flops_utilization
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.zero import ZeroEngine, engine_config
from diffmegatron.parallel.parallel_state import process_groups

BATCH, LENGTH, VOCABULARY = 2, 64, 320


SIGNAL_PER_NOISE = {"signal_per_noise": 2, "num_kv_heads": 2}
# Sections of ``model.attention``. Each kind has four heads, the default of ``make_recipe``. Only
# softmax and DEX have eight heads.
KINDS = {
    "diff_v1": {"kind": "diff_v1"},
    "softmax": {"kind": "softmax", "num_heads": 8},
    "diff_v2": {"kind": "diff_v2"},
    "diff_v2 in twos": {"kind": "diff_v2", **SIGNAL_PER_NOISE},
    "grouped": {"kind": "grouped", **SIGNAL_PER_NOISE},
    "dex": {
        "kind": "dex",
        "num_heads": 8,
        "selected_heads": [[0], [1, 2, 5]],
        "annealing_steps": None,
    },
}
NORMED_QK = ("softmax", "diff_v1", "diff_v2 in twos", "grouped")
GATED = ("softmax", "diff_v1", "diff_v2 in twos", "grouped")
# Softmax attention with the biases of Qwen2, and every kind with Qwen3's norms of queries and keys,
# and with each gate of the outputs.
ADDITIONS = {
    "qwen2": KINDS["softmax"] | {"qkv_bias": True},
    **{f"{kind}, qk_norm": KINDS[kind] | {"qk_norm": True} for kind in NORMED_QK},
    **{
        f"{kind}, {gate} gate": KINDS[kind] | {"output_gate": gate}
        for kind in GATED
        for gate in ("elementwise", "headwise")
    },
}


def make_recipe(model=None, training=None, parallel=None, attention=None, recompute=None) -> Recipe:
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "attention": {"kind": "diff_v1", "num_heads": 4} | (attention or {}),
        "ffn_hidden_size": 160,
        "vocab_size": VOCABULARY,
    }
    length = {"seq_length": LENGTH, "global_batch_size": 4, "micro_batch_size": BATCH, "steps": 10}
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": sizes | (model or {}),
            "data": {"sources": [{"path": "unused"}]},
            "training": length | (training or {}),
            "optimizer": {"lr": 1e-3},
            "parallel": parallel or {},
            "recompute": recompute or {},
        }
    )


def part_of(name: str) -> str:
    """Return the field of ``Parameters`` that counts the parameter with this checkpoint name."""
    parts = {
        "word_embeddings": "embedding",
        "linear_qkv": "attention",
        "linear_proj": "attention",
        "lambda_proj": "attention",
        "output_gate": "attention",
        "dex_projection": "attention",
        "lambda_": "lambdas",
        "head_norm": "headwise_norms",
        "q_norm": "headwise_norms",
        "k_norm": "headwise_norms",
        "layernorm": "norms",
        "mlp.linear": "mlp",
        "output_layer": "output",
    }
    return next(part for mark, part in parts.items() if mark in name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("kind", [*KINDS, *ADDITIONS])
def test_parameters_are_those_of_the_built_network(kind, num_kv_heads, tied):
    attention = {"num_kv_heads": num_kv_heads} | (KINDS | ADDITIONS)[kind]
    recipe = make_recipe({"tied_embeddings": tied}, attention=attention)
    built = dict.fromkeys(count_parameters(recipe.model).__dataclass_fields__, 0)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        # Use the names in checkpoints, because Transformer Engine's modules name norms differently.
        for parameter, shards in parameter_shards(network).items():
            built[part_of(shards[0].name)] += parameter.numel()
    counted = count_parameters(recipe.model)
    assert vars(counted) == built
    assert counted.total == sum(built.values())


def test_the_3b_model_has_the_parameters_its_sizes_give():
    model = make_recipe(
        {
            "num_layers": 28,
            "hidden_size": 3072,
            "ffn_hidden_size": 8192,
            "vocab_size": 100_288,
        },
        attention={"num_heads": 12},
    ).model
    counted = count_parameters(model)
    assert counted.without_embeddings / 1e9 == pytest.approx(3.171, abs=5e-4)
    assert counted.total / 1e9 == pytest.approx(3.787, abs=5e-4)


@pytest.mark.parametrize(
    ("attention", "more"),
    # ``more`` is the number of parameters that a layer has in addition to the baseline's layer. The
    # hidden size is 64. DIFF V1 adds four lambda vectors of d = 8 and a norm weight of 2d.
    [
        ({"kind": "diff_v1"}, 4 * 8 + 16),
        ({"kind": "diff_v1", "headwise_norm": False}, 4 * 8),
        # DIFF V2 (d = 16) adds query rows of the noise heads, and one row of lambda_proj per head.
        ({"kind": "diff_v2"}, 4 * 16 * 64 + 4 * 64),
        ({"kind": "diff_v2", **SIGNAL_PER_NOISE}, 2 * 16 * 64 + 4 * 64),
        # Grouped attention adds the same as V1, but has two noise query heads (d = 8) and not four.
        ({"kind": "grouped", **SIGNAL_PER_NOISE}, 4 * 8 + 16 - 2 * 8 * 64),
    ],
)
def test_model_and_baseline_differ_only_by_their_own_parameters(attention, more):
    own = count_parameters(make_recipe(attention=attention).model)
    baseline = count_parameters(make_recipe({"baseline": True}, attention=attention).model)
    assert own.total - baseline.total == 2 * more


def test_the_transformers_headwise_norm_is_over_d():
    normed = make_recipe(attention=KINDS["softmax"] | {"headwise_norm": True}).model
    assert count_parameters(normed).headwise_norms == 2 * 8


@pytest.mark.parametrize(
    ("kind", "attention_cost"),
    # ``attention_cost`` is the number of multiply-adds in the forward pass per pair of a query and
    # a key, summed over all heads and divided by d.
    [("diff_v1", 4 * 4), ("softmax", 8 * 2), ("diff_v2", 8 * 2), ("diff_v2 in twos", 6 * 2)],
)
def test_flops_are_those_of_the_products_that_torch_counts(kind, attention_cost):
    recipe = make_recipe(None, {"precision": "fp32"}, attention=KINDS[kind])
    model, tokens = recipe.model, BATCH * LENGTH
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with FlopCounterMode(display=False) as counter:
            run_forward(network).mean().backward()
    # Use only the count of torch's mm, which computes the products with weights. The counter also
    # counts some operators of attention, but torch versions differ in these operators.
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    pairs = tokens * (LENGTH / 2) * model.num_layers * model.attention.head_dim
    assert products + 3 * 2 * pairs * attention_cost == count_flops(model, LENGTH).training * tokens


def run_forward(network: torch.nn.Module) -> Tensor:
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    return network(tokens, labels=tokens)


def test_flops_of_the_3b_model_match_a_calculation_by_hand():
    """Check the FLOPs per token against exact fractions computed from the paper's sizes."""
    layer = 4 * 3072**2 + 3 * 3072 * 8192
    weights = 28 * layer + 100_288 * 3072
    pairs = Fraction(4096, 2) * 28 * 12
    model = make_recipe(
        {
            "num_layers": 28,
            "hidden_size": 3072,
            "ffn_hidden_size": 8192,
            "vocab_size": 100_288,
        },
        attention={"num_heads": 12},
    ).model
    flops = count_flops(model, 4096)
    assert flops.training == 6 * weights + pairs * (4 + 8) * 128 * 2
    assert flops.forward == 2 * weights + pairs * 4 * 128 * 2


def test_v1_and_its_baseline_have_the_same_flops():
    pair = [make_recipe({"baseline": each}).model for each in (False, True)]
    assert count_flops(pair[0], LENGTH) == count_flops(pair[1], LENGTH)


@pytest.mark.parametrize(
    ("attention", "forward"),
    # ``forward`` is the number of forward FLOPs per token that a layer has in addition to the
    # baseline's layer: 2 per weight, and 2 per multiply-add of LENGTH / 2 pairs.
    [
        # DIFF V2 adds lambda's weights and noise heads of width 16: four, or two with
        # ``SIGNAL_PER_NOISE``. A noise head adds the weights of its queries, its scores and its
        # product with the values.
        ({"kind": "diff_v2"}, 2 * (4 * 64 + 64 * 64) + LENGTH * 4 * (16 + 16)),
        ({"kind": "diff_v2", **SIGNAL_PER_NOISE}, 2 * (4 * 64 + 32 * 64) + LENGTH * 2 * (16 + 16)),
        # Grouped attention has two noise heads of width 8 and not four, so it computes fewer
        # queries and scores.
        ({"kind": "grouped", **SIGNAL_PER_NOISE}, -2 * 2 * 8 * 64 - LENGTH * 2 * 8),
    ],
)
def test_flops_beyond_the_baseline_match_a_calculation_by_hand(attention, forward):
    own, baseline = (
        count_flops(make_recipe({"baseline": each}, attention=attention).model, LENGTH)
        for each in (False, True)
    )
    assert own.forward - baseline.forward == 2 * forward
    assert own.training - baseline.training == 3 * 2 * forward


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_deepspeed_allocates_the_counted_bytes(precision, zero_stage, monkeypatch):
    """Check that the counted bytes are those of the live tensors after the second backward pass.

    At that time, the gradients and Adam's state exist. ZeRO 2 also allocates a bucket, but only
    during the backward pass, so the bucket is counted in the memory of a layer's backward pass.
    """
    recipe = make_recipe(None, {"precision": precision}, {"zero_stage": zero_stage})
    bucket = 123_456
    monkeypatch.setattr("diffmegatron.optim.zero.engine_config", with_bucket(bucket))
    during: list[int] = []
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        # Libraries allocate memory in their first call. Exclude this memory from the comparison.
        run_forward(network)
        before = live_storages(network)
        for parameter in network.parameters():
            # The engine flattens the parameters into new storages and frees the old ones.
            del before[parameter.untyped_storage().data_ptr()]
        with ZeroEngine(network, recipe, parallel_state) as engine:
            engine.backward(run_forward(network).mean(), is_last=True)
            engine.step(1e-3, allow=lambda _: True)
            network.virtual_stages[0].embedding.word_embeddings.weight.register_hook(
                lambda _: during.extend(storages_since(before, network))
            )
            engine.backward(run_forward(network).mean(), is_last=True)
            bucket_bytes = bucket * (2 if precision == "bf16" else 4)
            # The thread of gloo that reduced the bucket may free it after the backward pass.
            deadline = time.monotonic() + 10
            while bucket_bytes in (after := storages_since(before, network)):
                assert time.monotonic() < deadline, "the bucket was not freed within 10 s"
    (counted,) = memory_by_stage(recipe, world_size=1)
    assert during.count(bucket_bytes) == (zero_stage == 2)
    assert (counted.layer.beside > REDUCE_BUCKET) == (zero_stage == 2)
    assert counted.communication == 0
    states = counted.weights + counted.gradients + counted.optimizer
    assert sum(after) == pytest.approx(states, rel=0.001)


def with_bucket(elements: int):
    """Return a replacement of ``engine_config`` with a reduce bucket of ``elements`` elements.

    The default bucket is much larger than all other tensors of the test together.
    """

    def config(recipe: Recipe):
        config = engine_config(recipe)
        config["zero_optimization"]["reduce_bucket_size"] = elements
        return config

    return config


def live_storages(network: torch.nn.Module) -> dict[int, torch.UntypedStorage]:
    """Return a dict from address to storage, with the storages of all live tensors.

    The result keeps the storages alive, so no new storage gets one of these addresses. Gradients
    are taken from ``network``, because the garbage collector does not list gradients that have no
    Python object.
    """
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)]
    tensors += [p.grad for p in network.parameters() if p.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages}


def storages_since(before: dict[int, torch.UntypedStorage], network: torch.nn.Module) -> list[int]:
    """Return the bytes of the storages that are not in ``before``."""
    return [each.nbytes() for key, each in live_storages(network).items() if key not in before]


def test_the_counted_reduce_bucket_matches_the_engine_config():
    assert engine_config(make_recipe())["zero_optimization"]["reduce_bucket_size"] == REDUCE_BUCKET


NORMS = {
    f"{kind}{', normed' * on}": KINDS[kind] | {"headwise_norm": on}
    for kind in ("diff_v1", "softmax", "grouped", "dex")
    for on in (True, False)
} | {kind: KINDS[kind] for kind in ("diff_v2", "diff_v2 in twos")}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("attention", [*NORMS, *ADDITIONS])
def test_counted_activations_match_the_saved_tensors(
    attention, num_kv_heads, precision, monkeypatch
):
    """Check that the count for a CPU equals the bytes that Megatron-core's own layers save.

    The layers save these bytes for the backward pass. Transformer Engine's norms are not used,
    because on a CPU they save the bytes that are counted for a GPU.
    """
    monkeypatch.setattr(build, "available_host", lambda _: "local")
    sizes = {"num_kv_heads": num_kv_heads} | (NORMS | ADDITIONS)[attention]
    recipe = make_recipe(None, {"precision": precision}, attention=sizes)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        kept = bytes_kept_for_backward(build_model(recipe, parallel_state))
    (counted,) = memory_by_stage(recipe, 1, "cpu")
    probabilities = 4 * BATCH * LENGTH * VOCABULARY
    # The tolerance covers token ids, label positions and scalars, which are not counted.
    assert kept == pytest.approx(counted.activations + probabilities, rel=0.004)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("gate", [None, "elementwise", "headwise"])
@pytest.mark.parametrize("kind", GATED)
def test_counted_activations_match_those_of_selective_recomputation(
    kind, gate, precision, monkeypatch
):
    monkeypatch.setattr(build, "available_host", lambda _: "local")
    recipe = make_recipe(
        None,
        {"precision": precision},
        attention=KINDS[kind] | {"output_gate": gate},
        recompute={"granularity": "selective"},
    )
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        kept = bytes_kept_for_backward(build_model(recipe, parallel_state))
    (counted,) = memory_by_stage(recipe, 1, "cpu")
    probabilities = 4 * BATCH * LENGTH * VOCABULARY
    assert kept == pytest.approx(counted.activations + probabilities, rel=0.004)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves the same tensors as torch's fused RMSNorm on a GPU.

    On a CPU, torch's RMSNorm consists of several operations, which save more tensors.
    """

    @staticmethod
    def forward(ctx, hidden, weight, eps):
        scale = (hidden.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale * weight).to(hidden.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("headwise_norm", [True, False])
def test_counted_activations_match_a_gpus_fused_norms(headwise_norm, precision, monkeypatch):
    """Check that the count for a GPU equals the bytes that fused norms save on a CPU.

    The network is a Transformer, because its attention kernel saves the same tensors on both
    devices. The bytes of the unfused SwiGLU and of the loss are added to the count.
    """
    for module in (torch.nn.functional, attention_call):
        monkeypatch.setattr(
            module, "rms_norm", lambda x, _, weight, eps: FusedNorm.apply(x, weight, eps)
        )
    recipe = make_recipe(
        None,
        {"precision": precision},
        attention=KINDS["softmax"] | {"headwise_norm": headwise_norm},
    )
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        kept = bytes_kept_for_backward(build_model(recipe, parallel_state))
    (counted,) = memory_by_stage(recipe, 1, "gpu")
    # On a CPU, SwiGLU is not fused, so it also saves the two factors of its product.
    element = {"bf16": 2, "fp32": 4}[precision]
    unfused_swiglu = 2 * element * 160 * 2 * BATCH * LENGTH
    probabilities = 4 * BATCH * LENGTH * VOCABULARY
    assert kept == pytest.approx(counted.activations + unfused_swiglu + probabilities, rel=0.004)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", NORMED_QK)
def test_qk_norm_adds_the_bytes_that_a_gpus_fused_norms_save(kind, precision, monkeypatch):
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda x, _, weight, eps: FusedNorm.apply(x, weight, eps)
    )
    kept, counted = [], []
    for on in (True, False):
        recipe = make_recipe(
            None, {"precision": precision}, attention=KINDS[kind] | {"qk_norm": on}
        )
        with process_groups(recipe.parallel, seed=1) as parallel_state:
            kept.append(bytes_kept_for_backward(build_model(recipe, parallel_state)))
        counted.append(memory_by_stage(recipe, 1, "gpu")[0].activations)
    assert kept[0] - kept[1] == counted[0] - counted[1]


def test_the_kernels_on_a_gpu_keep_both_maps_outputs():
    """Check the differences between the backends' saved bytes against a calculation by hand.

    The model has h = 4 heads of 2d = 128 channels in bf16.
    """
    token_layers, channels, heads = BATCH * LENGTH * 2, 512, 4
    wide = {"head_dim": 64}
    blocked, fused, flash = (
        memory_by_stage(make_recipe(None, {"attention_backend": name}, attention=wide), 1, device)[
            0
        ]
        for name, device in (("auto", "cpu"), ("triton", "gpu"), ("flash_2call", "gpu"))
    )
    maps, log_sum_exps = 2 * 2 * channels, 2 * 4 * heads
    # An unfused headwise norm saves its input and one number per head, both in float32.
    norm, second_map = 4 * channels + 4 * heads, 4 * channels
    assert flash.activations - fused.activations == token_layers * (norm + second_map)
    # The unfused operations of a CPU also save tensors of three norms (of attention's input, of the
    # heads, and of the MLP's input) and the two factors of SwiGLU's product.
    unfused = 2 * 6 * 64 + 4 * channels + 2 * 2 * 160
    final_norm = BATCH * LENGTH * 6 * 64
    difference = token_layers * (unfused + norm - maps - log_sum_exps) + final_norm
    assert blocked.activations - fused.activations == difference


def bytes_kept_for_backward(network: torch.nn.Module) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run_forward(network)
    assert loss.requires_grad
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters
    )


def test_memory_of_the_loss_matches_a_calculation_by_hand():
    tokens, weight = BATCH * LENGTH, VOCABULARY * 64
    # On a CPU in bf16, the float32 probabilities exist in addition to the logits.
    assert memory_by_stage(make_recipe(), 1, "cpu")[0].loss.beside == 6 * tokens * VOCABULARY
    # In the other cases, the gradient of the logits overwrites the logits or the probabilities. At
    # the peak, memory holds three gradients: of the logits, the weight and the hidden states.
    for precision, element, device in (("bf16", 2, "gpu"), ("fp32", 4, "gpu"), ("fp32", 4, "cpu")):
        recipe = make_recipe(None, {"precision": precision})
        gradients = element * (tokens * VOCABULARY + weight + tokens * 64)
        assert memory_by_stage(recipe, 1, device)[0].loss.beside == gradients


def test_a_chunked_loss_has_the_logits_of_a_chunk():
    """Check that a chunked loss needs the logits of only one chunk, of all rows of the batch.

    At the peak, memory holds the gradients of a chunk's logits, of the weight and of all hidden
    states. So a batch of one chunk and a batch of eight chunks differ in the hidden states alone.
    """
    whole, chunk = (
        memory_by_stage(make_recipe(None, {"seq_length": length, "loss_chunk": 512}), 1)[
            0
        ].loss.beside
        for length in (512, 4096)
    )
    assert whole == 2 * (BATCH * 512 * (VOCABULARY + 64) + VOCABULARY * 64)
    assert chunk - whole == 2 * BATCH * (4096 - 512) * 64


def test_data_parallel_ranks_share_the_optimizer_state():
    alone, shared = (memory_by_stage(make_recipe(), ranks)[0] for ranks in (1, 2))
    assert shared.optimizer == alone.optimizer // 2
    assert shared.gradients == alone.gradients
    partitioned = make_recipe(None, {"global_batch_size": 4 * BATCH}, {"zero_stage": 2})
    assert memory_by_stage(partitioned, 2)[0].gradients == alone.gradients // 2


def test_stages_and_shards_add_up_to_the_network():
    """Check that the weights of all ranks of a 2 x 4 layout add up to those of the network.

    Some weights are on two ranks and count twice. The tied embedding is on the first and the last
    stage. The norms and the lambda vectors are on both tensor-parallel ranks.
    """
    recipe = make_recipe(
        {"tied_embeddings": True, "num_layers": 4},
        {"precision": "fp32", "global_batch_size": 16},
        {"tensor": 2, "pipeline": 4},
    )
    stages = memory_by_stage(recipe, 8)
    counted = count_parameters(recipe.model)
    replicated = counted.norms + counted.lambdas + counted.headwise_norms
    whole = counted.total + replicated + counted.embedding
    assert sum(2 * stage.weights for stage in stages) == 4 * whole
    assert [stage.loss.beside > 0 for stage in stages] == [False, False, False, True]
    # Each stage has one layer. From the first stage to the last, the stages hold the activations of
    # 4, 3, 2 and 1 microbatches. The last stage also holds the inputs of the final norm and the
    # output layer. Each other stage also holds the hidden states that it sent, one tensor per
    # microbatch, and one gradient that it received. All stages hold the rotary angles, which
    # ``kept`` excludes.
    hidden = BATCH * LENGTH * 4 * 64
    kept = [stage.activations - 4 * 8 * LENGTH for stage in stages]
    layer = kept[-1] - BATCH * LENGTH * (2 * 4 * 64 + 4) + hidden
    assert [each - hidden for each in kept[:-1]] == [4 * layer, 3 * layer, 2 * layer]


def test_sequence_parallel_shards_the_norms_inputs_too():
    layout = {"tensor": 2}
    whole = memory_by_stage(make_recipe(None, None, layout), 2)[0].activations
    sharded = make_recipe(None, None, layout | {"sequence_parallel": True})
    saved = whole - memory_by_stage(sharded, 2)[0].activations
    # On two ranks, sequence parallelism halves the bytes that are saved by the five norms (two per
    # layer, and the final norm) and by the projections after them. It adds a buffer for gathered
    # hidden states.
    assert saved == BATCH * LENGTH * (5 * (2 * 2 * 64 + 4) / 2 - 2 * 64)


def test_a_layout_that_is_not_filled_is_refused():
    with pytest.raises(UserError, match="start a multiple of 2"):
        memory_by_stage(make_recipe(None, None, {"tensor": 2}), 3)


@pytest.mark.parametrize(
    ("device_name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_gpus_are_found_by_the_name_cuda_gives(device_name, key):
    assert find_accelerator(device_name) is ACCELERATORS[key]


def test_an_unknown_gpu_is_not_guessed():
    assert find_accelerator("NVIDIA GeForce RTX 4090") is None


def test_mfu_of_the_papers_throughput_matches_a_calculation_by_hand():
    """Check the MFU of the 3B Transformer at 7491 tokens/s on an H100 (table 7 of the paper)."""
    training = 6 * (28 * (4 * 3072**2 + 3 * 3072 * 8192) + 100_288 * 3072)
    training += 28 * 12 * 2048 * 12 * 128 * 2
    share = model_flops_utilization(7491, training, 1, ACCELERATORS["H100"])
    assert share == pytest.approx(7491 * training / 989e12)
    assert 0.1 < share < 0.3
