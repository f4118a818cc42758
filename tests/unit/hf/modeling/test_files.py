"""Tests of saving, loading and validating the models of hf/modeling, also without this package."""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import versions

from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.hf.modeling import (
    CLASSES,
    DiffV2Config,
    GroupedDiffConfig,
    MixedDiffConfig,
    register,
    remote_files,
)
from diffmegatron.hf.tokenizer import write_tokenizer
from tests.unit.hf.modeling.test_equations import CASES, SIZES, TYPICAL, make_model, make_tokens

# The class that mixes these kinds is tested in tests/unit/attention/kinds/test_pattern.py.
TYPES = ["diff_v2", "grouped_diff"]
OWN = [classes for classes in CLASSES if classes[0].model_type in TYPES]

# An isolated interpreter runs this script. In it, this package cannot be imported.
PLAIN_TRANSFORMERS = """
import sys
from pathlib import Path
import torch
sys.modules["diffmegatron"] = None
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
)
from transformers.utils import logging
for directory in sys.argv[1:]:
    logging.set_verbosity_warning()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True
    )
    # Without a head for the vocabulary, the weights of this head are reported as left out.
    logging.set_verbosity_error()
    for part in (config, model, AutoModel.from_pretrained(directory, trust_remote_code=True)):
        assert type(part).__module__.startswith("transformers_modules."), type(part)
    assert not any(report.values()), report
    saved = torch.load(Path(directory, "expected.pt"))
    assert torch.equal(model(saved["tokens"]).logits, saved["logits"])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(saved["tokens"], use_cache=u, **options) for u in (True, False))
    assert torch.equal(cached, whole)
    model.save_pretrained(Path(directory, "again"))
    assert PreTrainedTokenizerFast.from_pretrained(directory)("a").input_ids == [97]
print("loaded", *sys.argv[1:])
"""


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_saved_and_loaded_is_bit_equal(case: Any, tmp_path: Path) -> None:
    register()
    model = make_model(case)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) != model.config.tie_word_embeddings
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=False
    )
    assert type(loaded) is type(model)
    assert not any(report.values())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    assert torch.equal(model(make_tokens()).logits, loaded(make_tokens()).logits)


def test_plain_transformers_loads_saved_models(tmp_path: Path) -> None:
    register()
    directories = []
    for case in TYPICAL:
        directory = tmp_path / case.kind
        directories.append(str(directory))
        model, tokens = make_model(case), make_tokens()
        # As in an export, replace the Python files of save_pretrained by those of the package.
        model.save_pretrained(directory)
        for path in directory.glob("*.py"):
            path.unlink()
        for path in remote_files(case.kind):
            (directory / path.name).write_bytes(path.read_bytes())
        write_tokenizer(load_tokenizer("bytes"), 64, directory)
        with torch.no_grad():
            logits = model(tokens).logits
        torch.save({"tokens": tokens, "logits": logits}, directory / "expected.pt")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    run = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN_TRANSFORMERS, *directories],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        # Without standard input, transformers cannot wait for permission to run the folder's code.
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    # Loading an export prints no warning.
    assert run.stderr == ""
    # DeepSpeed, which transformers imports where it is installed, may print before this line.
    assert run.stdout.endswith(f"loaded {' '.join(directories)}\n")
    for case in TYPICAL:
        again = tmp_path / case.kind / "again"
        assert {path.name for path in remote_files(case.kind)} <= {p.name for p in again.iterdir()}
        auto_map = json.loads((again / "config.json").read_text())["auto_map"]
        assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


@pytest.mark.parametrize("classes", OWN, ids=TYPES)
def test_registered_classes_need_no_remote_code(classes: tuple[Any, ...], tmp_path: Path) -> None:
    register()
    register()
    config_class, model_class, causal_lm_class = classes
    kind = config_class.model_type
    case = next(case for case in CASES if case.kind == kind)
    make_model(case).save_pretrained(tmp_path)
    assert {path.name for path in remote_files(kind)} == {p.name for p in tmp_path.glob("*.py")}
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class
    assert type(AutoModel.from_pretrained(tmp_path)) is model_class
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is causal_lm_class


def imported_roots(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, and relative modules with their dot."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            roots.add("." * node.level + str(node.module).split(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
    return roots


@pytest.mark.parametrize("kind", TYPES)
def test_files_need_torch_and_transformers_alone(kind: str) -> None:
    files = remote_files(kind)
    roots = set().union(*map(imported_roots, files))
    allowed = {"torch", "transformers", *(f".{file.stem}" for file in files)}
    assert roots <= allowed | sys.stdlib_module_names


def test_an_older_transformers_is_an_error_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "4.56.2")
    with pytest.raises(
        ImportError, match=r"transformers>=4\.57 is required .* transformers==4\.56"
    ):
        runpy.run_path(str(remote_files("diff_v2")[-1]))


