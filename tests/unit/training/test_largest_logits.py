"""The largest attention logit, compared with the maximum of all logits that the test computes."""

import math

import pytest
import torch

from diffmegatron.attention.kinds.layer import numbered
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.model.layers.self_attention import SelfAttention
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.monitoring import attention_logits
from diffmegatron.training.monitoring.attention_logits import observed_logits

GROUPED = ("model.attention.kind=grouped", "model.attention.signal_per_noise=2")
# Each kind has overrides of the tiny recipe, and lists with the key head and the map of each query
# head. The tiny recipe has four differential heads and two key-value heads. In DIFF V1 and grouped
# attention, each map has its own key heads.
KINDS = {
    "diff_v1": ((), [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 0, 0, 1, 1]),
    "softmax": (("model.baseline=true",), [0, 0, 1, 1, 2, 2, 3, 3], [0] * 8),
    "diff_v2": (("model.attention.kind=diff_v2",), [0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4),
    "grouped": (GROUPED, [0, 0, 1, 2, 2, 3], [0, 0, 1, 0, 0, 1]),
}


def every_logit(query, key, documents, meets, window):
    """Return the logits of all visible (query, key) pairs, [heads, number of pairs].

    Args:
        query: queries [s, b, heads, d].
        key: keys [s, b, key heads, d].
        documents: start of each document in the concatenated rows, followed by the total length.
        meets: key head of each query head.
        window: number of positions that a query sees, its own included.
    """
    length, rows, heads, d = query.shape
    assert (heads, key.shape[2]) == (len(meets), max(meets) + 1)
    document = torch.bucketize(torch.arange(length * rows), documents[1:], right=True)
    document = document.view(rows, length)
    by_head = []
    for head in range(heads):
        found = []
        for row in range(rows):
            products = query[:, row, head].double() @ key[:, row, meets[head]].double().T
            seen = torch.ones(length, length).tril().triu(1 - window).bool()
            seen &= document[row][:, None] == document[row][None]
            found.append(products[seen] / math.sqrt(d))
        by_head.append(torch.cat(found))
    return torch.stack(by_head)


# Boundaries of the documents in two rows of 64 tokens.
ENDS = [0, 10, 64, 100, 128]


def a_batch(packed):
    """Return two rows of 64 tokens; if ``packed``, each row has two documents."""
    tokens = torch.arange(128).view(2, 64) % 257
    return Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(2, 64),
        cu_seqlens=torch.tensor(ENDS, dtype=torch.int32) if packed else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_the_largest_logit_of_every_map_is_found(kind, packed, window, tiny_recipe, monkeypatch):
    overrides, meets, maps = KINDS[kind]
    if window is not None:
        overrides += (f"model.attention.window={window}",)
    recipe = tiny_recipe(*overrides, "model.initialization.std=0.5")
    monkeypatch.setattr(attention_logits, "_LOGITS", 6000)
    kind, expected = type(recipe.model.attention.kinds[0]), {}
    forward = kind.forward
    ends = torch.tensor(ENDS if packed else [0, 64, 128])

    def look(kind, layer, context, query, key, *others):
        by_position = (query.transpose(0, 1), key.transpose(0, 1))
        logits = every_logit(*by_position, ends, meets, window or 64)
        expected[layer.layer_number] = [
            logits[[n for n, each in enumerate(maps) if each == number]].max().item()
            for number in sorted({*maps})
        ]
        return forward(kind, layer, context, query, key, *others)

    monkeypatch.setattr(kind, "forward", look)
    with process_groups(recipe.parallel, 1) as parallel_state, torch.no_grad():
        network = build_model(recipe, parallel_state).eval()
        with observed_logits(network) as found:
            summed_loss(network, a_batch(packed))
    assert list(found) == [1, 2]
    for layer, values in found.items():
        assert values.tolist() == pytest.approx(expected[layer], rel=1e-5)
        assert values.max() > 1


@pytest.mark.parametrize("names", [("signal", "noise"), ("first", "second", "third")])
def test_matrices_may_have_any_names(names, tiny_recipe, monkeypatch):
    recipe = tiny_recipe("model.attention.kind=diff_v2", "model.initialization.std=0.5")
    kind = type(recipe.model.attention.kinds[0])
    found = []
    for queries in (("q1", "q2") * 2, (*names, *names)[:4]):
        matrices = numbered((*queries, "k", "v"))
        monkeypatch.setattr(kind, "matrices", property(lambda _, matrices=matrices: matrices))
        with process_groups(recipe.parallel, 1) as parallel_state, torch.no_grad():
            network = build_model(recipe, parallel_state).eval()
            with observed_logits(network) as each:
                network(torch.arange(64)[None])
        found.append(each[1])
    expected = found[0] if len(names) == 2 else found[0].amax(0, keepdim=True)
    assert torch.equal(found[1], expected)


def test_one_pass_is_observed_on_request(tiny_recipe):
    recipe = tiny_recipe("model.initialization.std=0.5")
    with process_groups(recipe.parallel, 1) as parallel_state, torch.no_grad():
        network = build_model(recipe, parallel_state).eval()
        found = []
        for batches, once in ((1, True), (2, True), (2, False)):
            with observed_logits(network, once=once) as each:
                for row in range(batches):
                    network(torch.arange(row, row + 64)[None])
            found.append(torch.stack([each[1], each[2]]))
    assert torch.equal(found[0], found[1])
    assert (found[2] >= found[1]).all() and not torch.equal(found[2], found[1])


def test_observers_are_removed_even_if_the_pass_fails(tiny_recipe):
    recipe = tiny_recipe()
    with process_groups(recipe.parallel, 1) as parallel_state:
        network = build_model(recipe, parallel_state).eval()
        with pytest.raises(ZeroDivisionError), observed_logits(network):
            raise ZeroDivisionError
    layers = [module for module in network.modules() if isinstance(module, SelfAttention)]
    assert [layer.observer for layer in layers] == [None, None]


def test_a_nan_logit_is_reported(tiny_recipe):
    recipe = tiny_recipe()
    with process_groups(recipe.parallel, 1) as parallel_state, torch.no_grad():
        network = build_model(recipe, parallel_state).eval()
        (weight,) = (
            parameter
            for name, parameter in network.named_parameters()
            if name.endswith("layers.1.self_attention.linear_qkv.weight")
        )
        weight[3] = math.nan
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        with observed_logits(network) as found:
            network(tokens)
    assert found[1].isfinite().all() and found[2].isnan().any()
