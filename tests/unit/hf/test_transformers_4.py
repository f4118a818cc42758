"""Tests that a separate transformers 4.57 reads exports as transformers 5 does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from diffmegatron.config.load import load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.hf.import_model import import_model
from diffmegatron.hf.modeling import register
from diffmegatron.hf.pretrained_files import find_original
from diffmegatron.hf.tokenizer import SAMPLE
from diffmegatron.hf.write_export import logit_difference, write_export
from tests.paths import ROOT
from tests.pretrained import random_weights, write_pretrained
from tests.unit.hf.test_weight_mapping import DIFF, GQA, make_recipe, make_tokens

FOLDER = Path(os.environ.get("DIFFMEGATRON_TRANSFORMERS4", ROOT / ".transformers4"))
SOFTMAX = {"kind": "softmax", "num_heads": 6, "num_kv_heads": 2}
RATIO = {"signal_per_noise": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
# This scaling has three ranges of wavelengths, which meet at 12 and 48 tokens. With a head of 8
# channels and a theta of 700, the wavelengths are 6.3, 32.3, 166 and 855 tokens, so each range has
# at least one.
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_length": 48,
}
# With a theta of 700, the ramp covers the second and third of the four channels of a head of 8. The
# scaling reaches 8 * 8 tokens, the length of the sequences; with another reach, transformers warns.
YARN = {
    "kind": "yarn",
    "factor": 8.0,
    "original_length": 8,
    "beta_fast": 0.7,
    "beta_slow": 0.1,
}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}
# The names of folders with code must be identifiers; with other names, transformers 4 warns.
KINDS: dict[str, dict[str, object]] = {
    "diff_v1": DIFF | GQA,
    "diff_v1_qk_norm": DIFF | GQA | {"qk_norm": True, "output_gate": "elementwise"},
    "llama": SOFTMAX,
    "llama_tied": SOFTMAX | {"tied_embeddings": True},
    "llama_3": SOFTMAX | {"rope_scaling": LLAMA3},
    "llama_linear": SOFTMAX | {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    "llama_yarn": SOFTMAX | {"rope_scaling": YARN},
    "diff_v1_yarn": DIFF | GQA | {"rope_scaling": YARN | {"attention_factor": 1.2}},
    "mistral": {"kind": "softmax", "num_heads": 5, "head_dim": 8},
    "mistral_window": SOFTMAX | {"window": 5},
    "qwen3": SOFTMAX | {"qk_norm": True},
    "gated_llama": SOFTMAX | {"output_gate": "elementwise", "rope_scaling": LLAMA3},
    "seed_oss": SOFTMAX | {"qkv_bias": True, "head_dim": 10},
    "diff_v2": RATIO
    | {"kind": "diff_v2", "rope_scaling": LLAMA3, "qk_norm": True, "output_gate": "headwise"},
    "grouped": RATIO | {"kind": "grouped", "tied_embeddings": True, "rope_scaling": YARN | MSCALE},
    "grouped_own_lambda": RATIO
    | {
        "kind": "grouped",
        "headwise_norm": False,
        "lambda_init": {"policy": "constant", "value": 0.7},
    },
}
CHANGED = "imported_other_theta"
PATTERN = [
    {"kind": "diff_v2", "num_heads": 4, "head_dim": 8, "layers": 1},
    {"kind": "diff_v1", "num_heads": 2, "head_dim": 8, "layers": 2},
    {"kind": "softmax", "num_heads": 6, "head_dim": 8},
]
# Patterns of three layers, whose classes have windows in some layers.
V1, V2, SIX = (
    {**kind, "head_dim": 8}
    for kind in (
        {"kind": "diff_v1", "num_heads": 2},
        {"kind": "diff_v2", "num_heads": 4},
        {"kind": "softmax", "num_heads": 6},
    )
)
WINDOWS = {
    "windows_v1": [V1 | {"window": 5, "layers": "1, 3"}, V1],
    "windows_v2": [V2 | {"window": 5}, V2 | {"layers": 3}],
    "windows_llama": [SIX | {"window": 5}, SIX | {"layers": 3}],
    "windows_qwen3": [SIX | {"window": 5, "qk_norm": True}, SIX | {"qk_norm": True, "layers": 3}],
    "windows_mixed": [
        V2 | {"window": 5, "layers": 1},
        SIX | {"qkv_bias": True, "window": 5, "layers": 2},
        SIX,
    ],
}

# An interpreter with transformers 4 runs this script. In it, this package cannot be imported.
READER = """
import json, sys
from pathlib import Path
import torch, transformers
sys.modules["diffmegatron"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
root, (sample, tokens) = Path(sys.argv[1]), torch.load(sys.argv[2])
found = {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    load = lambda **options: AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, local_files_only=True, **options
    )
    model, report = load(dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), (folder, report)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 5, "do_sample": False}
    cached, whole = (model.generate(tokens, use_cache=each, **options) for each in (True, False))
    assert torch.equal(cached, whole), folder
    rounded = load(dtype="bfloat16").named_parameters()
    wide = {name for name, weight in rounded if weight.dtype == torch.float32}
    model.save_pretrained(folder / "again")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in sample]
    found[folder.name] = {"logits": model(tokens).logits.detach(), "wide": wide, "ids": ids}
