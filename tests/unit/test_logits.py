"""The largest attention logit against every logit, written out."""

import math

import pytest
import torch

from diffmegatron.attention.core import DifferentialCoreAttention, SoftmaxCoreAttention
from diffmegatron.model.build import build_model
from diffmegatron.parallel.topology import process_groups
from diffmegatron.training import logits
from diffmegatron.training.logits import largest_logits


def every_logit(query, key, documents):
    """[s, b, heads, d] and [s, b, groups, d]: the logits of pairs that attention sees, one list."""
    length, rows, heads, d = query.shape
    document = torch.bucketize(torch.arange(length * rows), documents[1:], right=True)
    document = document.view(rows, length)
    found = []
    for row in range(rows):
        for head in range(heads):
            keys = key[:, row, head * key.shape[2] // heads]
            products = query[:, row, head].double() @ keys.double().T / math.sqrt(d)
            seen = torch.ones(length, length).tril().bool()
            seen &= document[row][:, None] == document[row][None]
            found.append(products[seen])
    return torch.cat(found)


@pytest.mark.parametrize("attention", ["differential", "softmax"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_of_all(attention, packed, tiny_recipe, monkeypatch):
    recipe = tiny_recipe(f"model.attention={attention}", "model.initialization.std=0.5")
    monkeypatch.setattr(logits, "_QUERIES", 24)
    expected = {}

    def look(module, arguments, named):
        given = [*arguments, *named.values()]
        ends = given[3] if packed else torch.tensor([0, 64, 128])
        expected[module.layer_number] = every_logit(given[0], given[1], ends).max().item()

    with process_groups(recipe.parallel, 1) as topology:
        network = build_model(recipe, topology).eval()
        for module in network.modules():
            if isinstance(module, DifferentialCoreAttention | SoftmaxCoreAttention):
                module.register_forward_pre_hook(look, with_kwargs=True)
        tokens = torch.arange(128).view(2, 64) % 257
        documents = torch.tensor([0, 10, 64, 100, 128], dtype=torch.int32) if packed else None
        positions = torch.arange(64).expand(2, 64)
        with torch.no_grad():
            found = largest_logits(network, lambda: network(tokens, positions, documents))
            again = dict(expected)
            network(tokens, positions, documents)
    assert found == pytest.approx(again, rel=1e-5)
    assert list(found) == [1, 2] and max(found.values()) > 1


def test_nan_is_told(tiny_recipe):
    recipe = tiny_recipe()
    with process_groups(recipe.parallel, 1) as topology, torch.no_grad():
        network = build_model(recipe, topology).eval()
        (weight,) = (
            parameter
            for name, parameter in network.named_parameters()
            if name.endswith("layers.1.self_attention.linear_qkv.weight")
        )
        weight[3] = math.nan
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        found = largest_logits(network, lambda: network(tokens, tokens, None))
    assert math.isfinite(found[1]) and math.isnan(found[2])
