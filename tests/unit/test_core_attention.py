"""The hosted core attention against the paper's equations, written head by head in float64."""

import math

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from diffmegatron.attention.core import (
    LAMBDA_VECTORS,
    DifferentialCoreAttention,
    SoftmaxCoreAttention,
)
from diffmegatron.config.parallel import ParallelConfig
from diffmegatron.config.schema import ModelConfig
from diffmegatron.model.build import transformer_config
from diffmegatron.parallel.topology import process_groups

LENGTH, BATCH, D = 11, 2, 8


def model(**changes: object) -> ModelConfig:
    sizes = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "head_dim": D,
        "ffn_hidden_size": 64,
        "vocab_size": 64,
    }
    return ModelConfig(**(sizes | changes))


def build(kind, config: ModelConfig, tiny_recipe, layer: int = 2):
    recipe = tiny_recipe().model_copy(update={"model": config})
    return kind(
        config=transformer_config(recipe),
        layer_number=layer,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        model=config,
        backend="reference",
    )


def inputs(config: ModelConfig):
    generator = torch.Generator().manual_seed(3)
    heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    return [torch.randn(LENGTH, BATCH, n, D, generator=generator) for n in heads]


def softmax_map(q, k):
    """Causal softmax of one head's scores, float64 [s, s]."""
    scores = (q @ k.T) / math.sqrt(D)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)


def paper_output(module, config: ModelConfig, q, k, v, lambda_init: float):
    """Equations 1 to 3 of the paper for every batch row and head, [s, b, h 2d] float64."""
    q, k, v = q.double(), k.double(), v.double()
    vectors = [getattr(module, name).detach().double() for name in LAMBDA_VECTORS]
    lambda_ = math.exp(vectors[0] @ vectors[1]) - math.exp(vectors[2] @ vectors[3]) + lambda_init
    repeat = config.num_heads // config.num_kv_heads
    out = torch.empty(LENGTH, BATCH, config.num_heads, 2 * D, dtype=torch.float64)
    for row in range(BATCH):
        for head in range(config.num_heads):
            group, number = divmod(head, repeat)
            first, second = 2 * group, 2 * group + 1
            q1 = q[:, row, first * repeat + number]
            q2 = q[:, row, second * repeat + number]
            value = torch.cat([v[:, row, first], v[:, row, second]], dim=-1)
            maps = softmax_map(q1, k[:, row, first]), softmax_map(q2, k[:, row, second])
            heads = (maps[0] - lambda_ * maps[1]) @ value
            if module.norm is not None:
                rms = torch.sqrt((heads**2).mean(-1, keepdim=True) + config.norm_eps)
                heads = (1 - lambda_init) * heads / rms * module.norm.weight.double()
            out[:, row, head] = heads
    return out.flatten(2)


def randomise(module):
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
        for name in LAMBDA_VECTORS:
            getattr(module, name).mul_(0.3)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("headwise_norm", [True, False])
def test_differential_attention_is_the_papers(kv_heads, headwise_norm, tiny_recipe):
    config = model(num_kv_heads=kv_heads, headwise_norm=headwise_norm)
    with process_groups(ParallelConfig(), seed=1):
        module = build(DifferentialCoreAttention, config, tiny_recipe)
        randomise(module)
        q, k, v = inputs(config)
        output = module(q, k, v, None)
        expected = paper_output(module, config, q, k, v, 0.8 - 0.6 * math.exp(-0.3))
    assert output.shape == (LENGTH, BATCH, config.num_attention_heads * D)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [1, 3])
def test_lambda_init_belongs_to_the_layer_number_from_one(layer, tiny_recipe):
    with process_groups(ParallelConfig(), seed=1):
        module = build(DifferentialCoreAttention, model(), tiny_recipe, layer)
    assert module.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * (layer - 1)))
    assert module.current_lambda().item() == pytest.approx(module.lambda_init)


@pytest.mark.parametrize("headwise_norm", [True, False])
def test_the_twin_is_plain_attention(headwise_norm, tiny_recipe):
    config = model(attention="softmax", num_kv_heads=2, headwise_norm=headwise_norm)
    with process_groups(ParallelConfig(), seed=1):
        module = build(SoftmaxCoreAttention, config, tiny_recipe)
        q, k, v = inputs(config)
        output = module(q, k, v, None).view(LENGTH, BATCH, -1, D)
    repeat = config.num_attention_heads // config.num_query_groups
    for row in range(BATCH):
        for head in range(config.num_attention_heads):
            group = head // repeat
            maps = softmax_map(q[:, row, head].double(), k[:, row, group].double())
            expected = maps @ v[:, row, group].double()
            if headwise_norm:
                expected /= torch.sqrt((expected**2).mean(-1, keepdim=True) + config.norm_eps)
            torch.testing.assert_close(
                output[:, row, head].double(), expected, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("attention", ["differential", "softmax"])
def test_attention_stays_within_packed_documents(attention, tiny_recipe):
    """Two rows of two documents each are four separate documents."""
    config = model(attention=attention, num_kv_heads=2)
    kind = DifferentialCoreAttention if config.is_differential else SoftmaxCoreAttention
    ends = torch.tensor([0, 4, LENGTH, LENGTH + 7, 2 * LENGTH])
    with process_groups(ParallelConfig(), seed=1):
        module = build(kind, config, tiny_recipe)
        q, k, v = inputs(config)
        packed = module(q, k, v, ends)
        crossing = module(q, k, v, None)
        for row, first, last in ((0, 0, 4), (0, 4, LENGTH), (1, 0, 7), (1, 7, LENGTH)):
            alone = [tensor[first:last, row : row + 1] for tensor in (q, k, v)]
            torch.testing.assert_close(
                packed[first:last, row : row + 1], module(*alone, None), rtol=1e-5, atol=1e-5
            )
    assert not torch.allclose(packed, crossing, atol=1e-2)


def test_own_parameters_stay_float32_in_a_bf16_model(tiny_recipe):
    with process_groups(ParallelConfig(), seed=1):
        module = build(DifferentialCoreAttention, model(), tiny_recipe)
        randomise(module)
        before = {name: value.clone() for name, value in module.named_parameters()}
        module.bfloat16()
        q, k, v = (tensor.bfloat16() for tensor in inputs(model()))
        assert module(q, k, v, None).dtype == torch.bfloat16
    for name, value in module.named_parameters():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
