"""The code of docs/python.md, and imports of ``diffmegatron`` without torch and warnings."""

import importlib
import math
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

import diffmegatron.attention
from diffmegatron.attention.kernels import api
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "python.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create the files that the code of docs/python.md reads, and return the code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} times {number}. " * 40)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M))


def test_the_page_runs(page):
    names: dict = {}
    exec(compile(page, str(PAGE), "exec"), names)
    assert names["finished"] and len(names["losses"]) == 4 and names["losses"][-1] < 5.5
    assert names["difference"].relative < 1e-5
    assert (Path("runs/first/hf") / "model.safetensors").is_file()
    # The page also calls the kernels directly. The normed heads must equal the norm's equation. A
    # head of DIFF V2 must equal the first plain head of a pair minus lambda times the second one.
    heads, pairs = names["heads"], names["plain"].unflatten(2, (-1, 2))
    mean_square = heads.square().mean(-1, keepdim=True)
    assert torch.allclose(names["normed"], 0.2 * heads / (mean_square + 1e-5).sqrt(), atol=1e-6)
    subtracted = pairs[:, :, :, 0] - names["lambdas"][..., None] * pairs[:, :, :, 1]
    assert torch.allclose(names["heads_v2"], subtracted, atol=1e-6)
    # A hook has stopped the second run before the last step. The run is saved, and it has the
    # hook's metrics.
    assert names["finished_early"]
    (step,) = CheckpointStore(Path("runs/second")).steps()
    assert 0 < step < 8
    norms = [
        e["my/weight_norm"]
        for e in diffmegatron.read_metrics(Path("runs/second"))
        if "my/weight_norm" in e
    ]
    assert len(norms) == step and all(math.isfinite(norm) and norm > 0 for norm in norms)


def test_every_public_name_is_there_and_on_the_page():
    text = PAGE.read_text()
    for name in diffmegatron.attention.__all__:
        assert getattr(diffmegatron.attention, name) is getattr(api, name)
        assert re.search(rf"`(attention\.)?{name}\b", text), f"{name} is not in docs/python.md"
    with pytest.raises(AttributeError, match="no attribute 'dif_attention'"):
        _ = diffmegatron.attention.dif_attention
    for name in diffmegatron.__all__:
        assert getattr(diffmegatron, name).__name__ == name
        assert re.search(rf"`{name}\b", text), f"{name} is not in docs/python.md"
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = diffmegatron.tarin


def test_names_that_need_no_torch_do_not_import_it():
    light = (
        "Hook, Recipe, UserError, evaluate, export, load_recipe, load_stages, plan_recipe, train"
    )
    code = (
        f"from diffmegatron import {light}; import diffmegatron.attention, sys; "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_megatron_is_imported_and_set_up_without_its_warnings(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    assert warnings_of_megatron() == {"of use"}
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    assert warnings_of_megatron() >= {"of use", "Apex is not installed"}


def warnings_of_megatron() -> set[str]:
    """Return the first sentence of each UserWarning that passes the filters of diffmegatron."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.resetwarnings()
        importlib.reload(diffmegatron)
        # These modules warn when they are imported, so run them again. Keep their names, because
        # the filters match the names of modules.
        for name in ("models.backends", "optimizer.clip_grads", "optimizer.optimizer"):
            runpy.run_module(f"megatron.core.{name}", run_name=f"megatron.core.{name}")
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        for text in ("of use", "Apex is not installed. Falling back to Torch Norm"):
            warnings.warn_explicit(text, UserWarning, "", 1, "megatron.core.models.backends")
    # Exclude other categories: runpy warns with them about modules that are already imported.
    return {str(each.message).split(".")[0] for each in heard if each.category is UserWarning}
