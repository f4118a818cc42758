"""Communication, pipeline bubble and step time of a plan, compared with formulas."""

import pytest

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.activations import attention_bytes_per_token
from diffmegatron.model.accounting.hardware import ACCELERATORS
from diffmegatron.model.accounting.memory import memory_by_stage, trained_parameters
from diffmegatron.plan.rates import Hardware, Rates
from diffmegatron.plan.search import search
from diffmegatron.plan.timing import bubble_share, estimate_time
from diffmegatron.plan.traffic import Traffic, count_traffic, stage_collectives, stage_traffic
from tests.paths import CONFIGS

WIDE = {"attention": {"kind": "diff_v1", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}}
LAYERS, HIDDEN, LENGTH, BATCH = 8, 512, 1024, 32
# Bytes of the hidden states of a microbatch of one sequence, in bf16.
STATE = 2 * HIDDEN * LENGTH


def make_recipe(**sections: dict) -> Recipe:
    model = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "attention": {"kind": "diff_v1", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32},
        "ffn_hidden_size": 1024,
        "vocab_size": 4096,
    }
    model |= sections.pop("model", {})
    training = {"seq_length": LENGTH, "global_batch_size": BATCH, "steps": 100}
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": model,
            "data": {"sources": [{"path": "unused"}]},
            "training": training | sections.pop("training", {}),
            "optimizer": {"lr": 1e-3},
        }
        | sections
    )


def estimate(recipe: Recipe, ranks: int, hardware: str = "H100"):
    return estimate_time(recipe, ranks, Hardware(hardware))


def test_one_rank_sends_nothing():
    assert count_traffic(make_recipe(), 1).total == 0


def test_muon_has_one_moment_of_matrices_and_sends_their_elements_twice():
    adamw, muon = (
        make_recipe(optimizer={"lr": 1e-3, "kind": kind}, parallel={"tensor": 2})
        for kind in ("adamw", "muon")
    )
    # Eight heads have two queries of 32, and four key-value heads two keys of 32 and a value of 64.
    projections = HIDDEN * (8 * 64 + 4 * 128) + HIDDEN * 512 + 3 * HIDDEN * 1024
    one, other = (memory_by_stage(recipe, 8)[0] for recipe in (adamw, muon))
    assert one.optimizer - other.optimizer == 4 * LAYERS * projections / 8
    # In every round, the first rank owns one matrix. It sends seven eighths of its result, and
    # seven eighths of the elements that it holds. Per layer there are q1, q2 and v [256, 512], k1
    # and k2 [128, 512], linear_proj [512, 512], and gate, up and linear_fc2 [1024, 512].
    sizes = sorted([1024] * 24 + [512] * 8 + [256] * 24 + [128] * 16, reverse=True)
    rounds = [sizes[first : first + 8] for first in range(0, 72, 8)]
    rows = sum(7 / 8 * (each[0] + sum(each) / 8) for each in rounds)
    assert count_traffic(muon, 8).muon == 2 * HIDDEN * rows
    assert count_traffic(adamw, 8).muon == 0


def test_tensor_parallel_sums_twice_a_layer_and_direction():
    """Count two all-reduces per layer in the forward pass, and two in the backward pass.

    The embedding has one all-reduce in the forward pass, and the output layer has one in the
    backward pass. On 4 ranks, each rank sends 2 (4 - 1) / 4 times the bytes of the summed tensor.
    """
    sent = count_traffic(make_recipe(parallel={"tensor": 4}), 4)
    assert sent.tensor == BATCH * (4 * LAYERS + 2) * 2 * 3 / 4 * STATE
    assert sent.total == sent.tensor


def test_sequence_parallel_gathers_the_inputs_again_in_the_backward_pass():
    """Count each all-reduce as a reduce-scatter and an all-gather.

    In addition, there is an all-gather before each weight gradient that needs the whole input: two
    per layer, and one for the output layer.
    """
    layout = {"tensor": 4, "sequence_parallel": True}
    sent = count_traffic(make_recipe(parallel=layout), 4).tensor
    assert sent == BATCH * (2 * (4 * LAYERS + 2) + 2 * LAYERS + 1) * 3 / 4 * STATE


