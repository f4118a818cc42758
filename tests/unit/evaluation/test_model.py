"""Tests of loading a target's network with transformers."""

import json
from pathlib import Path

import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained


def network_of(folder: Path) -> object:
    (target,) = find_targets([folder], folder / "out")
    return Model(target).network


def test_an_attention_function_in_config_json_is_ignored_or_refused(tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "hf", "llama 2")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"attn_implementation": "flash_attention_2"}))
    assert network_of(folder).config._attn_implementation == "sdpa"
    path.write_text(json.dumps(values | {"attn_implementation": "kernels-community/flash-attn"}))
    with pytest.raises(UserError, match=r"attn_implementation .* would be downloaded"):
        network_of(folder)


def test_an_adapter_beside_a_model_is_an_error(tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "hf", "llama 2")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json .* would be ignored"):
        network_of(folder)
