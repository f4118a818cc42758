"""Random patterns (networks with several kinds of attention): each trains, plans and exports."""

import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from diffmegatron.checkpoint.weights import write_checkpoint
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.kinds import export_problem, read_attention
from diffmegatron.hf.modeling import MixedDiffConfig
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.plan.summary import plan_recipe

PATTERNS = 24
LAYERS = 4
# Fewer tokens than the export's comparison of logits has.
WINDOW = 20


def random_kind(draw: random.Random) -> dict[str, Any]:
    """Return a section of ``model.attention`` with heads of width 8."""
    ratio, kv_heads = draw.choice([1, 2]), draw.choice([1, 2])
    heads = ratio * kv_heads * draw.choice([1, 2, 4])
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8}
    kind = draw.choice(["softmax", "diff_v1", "diff_v2", "grouped"])
    values: dict[str, Any] = {"kind": kind, **sizes}
    if kind in ("diff_v2", "grouped"):
        values["signal_per_noise"] = ratio
    if kind == "softmax":
        extra = draw.choice([None, None, "qk_norm", "qkv_bias", "headwise_norm"])
        values |= {} if extra is None else {extra: True}
    else:
        values["qk_norm"] = draw.choice([True, False])
    values |= draw.choice([{}, {"window": WINDOW}])
    if "qkv_bias" not in values:
        gate = draw.choice([None, "elementwise", "headwise"])
        values |= {} if gate is None else {"output_gate": gate}
    if kind in ("diff_v1", "grouped"):
        values["headwise_norm"] = draw.choice([True, False])
        if draw.choice([True, False]):
            values["lambda_init"] = {"policy": "constant", "value": 0.4}
    return values


def random_pattern(draw: random.Random) -> list[dict[str, Any]]:
    """Return two or three entries; the last one has the remaining layers."""
    *some, last = (random_kind(draw) for _ in range(draw.choice([2, 3])))
    layers = draw.sample(range(1, LAYERS + 1), len(some))
    return [{**kind, "layers": layer} for kind, layer in zip(some, layers, strict=True)] + [last]


@pytest.mark.parametrize("hidden", [60, 64])
def test_random_patterns_train_plan_and_export(tiny_recipe, tmp_path, hidden):
    """Check a step of SGD, the plan, the export's logits and the import of each pattern.

    Eight heads do not divide a hidden size of 60, which some classes of Hugging Face refuse.
    """
    draw, refused = random.Random(hidden), 0
    for number in range(PATTERNS // 2):
        entries = random_pattern(draw)
        recipe = tiny_recipe(
            f"model.num_layers={LAYERS}",
            f"model.hidden_size={hidden}",
            f"model.attention={entries}",
        )
        plan = plan_recipe(recipe)
        with process_groups(recipe.parallel, seed=number) as parallel_state:
            network = build_model(recipe, parallel_state)
            tokens = torch.randint(0, 257, (1, 16))
            network(tokens, labels=tokens).mean().backward()
            weights: dict[str, Tensor] = {}
            for parameter, shards in parameter_shards(network).items():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), entries
                value = (parameter - 0.5 * parameter.grad).detach()
                for shard in shards:
                    whole = weights.setdefault(shard.name, torch.empty(shard.global_shape))
                    whole[shard.box] = shard.view(value)
        assert plan.parameters.total == sum(weight.numel() for weight in weights.values())
        checkpoint = write_checkpoint(weights.items(), recipe, tmp_path / f"run{number}")
        problem = export_problem(recipe.model.attention, hidden, recipe.model.num_layers)
        if problem is not None:
            refused += 1
            assert problem in plan.warnings
            with pytest.raises(UserError, match="never has the headwise norm"):
                export_checkpoint(checkpoint, tmp_path / f"hf{number}")
            continue
        verified = export_checkpoint(checkpoint, tmp_path / f"hf{number}")
        assert verified is not None and verified.relative < 1e-4, entries
        config = json.loads((tmp_path / f"hf{number}/config.json").read_text())
        imported, trained = read_attention(config), recipe.model.attention
        assert imported.layers == trained.layers
        assert [each.heads for each in imported.kinds] == [each.heads for each in trained.kinds]
        assert [each.window for each in imported.kinds] == [each.window for each in trained.kinds]
    assert refused < PATTERNS // 4


def test_a_layer_beyond_the_last_is_refused_by_the_recipe():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    config = MixedDiffConfig(
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        layer_kinds=[{"model_type": "gated_llama", "layers": "1-3", **heads}],
        **heads,
    )
    values = config.to_dict() | {"qk_norm": False, "output_gate": None}
    with pytest.raises(ValueError, match=r"layers '2-3', and model\.num_layers is 2; give numbers"):
        read_attention(values).sized(64, num_layers=2)
