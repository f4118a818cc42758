"""Conversations in one sequence attend to each other only if the recipe allows it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffmegatron import plan
from diffmegatron.attention.context_parallel.whole_sequence import row_boundaries
from diffmegatron.checkpoint.checkpoint_format import read_recipe
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.cli import app
from diffmegatron.data.index.corpus_manifest import with_document_mask
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.training.compute.step import token_losses
from diffmegatron.training.hook import Hook
from diffmegatron.training.trainer import decide_document_mask, train

# END is the end-of-document token of the tokenizer ``bytes``.
END = 256
BEST_FIT = ["data.packing=best_fit", "training.eval_batches=0"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Prepare 60 conversations; a sequence of 256 tokens contains several."""
    folder = tmp_path_factory.mktemp("chats")
    conversations = [
        [{"role": "user", "content": "ab"[n % 2]}, {"role": "assistant", "content": str(n)}]
        for n in range(60)
    ]
    lines = [json.dumps({"messages": each}) + "\n" for each in conversations]
    (folder / "chats.jsonl").write_text("".join(lines))
    prepare([folder / "chats.jsonl"], folder / "chats", "bytes", layout="chat")
    return folder / "chats"


def sources(*prefixes: Path) -> str:
    return "data.sources=[{}]".format(", ".join(f"{{path: {prefix}}}" for prefix in prefixes))


@pytest.mark.parametrize(
    ("prefixes", "changes", "is_masked"),
    [
        (["chats"], ["data.packing=best_fit"], True),
        (["chats"], ["data.packing=concatenate"], True),
        # Without packing, no two conversations share a sequence.
        (["chats"], ["data.packing=none"], False),
        (["chats"], ["data.packing=best_fit", "data.reset_attention_mask=false"], False),
        (["corpus"], ["data.packing=best_fit"], False),
        (["corpus"], ["data.reset_attention_mask=true"], True),
        (["corpus", "chats"], [], True),
    ],
)
def test_sources_decide_the_document_mask_unless_the_recipe_does(
    prefixes, changes, is_masked, tiny_recipe, corpus, chats, capfd
):
    paths = {"corpus": corpus, "chats": chats}
    recipe = tiny_recipe(sources(*(paths[name] for name in prefixes)), *changes)
    assert decide_document_mask(recipe).data.reset_attention_mask is is_masked
    assert with_document_mask(recipe).data.reset_attention_mask is is_masked
    is_said = f"because {chats} has conversations that share sequences" in capfd.readouterr().out
    assert is_said == (is_masked and "chats" in prefixes)


def test_a_run_refuses_a_source_that_plan_assumes(tiny_recipe, tmp_path):
    recipe = tiny_recipe(sources(tmp_path / "nowhere"))
    assert with_document_mask(recipe).data.reset_attention_mask is False
    with pytest.raises(UserError, match="nowhere"):
        decide_document_mask(recipe)


def test_plan_decides_the_document_mask(tiny_recipe, tmp_path, chats, monkeypatch):
    planned = []
    monkeypatch.setattr(plan, "run_plan", lambda stages, *_, **__: planned.extend(stages))
    for path, is_masked in ((chats, True), (tmp_path / "nowhere", False)):
        tiny_recipe(sources(path))
        command = ["plan", str(tmp_path / "tiny.yaml"), sources(path)]
        assert CliRunner().invoke(app, command).exit_code == 0
        assert planned.pop().data.reset_attention_mask is is_masked


class _Neighbours(Hook):
    """Hook that changes the first conversation of a row after training.

    ``are_equal`` is true if this change does not change the losses of the later conversations.
    """

    def after_training(self, run):
        (batch,) = run.last_batch()[:1]
        row = batch.tokens[:1]
        (ends,) = (row[0] == END).nonzero(as_tuple=True)
        first = int(ends[0]) + 1
        boundaries = batch.cu_seqlens
        if boundaries is not None:
            boundaries = row_boundaries(boundaries, len(batch.tokens))[0]
        one = replace(
            batch,
            tokens=row,
            labels=batch.labels[:1],
            loss_mask=batch.loss_mask[:1],
            cu_seqlens=boundaries,
        )
        changed = row.clone()
        changed[0, : first - 1] = 65
        run.network.eval()
        losses = [
            token_losses(run.network, each, run.parallel_state)[0, first:]
            for each in (one, replace(one, tokens=changed))
        ]
        self.are_equal = torch.equal(*losses)


@pytest.mark.parametrize("lets_them_see", [False, True])
def test_a_masked_conversations_loss_is_independent_of_its_neighbours(
    lets_them_see, tiny_recipe, chats
):
    more = ["data.reset_attention_mask=false"] if lets_them_see else []
    recipe = tiny_recipe(
        *BEST_FIT, "training.steps=3", "training.seq_length=256", sources(chats), *more
    )
    neighbours = _Neighbours()
    assert train(recipe, hooks=[neighbours])
    assert neighbours.are_equal != lets_them_see
    # The recipe in the checkpoint has the setting that was used in training.
    newest = CheckpointStore(Path(recipe.run_dir)).latest()
    assert newest is not None
    assert read_recipe(newest).data.reset_attention_mask is not lets_them_see
