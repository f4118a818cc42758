"""What several layers of tests share: a small corpus and recipes on it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.prepare import prepare

TINY = """
run_dir: {run_dir}
model:
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 2
  ffn_hidden_size: 96
  vocab_size: 320
data:
  tokenizer: bytes
  sources: [{{path: {corpus}}}]
  validation_fraction: 0.2
training:
  seq_length: 64
  global_batch_size: 8
  micro_batch_size: 2
  steps: 20
  precision: fp32
  log_interval: 1
  eval_interval: 1000
  eval_batches: 1
optimizer:
  lr: 3.0e-3
  schedule: {{kind: cosine, warmup_steps: 2, final_lr: 3.0e-4}}
checkpoint:
  interval: 10
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a prepared corpus: this repository's own tests and sources."""
    prefix = tmp_path_factory.mktemp("corpus") / "code"
    sources = Path(__file__).parent.parent / "diffmegatron"
    prepare([sources], prefix, "bytes", pattern="*.py", show_progress=False)
    return prefix


@pytest.fixture
def tiny_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Makes recipes of a tiny run from overrides; each run_dir is new unless given."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus))

    def make(*overrides: str) -> Recipe:
        return load_recipe(file, overrides)

    return make
