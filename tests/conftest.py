"""Fixtures that several test folders use: a small corpus, and recipes that train on it."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.parallel.engine_imports import importing_engines
from tests import forks
from tests.deprecations import raise_on_deprecations
from tests.gloo import share_device
from tests.paths import RESULTS

TINY = """
run_dir: {run_dir}
model:
  num_layers: 2
  hidden_size: 64
  attention: {{kind: diff_v1, num_heads: 4, num_kv_heads: 2}}
  ffn_hidden_size: 96
  vocab_size: 320
data:
  tokenizer: bytes
  sources: [{{path: {corpus}}}]
  validation_fraction: 0.2
training:
  seq_length: 64
  global_batch_size: 8
  micro_batch_size: 4
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

raise_on_deprecations()
share_device()
# A developer's measurements of this machine would change the backends that "auto" chooses. No file
# can be in this folder.
os.environ["DIFFMEGATRON_CACHE"] = os.devnull

# If a shell starts pytest as a background job, pytest and its child processes ignore SIGINT. Tests
# that send SIGINT need the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With a deadline, Hypothesis would fail an example on a slow or busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run 50 times as many random cases, with a new seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        forks.open_folder()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        forks.close_folder()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Import the tests like a command: without Inductor, and without the garbage collector."""
    with importing_engines():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # The workers take files in this order. If the longest came last, one worker would wait.
        seconds = json.loads((RESULTS / "tests.json").read_text())["wall"]
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))
    if config.getoption("--long"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Return whether pytest runs with ``--long``, so that tests draw many random cases."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def cases(is_long: bool) -> int:
    """Return the number of random cases that a test draws."""
    return 20_000 if is_long else 400


def prepare_corpus(folder: Path) -> Path:
    """Write and prepare 600 documents of random words from a fixed seed.

    A few words make up most of the text, so that the loss of a network falls within a dozen steps.

    Returns:
        Prefix of the prepared corpus, whose tokenizer is ``bytes``.
    """
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(400)]
    ranks = [1 / rank for rank in range(1, len(words) + 1)]
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(600):
            length = int(draw.lognormvariate(4.5, 1))
            file.write(json.dumps({"text": " ".join(draw.choices(words, ranks, k=length))}) + "\n")
    prepare([folder], folder / "words", "bytes", show_progress=False)
    return folder / "words"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a corpus and return its prefix."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def tiny_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Return a function that makes recipes of a tiny run from overrides.

    All recipes of a test have the same new run_dir, unless an override sets another.
    """
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus))

    def make(*overrides: str) -> Recipe:
        return load_recipe(file, overrides)

    return make