def test_other_model_types_have_no_remote_files() -> None:
    assert remote_files("llama") == []


@pytest.mark.parametrize("classes", OWN, ids=TYPES)
def test_auto_map_names_the_files_and_configuration_round_trips(
    classes: tuple[Any, ...], tmp_path: Path
) -> None:
    config_class, model_class, causal_lm_class = classes
    config = config_class(signal_per_noise=1, num_attention_heads=8, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    loaded = config_class.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    stems = [path.stem for path in remote_files(config_class.model_type)]
    assert config.auto_map == {
        "AutoConfig": f"{stems[0]}.{config_class.__name__}",
        "AutoModel": f"{stems[1]}.{model_class.__name__}",
        "AutoModelForCausalLM": f"{stems[1]}.{causal_lm_class.__name__}",
    }


def test_the_keys_of_older_exports_describe_the_same_heads() -> None:
    case = next(case for case in CASES if case.kind == "grouped_diff" and case.ratio == 4)
    config = make_model(case).config
    older = {"num_attention_heads": case.queries, "num_key_value_heads": case.keys}
    values = config.to_dict() | older
    del values["num_signal_heads"]
    assert GroupedDiffConfig(**values).to_dict() == config.to_dict()
    entry = {"layers": None, "model_type": "grouped_diff", **older, "signal_per_noise": 4}
    (found,) = MixedDiffConfig(layer_kinds=[entry]).layer_kinds
    heads = ("num_signal_heads", "num_attention_heads", "num_key_value_heads")
    assert [found[name] for name in heads] == [getattr(config, name) for name in heads]


@torch.no_grad()
def test_lambda_vectors_and_the_headwise_norm_stay_float32(tmp_path: Path) -> None:
    model = make_model(TYPICAL[1])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, weight in loaded.named_parameters():
        exact = "lambda_" in name or "subln" in name
        assert weight.dtype == (torch.float32 if exact else torch.bfloat16), name
        assert not exact or torch.equal(weight, model.get_parameter(name))
    assert loaded(make_tokens()).logits.dtype == torch.bfloat16


BOTH: list[tuple[dict[str, object], str]] = [
    ({"head_dim": 7}, "head_dim is 7; RoPE needs an even number"),
    ({"signal_per_noise": 0}, "signal_per_noise is 0; it must be a positive integer"),
    ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; it must be a positive integer"),
    (
        {"num_attention_heads": 8, "signal_per_noise": 2},
        "num_attention_heads is 8; with signal_per_noise 2 it must be a multiple of 3, because it "
        "counts signal and noise heads",
    ),
    ({"mlp_bias": True}, "mlp_bias is True; this model has no biases and no dropout"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1; this model has no biases and no "),
]
DIFF_V2_ONLY: list[tuple[dict[str, object], str]] = [
    (
        {"num_attention_heads": 8, "signal_per_noise": 1, "num_key_value_heads": 8},
        "num_key_value_heads is 8; it must divide the 4 groups of 2 query heads, because a "
        "group has one key head",
    ),
]
GROUPED_ONLY: list[tuple[dict[str, object], str]] = [
    (
        {"num_attention_heads": 9, "signal_per_noise": 2, "num_key_value_heads": 3},
        "num_key_value_heads is 6; it must be 4 times a divisor of the 3 noise heads",
    ),
    (
        {"num_attention_heads": 10, "signal_per_noise": 4, "num_key_value_heads": 8},
        "num_key_value_heads is 16; it must be 4 times a divisor of the 2 noise heads",
    ),
    (
        {"num_signal_heads": 3, "signal_per_noise": 2},
        "num_signal_heads is 3; it must be a multiple of signal_per_noise 2",
    ),
    (
        {"num_signal_heads": 4},
        "num_attention_heads is 8; it must be 4 times num_signal_heads 4",
    ),
    (
        {"lambda_init": "linear"},
        "lambda_init is 'linear'; it must be 'exponential' or a number between 0 and 1",
    ),
    ({"lambda_init": 1.0}, "lambda_init is 1.0; it must be 'exponential' or a number"),
]


@pytest.mark.parametrize(
    ("config_class", "keys", "sentence"),
    [
        *((DiffV2Config, *case) for case in BOTH + DIFF_V2_ONLY),
        *((GroupedDiffConfig, *case) for case in BOTH + GROUPED_ONLY),
    ],
)
def test_invalid_sizes_are_one_line_errors(
    config_class: Any, keys: dict[str, object], sentence: str
) -> None:
    numbers = {
        **SIZES,
        "num_attention_heads": 8,
        "signal_per_noise": 1,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ValueError) as error:
        config_class(**{**numbers, **keys})
    message = str(error.value)
    assert message.startswith(sentence)
    assert "\n" not in message
