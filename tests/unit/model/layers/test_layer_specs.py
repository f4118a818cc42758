"""The choice of the library for the layers (the host): Transformer Engine or Megatron-core."""

import pytest

from diffmegatron.config.model_config import LoraConfig
from diffmegatron.model.layers import layer_specs

LORA = LoraConfig(rank=4, alpha=8)


@pytest.mark.parametrize(
    ("has_te", "has_gpu", "lora", "host"),
    [
        (True, True, None, "transformer_engine"),
        # A container image for GPUs may run on a login node without a GPU. There Transformer Engine
        # can be imported, but cannot build a module.
        (True, False, None, "local"),
        (False, True, None, "local"),
        (True, True, LORA, "local"),
    ],
)
def test_transformer_engine_is_used_if_importable_on_a_gpu_without_lora(
    has_te, has_gpu, lora, host, monkeypatch
):
    monkeypatch.setattr(layer_specs, "HAVE_TE", has_te)
    monkeypatch.setattr(layer_specs.torch.cuda, "is_available", lambda: has_gpu)
    assert layer_specs.available_host(lora) == host
