"""The code of docs/in_your_megatron.md runs unchanged and trains a network."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from diffmegatron.attention.kinds import AttentionKind
from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.attention.kinds.diff_v2 import DiffV2
from diffmegatron.attention.kinds.grouped import Grouped
from diffmegatron.attention.kinds.kind import sized
from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.model.layers.layer_specs import layer_spec
from diffmegatron.model.layers.self_attention import SelfAttention
from diffmegatron.parallel.parallel_state import process_groups

PAGE = Path(__file__).parents[4] / "docs" / "in_your_megatron.md"
HIDDEN = 256


def run_page(version: int = 1) -> dict[str, Any]:
    """Run the code blocks of the page in order with DIFF V1 or V2, and return their variables."""
    names: dict[str, Any] = {}
    text = PAGE.read_text().replace("diff_v1", f"diff_v{version}")
    text = text.replace("DiffV1", f"DiffV{version}")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """Return the variables of the page's code."""
    return run_page()


def test_the_page_runs_with_diff_v2_and_prints_no_warning(caplog):
    ran = run_page(version=2)
    assert ran["losses"][2] < ran["losses"][0] and ran["lambdas"] == [[], [], []]
    assert "RNG state" not in caplog.text


def test_the_loss_starts_at_chance_and_falls(ran):
    losses = [loss.item() for loss in ran["losses"]]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[2] < losses[1] < losses[0]


def test_every_parameter_has_a_gradient_and_lambda_moves(ran):
    for name, parameter in ran["model"].named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    first, _, last = ran["lambdas"]
    for number, (before, after) in enumerate(zip(first, last, strict=True)):
        assert before == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * number), abs=0.4)
        assert abs(after - before) > 1e-4


def build(kind: AttentionKind, **config: Any) -> SelfAttention:
    attention = sized(kind, HIDDEN)
    torch.manual_seed(5)
    module: SelfAttention = build_module(
        layer_spec(attention, "local").submodules.self_attention,
        config=TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            num_attention_heads=attention.heads.queries,
            num_query_groups=attention.heads.blocks,
            kv_channels=attention.heads.head_dim,
            add_bias_linear=False,
            init_method=lambda weight: torch.nn.init.normal_(weight, 0.0, 0.05),
            **config,
        ),
        layer_number=1,
    )
    return module


@pytest.mark.parametrize(
    ("kind", "deviations"),
    [
        (DiffV1(num_heads=1), dict.fromkeys(["lambda_q1", "lambda_k2"], 0.1)),
        (Grouped(num_heads=2, signal_per_noise=2, lambda_std=0.3), {"lambda_k1": 0.3}),
        (DiffV2(num_heads=8), {"lambda_proj": 0.05}),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_random_parameters_have_the_declared_deviation(kind, deviations):
    with process_groups(ParallelConfig(), seed=1):
        module = build(kind)
        for name, deviation in deviations.items():
            assert getattr(module, name).std().item() == pytest.approx(deviation, rel=0.25)


def test_norms_start_at_one_and_the_bias_at_zero():
    with process_groups(ParallelConfig(), seed=1):
        assert bool((build(DiffV1(num_heads=1)).head_norm == 1).all())
        plain = build(Softmax(num_heads=4, qkv_bias=True, qk_norm=True))
        assert bool((plain.q_norm == 1).all()) and not plain.linear_qkv.bias.any()


def test_another_rotary_embedding_is_refused():
    with (
        process_groups(ParallelConfig(), seed=1),
        pytest.raises(ValueError, match="rotary_interleaved is True"),
    ):
        build(DiffV1(num_heads=1), rotary_interleaved=True)


def test_building_without_initialization_draws_no_random_numbers():
    """Check that ``perform_initialization=False`` leaves torch's random state unchanged.

    This project's own runs use this setting. They set the weights after the network is built, and
    the random numbers of each weight come from a seed that depends on the weight's name.
    """
    with process_groups(ParallelConfig(), seed=1):
        torch.manual_seed(5)
        expected = torch.get_rng_state()
        build(DiffV1(num_heads=1), perform_initialization=False)
        assert bool((torch.get_rng_state() == expected).all())
