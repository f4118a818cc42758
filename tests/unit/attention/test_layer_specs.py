"""Which host the layers take."""

import pytest

from diffmegatron.attention import layer_specs
from diffmegatron.config.lora_config import LoraConfig

LORA = LoraConfig(rank=4, alpha=8)


@pytest.mark.parametrize(
    ("has_te", "has_gpu", "lora", "host"),
    [
        (True, True, None, "transformer_engine"),
        # A GPU image on a login node: Transformer Engine imports and builds no module.
        (True, False, None, "local"),
        (False, True, None, "local"),
        (True, True, LORA, "local"),
    ],
)
def test_transformer_engine_is_taken_where_it_imports_and_a_gpu_is_there(
    has_te, has_gpu, lora, host, monkeypatch
):
    monkeypatch.setattr(layer_specs, "HAVE_TE", has_te)
    monkeypatch.setattr(layer_specs.torch.cuda, "is_available", lambda: has_gpu)
    assert layer_specs.available_host(lora) == host