torch.save({"version": transformers.__version__, "found": found}, sys.argv[3])
"""


def logits(folder: Path) -> Tensor:
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(make_tokens()).logits


def pattern(entries: list[dict[str, object]]) -> Recipe:
    values = make_recipe().model_dump()
    values["model"]["attention"] = entries
    return Recipe.model_validate(values)


def changed_import(folder: Path) -> Recipe:
    source = write_pretrained(folder / "hf", "llama 3.2")
    import_model(source, folder / "run", verify=False)
    recipe = load_resolved(folder / "run/recipe.yaml")
    model = recipe.model.model_copy(update={"rope_theta": 90.0})
    return recipe.model_copy(update={"model": model})


@pytest.mark.skipif(
    not (FOLDER / "transformers").is_dir(),
    reason=f"'make transformers4' has not put transformers 4.57 into {FOLDER.name}",
)
def test_transformers_4_reads_every_kind_of_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    root, tokenizer = tmp_path / "exports", load_tokenizer("bytes")
    recipes = {kind: make_recipe(**keys) for kind, keys in KINDS.items()}
    recipes[CHANGED] = changed_import(tmp_path)
    recipes["pattern"] = pattern(PATTERN)
    recipes |= {name: pattern(entries) for name, entries in WINDOWS.items()}
    for kind, recipe in recipes.items():
        weights = random_weights(recipe.model)
        original = find_original(recipe)
        out = root / kind
        write_export(weights, recipe, tokenizer, out, torch.float32, original=original)
    torch.save((SAMPLE, make_tokens()), tmp_path / "sample.pt")
    environment = os.environ | {
        "PYTHONPATH": str(FOLDER),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    files = [root, tmp_path / "sample.pt", tmp_path / "found.pt"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", READER, *map(str, files)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert run.returncode == 0, run.stderr
    # Loading an export prints no warning.
    assert run.stderr == ""
    read = torch.load(tmp_path / "found.pt")
    assert read["version"].startswith("4.57.")
    assert read["found"].keys() == recipes.keys()
    expected_ids = [tokenizer.encode(text).tolist() for text in SAMPLE]
    transformers_logging.enable_propagation()
    recwarn.clear()
    for kind, found in read["found"].items():
        expected = logits(root / kind)
        assert logit_difference(found["logits"], expected).relative < 1e-5, kind
        assert found["ids"] == expected_ids, kind
        if kind.startswith("grouped"):
            assert found["wide"] == {
                name
                for name in AutoModelForCausalLM.from_pretrained(root / kind).state_dict()
                if "lambda" in name or "subln" in name
            }
        # transformers 5 must read the files that transformers 4 has saved.
        assert logit_difference(logits(root / kind / "again"), expected).relative < 1e-5, kind
    transformers_logging.disable_propagation()
    assert not caplog.records and not recwarn.list


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_config_json_has_the_rotary_keys_of_both_majors(
    scaling: dict[str, object] | None, tmp_path: Path
) -> None:
    recipe = make_recipe(**SOFTMAX, rope_scaling=scaling)
    weights = random_weights(recipe.model)
    write_export(weights, recipe, load_tokenizer("bytes"), tmp_path / "hf", torch.float32)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    keys = ("rope_theta", "rope_scaling", "rope_parameters")
    both = {key: config[key] for key in keys if key in config}
    named = {"rope_type": "default"}
    if scaling is not None:
        named = {key: value for key, value in scaling.items() if "factor" in key}
        named |= {"rope_type": "llama3", "original_max_position_embeddings": 48}
    assert both == {
        "rope_theta": 700.0,
        **({"rope_scaling": named} if scaling else {}),
        "rope_parameters": named | {"rope_theta": 700.0},
    }
