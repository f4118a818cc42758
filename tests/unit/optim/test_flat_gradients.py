"""Training with flat gradients on a single rank, compared with DeepSpeed's own reduction."""

import pytest
import torch

from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.optim import zero
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups

LENGTH, VOCABULARY = 8, 64


def make_recipe(precision: str) -> Recipe:
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
                "precision": precision,
            },
            "optimizer": {"lr": 1e-2, "clip_grad_norm": 0.5},
        }
    )


def trained(precision: str, steps: list[str]) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Train, and return the norm of each step, the final weights, and whether gradients were flat.

    Args:
        precision: value of ``training.precision``.
        steps: one word for each step of two microbatches: "applied", "refused" (the update is
            rejected) or "nan" (the loss is NaN, and the update is rejected).
    """
    recipe, norms = make_recipe(precision), []
    generator = torch.Generator().manual_seed(0)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with ZeroEngine(network, recipe, parallel_state) as engine:
            for step in steps:
                for is_last in (False, True):
                    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
                    losses = engine(tokens[:, :-1], labels=tokens[:, 1:])
                    factor = torch.nan if step == "nan" else 1.0
                    engine.backward(losses.mean() * factor, is_last=is_last)

                def allow(norm: torch.Tensor, step: str = step) -> bool:
                    norms.append(float(norm))
                    return step == "applied"

                engine.step(1e-2, allow)
            weights = {name: p.detach().clone() for name, p in network.named_parameters()}
            return norms, weights, engine._reduction is not None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "steps",
    [["applied"] * 3, ["applied", "refused", "applied"], ["nan", "applied", "nan", "applied"]],
    ids=["applied", "refused", "not finite"],
)
def test_weights_and_norms_are_deepspeeds_to_the_last_bit(steps, precision, monkeypatch):
    own_norms, own, is_flat = trained(precision, steps)
    assert is_flat
    monkeypatch.setattr(zero, "flat_gradients", lambda _: None)
    norms, weights, is_flat = trained(precision, steps)
    assert not is_flat
    assert own_norms == norms
    assert own.keys() == weights.keys()
    assert not [name for name in own if not torch.equal(own[name], weights[name])]
