"""The training loss of a source is the mean over the source's documents, in every packing."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.training import trainer
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.monitoring.source_losses import SourceLosses
from diffmegatron.training.trainer import train

END, DIGITS = 256, frozenset(b"0123456789")
SETTINGS = ["training.log_interval=2", "training.eval_batches=0", "guard.patience=2"]
SHARES = {"small": 1, "LARGE": 3}
# BATCH is the number of labels in a global batch: 8 sequences of 64 labels.
BATCH = 8 * 64


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write a source of small letters and a source of capital letters in each layout.

    Returns:
        Override of ``data.sources`` by layout.
    """
    return {
        layout: write_sources(tmp_path_factory.mktemp(layout), layout)
        for layout in ("text", "instruction")
    }


def write_sources(folder: Path, layout: str) -> str:
    draw, listed = random.Random(0), []
    for (name, weight), letters in zip(SHARES.items(), ("abcdefgh", "ABCDEFGH"), strict=True):
        texts = ["".join(draw.choices(letters, k=draw.randint(1, 120))) for _ in range(200)]
        records: list[dict[str, str]] = [{"text": text} for text in texts]
        if layout == "instruction":
            records = [{"prompt": "123456789", "response": text[:50]} for text in texts]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        prepare([file], folder / name, "bytes", layout=layout, show_progress=False)
        listed.append(f"{{path: {folder / name}, weight: {weight}}}")
    return f"data.sources=[{', '.join(listed)}]"


class Documents:
    """Expected sum of losses in nats and number of labels, by source.

    The documents are taken out of the packed batch. The network runs on them again, with one
    document in each row and padding at the end of the row.
    """

    def __init__(self) -> None:
        self.nats, self.labels = Counter[str](), Counter[str]()

    def add(self, network: torch.nn.Module, batch: Batch) -> None:
        rows = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1).tolist()
        documents = [document for row in rows for document in split(row)]
        tokens = pad_sequence([torch.tensor(each) for each in documents], batch_first=True)
        with torch.no_grad():
            logits = network(tokens[:, :-1]).double().transpose(1, 2)
        nats = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").tolist()
        for document, of_document in zip(documents, nats, strict=True):
            learned = [
                loss
                for token, loss in zip(document[1:], of_document, strict=False)
                if token not in DIGITS
            ]
            if learned:
                text = bytes(token for token in document if token != END)
                name = "small" if text.islower() else "LARGE"
                self.nats[name] += math.fsum(learned)
                self.labels[name] += len(learned)


def split(row: list[int]) -> list[list[int]]:
    """Split a row into documents, each with its end token.

    Documents of one token are dropped, because they have no label.
    """
    starts = [0, *(place + 1 for place, token in enumerate(row) if token == END), len(row)]
    return [row[start:end] for start, end in pairwise(starts) if end - start > 1]


def recorded(recipe: Recipe) -> dict[int, dict[str, float]]:
    """Return, by step, the metrics of each source, such as ``train/loss/small``.

    Only the names of these metrics have two slashes.
    """
    return {
        entry["step"]: {name: value for name, value in entry.items() if name.count("/") == 2}
        for entry in read_metrics(Path(recipe.run_dir))
        if "train/loss" in entry
    }


@pytest.fixture
def around_steps(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return a function that installs ``before``, which is called before each forward_backward.

    ``before`` gets three arguments: the number of the call (from 1), the engine and the
    microbatches. It must return a factor, by which the first parameter's gradient is multiplied.
    """

    def install(before: Callable) -> None:
        real, count = trainer.forward_backward, [0]

        def wrapper(engine, microbatches, *arguments, **options):
            count[0] += 1
            factor = before(count[0], engine, microbatches)
            loss = real(engine, microbatches, *arguments, **options)
            next(engine.network.parameters()).grad *= factor
            return loss

        monkeypatch.setattr(trainer, "forward_backward", wrapper)

    return install


PACKINGS = {
    "padding": ("text", ["data.packing=best_fit"]),
    "cut documents, the long ones more often": (
        "text",
        ["data.upsampling={mode: per_source, long_tokens: 50}"],
    ),
    "responses": ("instruction", ["data.packing=best_fit"]),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_source_loss_is_the_mean_over_its_own_documents(
    packing, sources, tiny_recipe, around_steps
):
    """Compare the source losses of three entries with the losses of separate documents.

    The entries cover steps 1 and 2, steps 3 and 4, and step 5. Step 3 has a NaN gradient and does
    not count.
    """
    layout, overrides = PACKINGS[packing]
    recipe = tiny_recipe(
        sources[layout], *overrides, *SETTINGS, "training.steps=5", "data.eod_mask_loss=true",
        "data.reset_attention_mask=true",
    )  # fmt: skip
    expected: dict[int, Documents] = {2: Documents(), 4: Documents(), 5: Documents()}

    def add(step, engine, microbatches):
        if step == 3:
            return math.nan
        for batch in microbatches:
            expected[min(end for end in expected if end >= step)].add(engine.network, batch)
        return 1.0

    around_steps(add)
    train(recipe)
    found = recorded(recipe)
    for step, documents in expected.items():
        assert {name: found[step][f"train/loss_tokens/{name}"] for name in SHARES} == dict(
            documents.labels
        )
        for name in SHARES:
            mean = documents.nats[name] / documents.labels[name]
            assert found[step][f"train/loss/{name}"] == pytest.approx(mean, rel=1e-6)


def test_source_losses_do_not_change_the_trained_weights(
    sources, tiny_recipe, monkeypatch, tmp_path
):
    runs = []
    for name in ("with", "without"):
        recipe = tiny_recipe(
            sources["text"], *SETTINGS, "training.steps=3", f"run_dir={tmp_path / name}"
        )
        train(recipe)
        runs.append(dict(open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).weights()))
        monkeypatch.setattr(SourceLosses, "add", lambda *_: None)
    observed, plain = runs
    assert observed.keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in observed.items())


class StopAt(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run):
        run.stopping = run.step == self._step


def tokens(recipe: Recipe) -> dict[int, float]:
    """Return the number of labels of each entry, summed over the sources, by step."""
    return {
        step: sum(value for name, value in values.items() if "loss_tokens" in name)
        for step, values in recorded(recipe).items()
    }


def test_a_resumed_run_records_the_steps_since_then(sources, tiny_recipe):
    recipe = tiny_recipe(sources["text"], *SETTINGS, "training.steps=4")
    assert not train(recipe, hooks=[StopAt(3)])
    assert train(recipe)
    assert tokens(recipe) == {2: 2 * BATCH, 4: BATCH}


def test_steps_that_are_rolled_back_do_not_count(sources, tiny_recipe, around_steps):
    """Check that the entry of step 6 counts only steps 3 to 6, which follow the rollback.

    Calls 4 and 5 (steps 4 and 5) have NaN gradients. After these steps the run loads the checkpoint
    of step 2 and sets the sums of all sources to 0.
    """
    around_steps(lambda call, *_: math.nan if call in (4, 5) else 1.0)
    recipe = tiny_recipe(
        sources["text"], *SETTINGS, "training.steps=6", "training.log_interval=6",
        "checkpoint.interval=2",
    )  # fmt: skip
    assert train(recipe)
    assert tokens(recipe) == {6: 4 * BATCH}


def test_a_run_with_one_source_records_no_source_losses(tiny_recipe):
    recipe = tiny_recipe(*SETTINGS, "training.steps=3")
    train(recipe)
    assert recorded(recipe) == {2: {}, 3: {}}
