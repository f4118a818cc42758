"""Gradients of a lone rank, against DeepSpeed's own reduction of them."""

import pytest
import torch

from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.optim import zero
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups

LENGTH, VOCABULARY = 8, 64


def make_recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "attention": {"kind": "diff_v1", "num_heads": 2, "head_dim": 8},
                "ffn_hidden_size": 64,
                "vocab_size": VOCABULARY,
            },
            "data": {"sources": [{"path": "unused"}]},
            "training": {
                "seq_length": LENGTH,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "steps": 10,
                "precision": "fp32",
            },
            "optimizer": {"lr": 1e-2, "clip_grad_norm": 0.5},
        }
    )


def trained(steps: list[str]) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Norms and weights after steps of two microbatches: applied, refused or with a NaN."""
    recipe, norms = make_recipe(), []
    generator = torch.Generator().manual_seed(0)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with ZeroEngine(network, recipe, parallel_state) as engine:
            for step in steps:
                for _ in range(2):
                    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
                    positions = torch.arange(LENGTH).expand(2, -1)
                    losses = engine(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
                    engine.backward(losses.mean() * (torch.nan if step == "nan" else 1.0))

                def allow(norm: torch.Tensor, step: str = step) -> bool:
                    norms.append(float(norm))
                    return step == "applied"

                engine.step(1e-2, allow)
            weights = {name: p.detach().clone() for name, p in network.named_parameters()}
            return norms, weights, engine._flat is not None


@pytest.mark.parametrize(
    "steps",
    [["applied"] * 3, ["applied", "refused", "applied"], ["nan", "applied", "nan", "applied"]],
    ids=["applied", "refused", "not finite"],
)
def test_weights_and_norms_are_deepspeeds_to_the_last_bit(steps, monkeypatch):
    own_norms, own, is_flat = trained(steps)
    assert is_flat
    monkeypatch.setattr(zero, "is_alone", lambda _: False)
    norms, weights, is_flat = trained(steps)
    assert not is_flat
    assert own_norms == norms
    assert own.keys() == weights.keys()
    assert not [name for name in own if not torch.equal(own[name], weights[name])]