def test_recomputing_repeats_the_forward_passes_communication():
    plain, again = (
        count_traffic(make_recipe(parallel={"tensor": 4}, recompute={"granularity": each}), 4)
        for each in ("none", "full")
    )
    assert again.tensor - plain.tensor == BATCH * LAYERS * 2 * 2 * 3 / 4 * STATE


def test_context_traffic_matches_each_kind_of_communication():
    """Compare the bytes that each kind of communication sends on 4 ranks with 256 tokens each.

    Per token, the keys of both softmax maps have 2 x 4 x 32 channels. The values have as many, and
    the queries of both maps have 2 x 8 x 32 channels.
    """
    tokens, pair, queries = LENGTH // 4, 2 * 2 * 4 * 32, 2 * 8 * 32
    sent = {
        name: count_traffic(
            make_recipe(parallel={"context": 4, "context_communication": name}), 4
        ).context
        for name in ("ring", "all_gather", "ulysses")
    }
    times = BATCH * LAYERS * tokens
    assert sent["all_gather"] == times * 2 * 3 * 2 * pair
    assert sent["ring"] == times * (2 * 3 * 2 * pair + 4 * 4 * pair)
    assert sent["ulysses"] == times * 2 * 2 * (pair + 2 * queries) * 3 / 4


def test_a_ring_sends_only_the_chunks_that_windows_show():
    """Compare bytes and messages of 4 ranks, each with two chunks of 128 tokens, by hand.

    A window of 129 tokens shows one earlier chunk. Rank 1 has the chunks 1 and 6. It sends chunk 1
    to rank 2, which has chunk 2, and chunk 6 to rank 0, which has chunk 7. It receives the chunks 0
    and 5, and returns their gradients. A window of 128 + 130 tokens shows three earlier chunks.
    """
    shard = LENGTH // 4 * 2 * 2 * 4 * 32
    ring = {"context": 4, "context_communication": "ring"}
    attention = {"kind": "diff_v1", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}

    def of_window(window: int | None):
        recipe = make_recipe(parallel=ring, model={"attention": attention | {"window": window}})
        sent, calls = count_traffic(recipe, 4), stage_collectives(recipe, 4, 0)
        return sent.context / (BATCH * LAYERS * shard), calls.context / (BATCH * LAYERS)

    assert of_window(1) == (0, 0)
    for window in (2, 129):
        assert of_window(window) == (2 * 2 + 4, 2 + 2 * 2)
    for window in (LENGTH, 2 * LENGTH):
        assert of_window(window) == of_window(None) == (2 * 2 * 3 + 4 * 4, 3 + 3 + 4)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_windows_save_flops_of_attention_only(backend):
    attention = {"kind": "diff_v1", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    whole, windows, tiny = (
        attention_flops(backend, model={"attention": attention | {"window": window}})
        for window in (None, 256, 1)
    )
    if backend == "reference":
        assert whole == pytest.approx(windows)
        return
    # 256 (1 - 256 / 2048) = 224 visible keys instead of 512, and half a key.
    assert (windows - tiny) / (whole - tiny) == pytest.approx((224 - 1) / (512 - 1), rel=1e-3)


def test_a_stage_in_the_middle_sends_both_ways():
    assert count_traffic(make_recipe(parallel={"pipeline": 2}), 2).pipeline == BATCH * STATE
    layout = make_recipe(parallel={"pipeline": 4})
    assert count_traffic(layout, 4).pipeline == 2 * BATCH * STATE
    assert [stage_traffic(layout, 4, stage).pipeline for stage in (0, 3)] == [BATCH * STATE] * 2
    interleaved = {"pipeline": 4, "virtual_pipeline": 2}
    assert count_traffic(make_recipe(parallel=interleaved), 4).pipeline == 4 * BATCH * STATE


@pytest.mark.parametrize(("trainable", "is_reduced"), [("embedding.*", True), ("decoder.*", False)])
def test_a_pipeline_reduces_a_tied_embedding_that_is_trained(trainable, is_reduced):
    """Check that a pipeline sums the float32 gradient of a tied embedding only if it is trained.

    The first and the last stage sum it. Other trained and frozen tensors have no influence.
    """
    norms = "*input_layernorm.weight"
    recipe = make_recipe(
        parallel={"pipeline": 2},
        model={"tied_embeddings": True},
        optimizer={"lr": 1e-3, "trainable": [trainable, norms]},
    )
    gradient = 4 * 4096 * HIDDEN
    assert count_traffic(recipe, 2).pipeline == BATCH * STATE + is_reduced * gradient
    assert stage_collectives(recipe, 2, 0).pipeline == BATCH + is_reduced


def test_zero_reduces_every_microbatch_from_stage_2_on():
    first, second, third = (
        count_traffic(make_recipe(parallel={"zero_stage": stage}), 8) for stage in (1, 2, 3)
    )
    # ZeRO 1 reduces float32 gradients once per step by an all-reduce, which sends twice as many
    # numbers as the all-gather of the bf16 weights.
    assert first.gradients == 2 * 2 * first.weights
    # 32 sequences are 4 microbatches on each of 8 ranks. In each microbatch, ZeRO 2 reduces bf16
    # gradients by an all-reduce, and ZeRO 3 by a reduce-scatter.
    assert second.gradients == 4 * 2 * second.weights
    assert second.weights == first.weights
    assert third.gradients == pytest.approx(4 * first.weights)
    # DeepSpeed keeps the weights of this small network from the forward to the backward pass, so it
    # gathers them only once per microbatch.
    assert third.weights == pytest.approx(4 * first.weights, rel=1e-3)


def test_collectives_are_counted_by_hand():
    """Compare the collectives of a rank per step with numbers that are counted by hand.

    The network has 8 layers, and a microbatch is one sequence. ``tensor`` includes the two
    reductions of the cross-entropy.
    """

    def calls(ranks: int, stage: int = 0, **parallel: object) -> Traffic:
        return stage_collectives(make_recipe(parallel=parallel), ranks, stage)

    def calls_in_chunks(**parallel: object) -> Traffic:
        training = {"loss_chunk": LENGTH // 4}
        return stage_collectives(make_recipe(parallel=parallel, training=training), 4, 0)

    # Without sequence parallelism, a layer has two all-reduces in the forward pass and two in the
    # backward pass. The embedding and the output layer have one all-reduce each. With sequence
    # parallelism, a layer has two all-gathers and two reduce-scatters in each pass, and two more
    # all-gathers in the backward pass. The embedding has two collectives, and the output layer
    # three.
    assert calls(4, tensor=4).tensor == BATCH * (4 * LAYERS + 2 + 2)
    assert calls(4, tensor=4, sequence_parallel=True).tensor == BATCH * (10 * LAYERS + 5 + 2)
    # Each of the four chunks of the loss has the collectives of the output layer, and four
    # reductions of the cross-entropy: two in the forward pass, and two in the backward pass, which
    # computes the cross-entropy again. The output layer has one collective per chunk. With sequence
    # parallelism it has three, as without chunks. For a network of two layers, these counts are 29
    # and 50 per microbatch. A simulated step of tests/simulated_cuda had the same numbers.
    assert calls_in_chunks(tensor=4).tensor == BATCH * (4 * LAYERS + 1 + 4 * (1 + 4))
    scattered = calls_in_chunks(tensor=4, sequence_parallel=True)
    assert scattered.tensor == BATCH * (10 * LAYERS + 2 + 4 * (3 + 4))
    context = {"context": 4, "context_communication": "ring"}
    assert calls(4, **context).context == BATCH * LAYERS * (3 + 3 + 4)
    assert calls(4, **context | {"context_communication": "ulysses"}).context == BATCH * LAYERS * 4
    assert [calls(4, stage, pipeline=4).pipeline for stage in (0, 1, 3)] == [
        BATCH,
        2 * BATCH,
        BATCH,
    ]
    assert calls(1).total == 0


def test_every_collective_takes_its_latency():
    recipe = make_recipe(parallel={"tensor": 4})
    without, with_latency = (
        estimate_time(recipe, 4, Hardware("H100", Rates(latency=each))) for each in (0.0, 1e-3)
    )
    assert with_latency.collectives == BATCH * (4 * LAYERS + 4)
    more = with_latency.communication - without.communication
    assert more == pytest.approx(1e-3 * with_latency.collectives)


def test_the_bubble_is_the_papers():
    """Compare the bubble with (p - 1) / (m v) of Narayanan et al., arXiv 2104.04473, section 2.2.

    p is the number of pipeline stages, m is the number of microbatches, and v is the number of
    virtual stages per rank.
    """
    layout = {"pipeline": 4, "virtual_pipeline": 2}
    assert bubble_share(make_recipe(parallel=layout), 8) == 3 / 16
    assert estimate(make_recipe(parallel=layout), 4).bubble == 3 / 64


def test_recomputation_costs_time_but_does_not_count_as_utilization():
    plain, again = (
        estimate(make_recipe(recompute={"granularity": each}), 1) for each in ("none", "full")
    )
    # A backward pass takes about twice as long as a forward pass. Recomputation adds a second
    # forward pass, so the ratio is about 4 / 3.
    assert 1.2 < again.compute / plain.compute < 1.4
    assert again.utilization == pytest.approx(plain.utilization * plain.step / again.step)


def test_a_step_is_the_sum_of_its_parts_and_the_run_of_its_steps():
    time = estimate(make_recipe(parallel={"pipeline": 4}), 16)
    assert time.step == time.compute + time.communication + time.idle + time.optimizer
    assert time.days == pytest.approx(100 * time.step / 86_400)
    assert time.tokens_per_second == pytest.approx(BATCH * LENGTH / time.step)


def test_a_network_between_nodes_is_slower_than_links_within():
    """Compare 8 data-parallel ranks, which fill one node, with 16 ranks on two nodes."""
    alone = estimate(make_recipe(), 8)
    across = estimate(make_recipe(), 16)
    assert across.communication > 5 * alone.communication


def test_faster_hardware_is_faster():
    recipe = make_recipe()
    steps = [estimate(recipe, 1, name).step for name in ("A100", "H100", "B200")]
    assert steps == sorted(steps, reverse=True)


def attention_flops(backend: str, **sections: dict) -> float:
    """Return the FLOPs that attention kernels do in the estimated computation time of one sequence.

    The time of attention's memory traffic is subtracted first. The time still includes all other
    operations of the step, so only the difference between two backends has a meaning.
    """
    recipe = make_recipe(training={"attention_backend": backend}, **sections)
    gpu, assumed = ACCELERATORS["H100"], Rates()
    kept = sum(attention_bytes_per_token(recipe, "gpu", recipe.model.attention.kinds[0])[1:])
    moved = 2 * kept * LENGTH * LAYERS / (assumed.memory * gpu.memory_bandwidth)
    return (estimate(recipe, 1).compute / BATCH - moved) * assumed.attention * gpu.peak_flops


# Multiply-adds of the forward pass plus those of the backward pass, per head and visible
# (query, key) pair, in units of d (head_dim). The reference has the factor 2 because it also
# computes the masked pairs. For d = 64, Triton's backward pass computes each pair only once.
WORK = {"reference": 2 * (4 + 8), "blocked": 4 + 10, "triton": 6 + 10, "flash_4call": 8 + 20}


@pytest.mark.parametrize("backend", WORK)
def test_the_time_of_attention_is_that_of_the_backend(backend):
    more = attention_flops(backend, model=WIDE) - attention_flops("flash_2call", model=WIDE)
    unit = 2 * 8 * 64 * LENGTH * LENGTH / 2 * LAYERS
    assert more / unit == pytest.approx(WORK[backend] - (6 + 14), abs=1e-3)


def test_deterministic_triton_computes_a_pair_twice_in_the_backward_pass():
    settings = {"attention_backend": "triton"}
    one_pass, split = (
        estimate(make_recipe(model=WIDE, training=settings | {"deterministic": each}), 1).compute
        for each in (False, True)
    )
    more = (split - one_pass) / BATCH * Rates().attention * ACCELERATORS["H100"].peak_flops
    unit = 2 * 8 * 64 * LENGTH * LENGTH / 2 * LAYERS
    assert more / unit == pytest.approx(14 - 10, abs=1e-3)


def test_auto_is_planned_as_sdpa_4call():
    auto, named = (
        make_recipe(training={"attention_backend": each}) for each in ("auto", "sdpa_4call")
    )
    assert estimate(auto, 1) == estimate(named, 1)
    assert memory_by_stage(auto, 1) == memory_by_stage(named, 1)


def test_the_reference_keeps_all_maps():
    """Compare the reference with blocked attention by the bytes that only the reference keeps.

    Let s be the sequence length. Each of the 8 heads has two softmax maps. Each map keeps its
    softmax and a second matrix of the same size, both [s, s] in bf16. A layer also keeps one mask
    [s, s] per map, with one byte per (query, key) pair, which all heads share.

    The 4 key-value heads are repeated for 8 heads. A layer therefore keeps copies of 4 key-value
    heads in bf16. Each has two keys of 32 channels and a value of 64 channels per token.
    """
    keeps, fused = (
        memory_by_stage(make_recipe(training={"attention_backend": each}), 1)[0].activations
        for each in ("reference", "blocked")
    )
    maps, masks, copies = 2 * 8 * LENGTH * 2 * 2, 2 * LENGTH, 2 * 4 * (32 + 32 + 64)
    assert keeps - fused == LAYERS * LENGTH * (maps + masks + copies)


def test_a_backend_that_cannot_run_the_recipe_is_refused():
    recipe = make_recipe(training={"attention_backend": "triton"})
    with pytest.raises(UserError, match="'triton' cannot run: it takes head_dim 64, 80, 96"):
        estimate(recipe, 1)


def test_offloading_the_optimizer_costs_time():
    plain, away = (
        estimate(make_recipe(parallel={"offload_optimizer": each}), 1) for each in (False, True)
    )
    assert away.optimizer > 10 * plain.optimizer


def hidden(*overrides: str, ranks: int = 64) -> float:
    """Return the seconds per step that a run saves if gradients are summed in the backward pass.

    Args:
        overrides: overrides of the recipe diff_3b_1t.
        ranks: number of ranks.
    """
    on, off = (
        estimate(load_recipe(CONFIGS / "diff_3b_1t.yaml", [*overrides, *more]), ranks)
        for more in ([], ["parallel.overlap_gradients=false"])
    )
    assert on.compute == off.compute
    assert off.step - on.step == pytest.approx(off.communication - on.communication)
    return off.communication - on.communication


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_hide_behind_one_microbatchs_backward_pass(size, recompute):
    """Check that the backward pass of only one microbatch per step hides communication.

    A backward pass takes two thirds of the time of a microbatch, or three quarters with
    recomputation. The backward pass of attention takes slightly more.
    """
    overrides = [
        f"training.micro_batch_size={size}",
        f"recompute.granularity={recompute}",
        # With a slower backend, the longest of these backward passes would be longer than the
        # communication of all gradients.
        "training.attention_backend=triton",
    ]
    recipe = load_recipe(CONFIGS / "diff_3b_1t.yaml", overrides)
    one = estimate(recipe, 64).compute / recipe.num_microbatches(64)
    share = 2 / 3 if recompute == "none" else 3 / 4
    assert hidden(*overrides) == pytest.approx(share * one, rel=0.05)


def test_gradients_reduced_with_the_embedding_are_not_hidden():
    recipe = load_recipe(CONFIGS / "diff_3b_1t.yaml", ["training.micro_batch_size=16"])
    parameters = sum(trained_parameters(recipe, 0))
    embedding = recipe.model.vocab_size * recipe.model.hidden_size
    gradients = count_traffic(recipe, 64).gradients / (0.7 * 50e9)
    expected = gradients * (1 - embedding / parameters)
    assert hidden("training.micro_batch_size=16") == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline=2"],
        ["parallel.zero_stage=2"],
        ["parallel.zero_stage=3"],
        ["parallel.offload_optimizer=true"],
    ],
)
def test_gradients_hide_only_with_zero_1_and_without_pipeline(overrides):
    assert hidden(*overrides) == 0


def test_the_search_chooses_larger_microbatches_with_overlap():
    recipe = load_recipe(CONFIGS / "diff_3b_1t.yaml")
    best = search(recipe, 64, "H100")[0]
    after = search(
        load_recipe(CONFIGS / "diff_3b_1t.yaml", ["parallel.overlap_gradients=false"]), 64, "H100"
    )[0]
    assert best.time.step < after.time.step
    assert best.layout.micro_batch_size > after.layout.micro_batch_size
