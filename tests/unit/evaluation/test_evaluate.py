"""Tests of the parts that all suites share: targets, restarts, intervals, comparisons, reports.

Most tests use the suite ``loss``, which is also checked against a computation in float64.
"""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint, read_recipe
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.cli import app
from diffmegatron.errors import UserError
from diffmegatron.evaluation.bootstrap import difference, estimate
from diffmegatron.evaluation.evaluate import evaluate, export_targets
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.result_file import Ranks, RecordFile, SharedRecords, sealed_line
from diffmegatron.evaluation.suite import Item, Mean, Suite
from diffmegatron.evaluation.suites import SUITES
from diffmegatron.evaluation.suites.loss import Loss
from diffmegatron.evaluation.targets import Target, find_targets
from diffmegatron.files import read_text
from diffmegatron.hf.export_checkpoint import export_checkpoint, training_logits
from diffmegatron.hf.import_model import import_model
from diffmegatron.training.monitoring.metrics import MetricsWriter
from diffmegatron.training.trainer import train
from tests.checkpoints import write_checkpoint
from tests.paths import DOCS
from tests.pretrained import write_pretrained

TEXTS = [
    f"Text number {number}: " + "a few words again, " * (1 + number % 3) for number in range(6)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models with the same byte tokenizer, and held-out text."""
    found = tmp_path_factory.mktemp("evaluate")
    write_pretrained(found / "diff", "diffllama")
    write_pretrained(found / "plain", "llama 2")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (found / "text.jsonl").write_text("".join(lines))
    return found


@pytest.fixture
def measure(folder: Path, tmp_path: Path) -> Callable[..., dict]:
    """Return a function that runs the suite ``loss`` and returns its section of results.json."""

    def run(
        *targets: str,
        out: str = "out",
        settings: tuple[str, ...] = (),
        **computing: int,
    ) -> dict:
        options = EvaluateSettings(data=(str(folder / "text.jsonl"),), **computing)
        where, paths = tmp_path / out, [folder / name for name in targets]
        evaluate(paths, ["loss"], where, options, settings)
        return json.loads((where / "results.json").read_text())["suites"]["loss"]

    return run


def change_weights(source: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], object]):
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


# Targets


def test_a_checkpoint_is_exported_once_and_scores_as_its_model(folder, tmp_path, measure):
    import_model(folder / "plain", folder / "run", verify=False)
    found = measure("plain", "run")["measures"]["nats per token"]
    assert found["differences"]["run"]["value"] == pytest.approx(0, abs=1e-6)
    targets = json.loads((tmp_path / "out/results.json").read_text())["targets"]
    assert targets["plain"]["parameters"] == targets["run"]["parameters"] > 0
    (export,) = (tmp_path / "out/exports").iterdir()
    before = (export / "config.json").stat().st_mtime_ns
    again = measure("plain", "run")["measures"]["nats per token"]
    assert again == found
    assert (export / "config.json").stat().st_mtime_ns == before
    checkpoint = folder / "run/checkpoints/step_00000000"
    (target,) = find_targets([checkpoint], tmp_path / "out")
    assert target.run_dir == (folder / "run").resolve()


def test_a_dex_checkpoint_and_its_fold_score_as_the_trained_network(folder, tmp_path, tiny_recipe):
    attention = "{kind: dex, num_heads: 4, num_kv_heads: 2, selected_heads: [[0, 1], [3]], "
    attention += "annealing_steps: null, projection_init: {kind: identity, scale: 0.5}}"
    recipe = tiny_recipe(f"model.attention={attention}", "training.steps=3", "optimizer.lr=0.1")
    train(recipe)
    checkpoint = CheckpointStore(Path(recipe.run_dir)).latest()
    export_checkpoint(checkpoint, tmp_path / "fold")
    options = EvaluateSettings(data=(str(folder / "text.jsonl"),))
    suites, out = ["loss", "outliers"], tmp_path / "out"
    evaluate([checkpoint, tmp_path / "fold"], suites, out, options, [])
    found = json.loads((out / "results.json").read_text())["suites"]
    measure = found["loss"]["measures"]["nats per token"]
    nats = []
    for text in TEXTS:
        ids = list(text.encode())
        for first in range(0, len(ids), 63):
            window = torch.tensor([[256, *ids[first : first + 63]]])
            logits = training_logits(open_checkpoint(checkpoint), window)[0, :-1]
            nats.append(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none"))
    expected = torch.cat(nats).mean().item()
    assert measure["targets"]["fold"]["value"] == pytest.approx(expected, rel=1e-5)
    assert measure["differences"]["fold"] == {"value": 0, "low": 0, "high": 0, "items": 6}
    # The fold is an export whose output projection contains DEX's term, so it is an ordinary Llama.
    # Suites that analyse attention therefore measure the same values for both targets.
    first, second = found["outliers"]["totals"].values()
    assert first == second
    (target,) = find_targets([tmp_path / "fold"], tmp_path)
    assert target.attention.kind == "softmax"


def test_one_rank_exports_targets_in_a_child_process(folder, tmp_path, monkeypatch):
    """Check that only rank 0 exports, in a child process without the launcher's variables.

    The export compares logits in process groups of one rank, so it needs a process outside the
    launcher's process group.
    """
    import_model(folder / "plain", tmp_path / "run", verify=False)
    (target,) = find_targets([tmp_path / "run"], tmp_path / "out")
    started = []

    def run(command, env, check):
        started.append(command)
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & env.keys()
        assert command[:3] == [sys.executable, "-m", "diffmegatron"]
        assert app(command[3:], standalone_mode=False) is None
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(Ranks, "barrier", lambda ranks: None)
    monkeypatch.setattr(subprocess, "run", run)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    export_targets([target], Ranks(1, 2))
    assert not started
    with monkeypatch.context() as within:
        within.delenv("RANK")
        within.delenv("WORLD_SIZE")
        export_targets([target], Ranks(0, 2))
    assert len(started) == 1
    assert (target.export / "model.safetensors").exists()
    export_targets([target], Ranks(0, 2))
    assert len(started) == 1
    shutil.rmtree(target.export)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess("", 2))
    with pytest.raises(UserError, match=r"the export of .* failed with the error above"):
        export_targets([target], Ranks(0, 2))


def test_targets_have_distinct_names(tmp_path):
    for name in ("a/hf", "b/hf"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    found = find_targets([tmp_path / "a/hf", tmp_path / "b/hf"], tmp_path)
    assert [target.name for target in found] == ["a-hf", "b-hf"]
    assert find_targets([tmp_path / "a/hf"], tmp_path)[0].name == "hf"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda path: path.mkdir(),
            "is not a model; give a Hugging Face folder with a config.json",
        ),
        (
            lambda path: path.write_text("text"),
            "is not a model; give a Hugging Face folder with a config.json",
        ),
        (
            lambda path: (path.mkdir(), (path / "config.json").write_text("[]")),
            r"config\.json is damaged",
        ),
        (
            lambda path: (path.mkdir(), (path / "config.json").write_text('{"model_type": "x"}')),
            r"config\.json cannot be used",
        ),
    ],
)
def test_a_target_that_is_not_a_model_is_a_one_line_error(make, said, tmp_path, folder):
    make(tmp_path / "thing")
    with pytest.raises(UserError, match=said) as caught:
        evaluate(
            [tmp_path / "thing"],
            ["loss"],
            tmp_path / "out",
            EvaluateSettings(data=(str(folder),)),
            [],
        )
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_filled_in(folder, tmp_path):
    def drop(weights: dict) -> None:
        del weights["model.norm.weight"]

    change_weights(folder / "plain", tmp_path / "less", drop)
    (target,) = find_targets([tmp_path / "less"], tmp_path)
    with pytest.raises(UserError, match=r"is not a complete model.*model\.norm\.weight"):
        _ = Model(target).network


def test_weights_outside_the_folder_are_refused(folder, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "hf")
    outside = shutil.move(tmp_path / "hf/model.safetensors", tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), f"../{outside.name}")}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    (target,) = find_targets([tmp_path / "hf"], tmp_path)
    with pytest.raises(UserError, match=r"of its folder for each tensor, not '\.\./outside"):
        _ = Model(target).network
    with pytest.raises(UserError, match=r"of its folder for each tensor, not '\.\./outside"):
        evaluate(
            [tmp_path / "hf"], ["loss"], tmp_path / "out", EvaluateSettings(data=(str(folder),)), []
        )


def test_the_fingerprint_covers_every_file_that_is_read(tmp_path):
    write_pretrained(tmp_path / "hf", "llama 2", shard_size="20KB")

    def fingerprint() -> str:
        (target,) = find_targets([tmp_path / "hf"], tmp_path)
        return target.fingerprint

    before = fingerprint()
    unread = {"generation_config.json"}
    for file in sorted(set(tmp_path.glob("hf/*")) - {tmp_path / "hf" / name for name in unread}):
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        assert fingerprint() != before, file.name
        file.write_bytes(content)
    assert fingerprint() == before


def test_the_data_of_all_suites_are_read_before_the_first_runs(folder, tmp_path):
    """Check that a suite whose data are wrong ends the evaluation before an earlier suite runs."""
    names = ["loss", "associative-recall"]
    options = EvaluateSettings(data=(str(folder / "text.jsonl"),))
    with pytest.raises(UserError, match="not pairs of different keys"):
        evaluate([folder / "plain"], names, tmp_path / "out", options, [])
    assert not (tmp_path / "out/loss").exists()


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        (["los"], [], "'los' is unknown; did you mean 'loss'"),
        (["loss", "loss"], [], "names a suite twice"),
        (["loss"], ["loss.contxt=4"], "suite 'loss': unknown key 'contxt'; did you mean 'context'"),
        (["loss"], ["loss.context=many"], "suite 'loss': context is 'many'"),
        (["loss"], ["context=4"], "does not have the form SUITE.KEY=VALUE"),
    ],
)
def test_unknown_suites_and_invalid_settings_are_errors(names, settings, said, folder, tmp_path):
    options = EvaluateSettings(data=(str(folder / "text.jsonl"),))
    with pytest.raises(UserError, match=re.escape(said)):
        evaluate([folder / "plain"], names, tmp_path / "out", options, settings)
    with pytest.raises(UserError, match="suite 'loss' needs --data"):
        evaluate([folder / "plain"], ["loss"], tmp_path / "out", EvaluateSettings(), [])


# Restarts


def test_an_interrupted_evaluation_resumes_to_the_same_results(measure, tmp_path, monkeypatch):
    # Each batch has one text. With larger batches, a restart would form other batches, which may
    # change the last bits of the losses.
    whole = measure("diff", out="whole", batch_tokens=1)
    expected = (tmp_path / "whole/loss/diff.jsonl").read_bytes()
    order = [json.loads(line)["item"] for line in expected.splitlines()[1:]]
    asked = []
    add = SharedRecords.add

    def dies_at_third(self, key, record):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(key)
        add(self, key, record)

    monkeypatch.setattr(SharedRecords, "add", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        measure("diff", batch_tokens=1)
    file = tmp_path / "out/loss/diff.jsonl"
    assert expected.startswith(file.read_bytes())
    # Cut the file within its last line, as if the process had been killed during a write.
    content = file.read_bytes()[:-5]
    file.write_bytes(content)
    monkeypatch.setattr(
        SharedRecords, "add", lambda *given: (asked.append(given[1]), add(*given))[1]
    )
    assert measure("diff", batch_tokens=1) == whole
    assert file.read_bytes() == expected
    assert asked == [*order[:2], *order[1:]]


def test_a_results_file_cut_at_any_byte_is_continued(tmp_path):
    header, records = {"suite": "x", "items": "y"}, [{"v": 0.1}, {"v": 2}]
    path = tmp_path / "folder/file.jsonl"
    with RecordFile(path, header) as file:
        for number, record in enumerate(records):
            file.add(str(number), record)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with RecordFile(path, header) as file:
            there = set(file.records)
            for number, record in enumerate(records):
                if str(number) not in file.records:
                    file.add(str(number), record)
        assert path.read_bytes() == content
        assert len(there) == max(0, content[:length].count(b"\n") - 1)


def test_results_of_other_settings_and_damaged_results_are_refused(measure, folder, tmp_path):
    measure("plain")
    with pytest.raises(UserError, match="has results for other settings"):
        measure("plain", settings=("loss.context=32",))
    file = tmp_path / "out/loss/plain.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(UserError, match="damaged at line 8"):
        measure("plain")
    file.write_bytes(b"".join([lines[0], b"{\n", *lines[1:]]))
    with pytest.raises(UserError, match="at line 2 was changed: its checksum is wrong or missing"):
        measure("plain")


@pytest.mark.parametrize("count", [1, 2])
def test_a_results_folder_replaced_during_the_run_is_an_error(count, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "barrier", lambda _: None)
    path = tmp_path / "loss" / "file.jsonl"
    with SharedRecords(path, {"suite": "x"}, Ranks(0, count)) as file:
        file.add("a", {"v": 1})
        file.gather(["a"])
        file.add("b", {"v": 2})
        path.parent.rename(tmp_path / "moved")
        path.parent.mkdir()
        with pytest.raises(UserError, match=r"file\.jsonl lacks 2 measured items"):
            file.gather(["a", "b"])


def test_a_changed_byte_of_a_result_is_refused_or_measured_again(tmp_path):
    """Check that reading raises an error if any byte of the file but the last one is changed.

    The last byte ends the last line. If it is changed, the item of this line counts as missing and
    is measured again.
    """
    header, records = {"suite": "x", "items": "y"}, [{"v": 0.125}, {"v": "ä"}]
    path = tmp_path / "file.jsonl"
    with RecordFile(path, header) as file:
        for number, record in enumerate(records):
            file.add(str(number), record)
        written = file.records
    content, draw = path.read_bytes(), random.Random(0)
    for place, byte in enumerate(content):
        for changed in {byte ^ (1 << draw.randrange(8)), ord("7")} - {byte}:
            path.write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
            try:
                with RecordFile(path, header) as file:
                    found = file.records
            except UserError as error:
                assert "was changed: its checksum is wrong or missing" in str(error)
            else:
                assert place == len(content) - 1, "a change before the last byte was accepted"
                assert found == {"0": written["0"]}


@pytest.mark.parametrize("line", [0, 3])
def test_a_changed_digit_or_missing_checksum_is_an_error(line, measure, tmp_path):
    measure("plain")
    file = tmp_path / "out/loss/plain.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    # Lines that earlier versions wrote have no checksum. They are refused too.
    changed = re.sub(r"\d(?=\D*$)", lambda found: str((int(found[0]) + 1) % 10), lines[line])
    for other in (changed, re.sub(', "crc32": .*', "}", lines[line])):
        assert other != lines[line]
        file.write_text("".join([*lines[:line], other, *lines[line + 1 :]]))
        with pytest.raises(UserError, match=rf"at line {line + 1} was changed: its checksum"):
            measure("plain")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("nats"), "it has no 'nats'"),
        (lambda record: record.pop("full"), "it has no 'full'"),
        (lambda record: record.update(nats=None), "unsupported operand"),
    ],
)
def test_an_invalid_record_is_an_error_before_any_request(
    change, said, measure, tmp_path, monkeypatch
):
    measure("plain")
    file = tmp_path / "out/loss/plain.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    record = json.loads(lines[2])
    del record["crc32"]
    change(record)
    file.write_text("".join([*lines[:2], sealed_line(record).decode(), *lines[3:5]]))
    asked = []
    monkeypatch.setattr(Loss, "requests_of", lambda *given: asked.append(given))
    with pytest.raises(UserError, match=rf"loss/plain\.jsonl at line 3 is not a record .*{said}"):
        measure("plain")
    assert not asked


# Values that are not finite, and models whose context is too short


def test_a_target_with_a_non_finite_item_has_no_measures(folder, measure):
    def spoil(weights: dict) -> None:
        weights["model.embed_tokens.weight"][ord("3")] = math.nan

    change_weights(folder / "plain", folder / "spoilt", spoil)
    found = measure("plain", "spoilt")
    # Only text 3 contains the digit 3.
    (said,) = found["not_run"]
    assert re.match(
        r"spoilt: 1 of 6 items have numbers that are not finite, .* first is text/3: the los",
        said,
    )
    for value in found["measures"].values():
        assert value["targets"]["spoilt"] is None
        assert value["differences"]["spoilt"] is None
        assert value["targets"]["plain"] is not None


def test_items_beyond_the_context_are_skipped_and_reported(measure):
    found = measure("plain", settings=("loss.context=100",))
    assert found["measures"] == {}
    assert found["not_run"] == [
        "plain: 6 of 6 items need a context of up to 100 tokens, and max_position_embeddings is 64"
    ]


def other_tokenizer(source: Path, out: Path) -> Path:
    """Copy a model to ``out`` and exchange the ids of "a" and "b" in its tokenizer."""
    shutil.copytree(source, out)
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    return out


def test_other_tokenizers_compare_by_bytes_alone(folder, measure):
    other_tokenizer(folder / "plain", folder / "other")
    found = measure("plain", "other")
    assert found["measures"]["bits per byte"]["differences"]["other"] is not None
    assert found["measures"]["nats per token"]["differences"]["other"] is None
    assert any("no differences of nats per token" in line for line in found["not_run"])
    with pytest.raises(UserError, match="suite 'loss' counts tokens, and the tokenizers of plain"):
        measure("plain", "other", settings=("loss.packed=true",))
    # Tokenizer files with the same JSON content but different bytes are the same tokenizer.
    path = folder / "other/tokenizer.json"
    path.write_text(json.dumps(json.loads((folder / "plain/tokenizer.json").read_text()), indent=3))
    assert measure("plain", "other", out="same")["not_run"] == []


# Intervals


def test_intervals_are_those_of_the_normal_distribution():
    """Check that the interval over many items is the mean plus and minus 1.96 standard errors."""
    random = np.random.default_rng(3)
    common, noise = random.normal(5, 2, 900), random.normal(0.1, 0.3, 900)
    first = {str(n): Mean(value) for n, value in enumerate(common)}
    second = {str(n): Mean(value) for n, value in enumerate(common + noise)}
    found = difference(second, first)
    error = noise.std() / math.sqrt(900)
    assert found.value == pytest.approx(noise.mean())
    assert found.low == pytest.approx(noise.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(noise.mean() + 1.96 * error, abs=0.15 * error)
    assert difference(second, first) == found
    # The interval of ``first`` alone is wider, because its standard error is 2 / 30. Without pairs,
    # the interval of the difference would be about nine times as wide as with pairs.
    alone = estimate(first)
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * 2 / 30, rel=0.15)


def test_measures_are_weighted_and_paired_by_item():
    first = {"a": Mean(1, 1), "b": Mean(9, 3), "c": Mean(100, 1)}
    second = {"b": Mean(3, 3), "a": Mean(2, 1)}
    assert estimate(first).value == 22
    # Only items a and b are in both dicts, so the difference is (2 + 3) / 4 - (1 + 9) / 4.
    assert difference(second, first)[::3] == (-1.25, 2)
    assert estimate({"a": Mean(1, 2)}) == (0.5, None, None, 1)
    assert estimate({}) is None
    assert estimate({"a": Mean(0, 0)}) is None


# Loss


@torch.no_grad()
def expected_nats(folder: Path, text: str, window: int) -> np.ndarray:
    """Return the loss of each byte of a text in nats, by transformers and numpy in float64.

    Each window begins with the start token 1.

    Args:
        folder: Hugging Face folder of the model.
        text: text to score; the tokens are its bytes.
        window: number of tokens in a window, including the start token.
    """
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids, found = list(text.encode()), []
    for first in range(0, len(ids), window - 1):
        part = ids[first : first + window - 1]
        logits = network(torch.tensor([[1, *part]])).logits[0, :-1].numpy()
        shifted = logits - logits.max(1, keepdims=True)
        log_sums = np.log(np.exp(shifted).sum(1))
        found.append(log_sums - shifted[np.arange(len(part)), part])
    return np.concatenate(found)


@pytest.mark.parametrize("name", ["diff", "plain"])
def test_loss_is_that_of_float64_and_numpy(name, folder, measure):
    nats = [expected_nats(folder / name, text, 64) for text in TEXTS]
    found = measure(name)["measures"]
    means = {measure: value["targets"][name] for measure, value in found.items()}
    joined = np.concatenate(nats)
    assert means["nats per token"]["value"] == pytest.approx(joined.mean(), rel=1e-5)
    # A token is one byte, so only the unit differs.
    assert means["bits per byte"]["value"] == pytest.approx(joined.mean() / math.log(2), rel=1e-5)
    assert means["nats per token"]["items"] == 6
    windows = [each[first : first + 63] for each in nats for first in range(0, len(each), 63)]
    expected = {}
    for n in (16, 32, 63):
        own = [window[:n] for window in windows if len(window) >= n]
        expected[f"nats per token, tokens 1 to {n} of windows that have as many"] = own
        if any(len(window) == 63 for window in windows):
            full = [window[:n] for window in windows if len(window) == 63]
            expected[f"nats per token, tokens 1 to {n}"] = full
    assert set(means) == {"nats per token", "bits per byte"} | {
        measure for measure, own in expected.items() if own
    }
    for measure_name, own in expected.items():
        if own:
            value = means[measure_name]["value"]
            assert value == pytest.approx(np.concatenate(own).mean(), rel=1e-5)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(folder, tmp_path):
    small = shutil.copytree(folder / "plain", tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 250}))
    options = EvaluateSettings(data=(str(folder / "text.jsonl"),))
    with pytest.raises(UserError, match=r"has ids up to \d+, and config.json has vocab_size 250"):
        evaluate([small], ["loss"], tmp_path / "out", options, [])
    assert not (tmp_path / "out/loss").exists()


def test_packed_windows_hold_the_documents_end_to_end(folder, measure):
    found = measure("plain", settings=("loss.packed=true", "loss.context=33"))["measures"]
    ids = [token for text in TEXTS for token in (*text.encode(), 256)]
    network = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float64)
    total = count = 0
    for first in range(0, len(ids), 32):
        part = torch.tensor([1, *ids[first : first + 32]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(
                network(part[None]).logits[0, :-1], part[1:], reduction="none"
            )
        total += losses[part[1:] != 256].sum().item()
        count += (part[1:] != 256).sum().item()
    assert found["nats per token"]["targets"]["plain"]["value"] == pytest.approx(total / count)
    assert count == sum(map(len, TEXTS))
    assert "bits per byte" not in found


def test_loss_distinguishes_a_broken_model(folder, measure):
    """Check that shuffled output rows raise the loss on repeated letters by over 1 bit per byte.

    The intact model predicts that each byte is the same as the byte before it.
    """

    def repeat(weights: dict) -> None:
        embedding = torch.nn.functional.normalize(torch.randn(264, 48), dim=1)
        weights["model.embed_tokens.weight"] = embedding
        weights["lm_head.weight"] = 5 * embedding

    def shuffle(weights: dict) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][torch.randperm(264)]

    torch.manual_seed(0)
    change_weights(folder / "plain", folder / "good", repeat)
    change_weights(folder / "good", folder / "broken", shuffle)
    (folder / "same.txt").write_text("".join(letter * 8 for letter in "abcdefgh" * 10))
    options = EvaluateSettings(data=(str(folder / "same.txt"),))
    out = folder / "broken_out"
    evaluate([folder / "good", folder / "broken"], ["loss"], out, options, [])
    found = json.loads((out / "results.json").read_text())["suites"]["loss"]["measures"]
    assert found["bits per byte"]["differences"]["broken"]["value"] > 1


# Reports


def test_trained_tokens_are_the_sum_over_the_stages(tmp_path):
    run, tokens = tmp_path / "run", 0
    for name, step in (("pretrain", 20), ("extend", 6)):
        tokens += step * read_recipe(write_checkpoint(run / name, step)).training.tokens_per_step
        with MetricsWriter(run / name, -1) as writer:
            writer.write(step, {"valid/loss": 3.0})
    recipe = run / "extend/recipe.yaml"
    start = f"checkpoint:\n  start_from: {run}/pretrain\n"
    recipe.write_text(recipe.read_text().replace("checkpoint:\n", start))

    def found(out: str) -> int | None:
        evaluate([run / "extend"], ["scaling"], tmp_path / out, EvaluateSettings(), [])
        results = json.loads((tmp_path / out / "results.json").read_text())
        return results["targets"]["extend"]["tokens"]

    assert found("both") == tokens
    shutil.rmtree(run / "pretrain/checkpoints")
    assert found("removed") is None


def test_the_report_is_complete_and_self_contained(folder, tmp_path):
    options = EvaluateSettings(data=(f"a&b={folder / 'text.jsonl'}", str(folder / "text.jsonl")))
    page = evaluate([folder / "diff", folder / "plain"], ["loss"], tmp_path / "out", options, [])
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "bits per byte, a&amp;b" in text
    results = json.loads((tmp_path / "out/results.json").read_text())
    measures = results["suites"]["loss"]["measures"]
    markdown = (tmp_path / "out/report.md").read_text()
    for value in (
        measures["bits per byte, a&b"]["targets"]["diff"]["value"],
        measures["bits per byte"]["differences"]["plain"]["low"],
    ):
        # The number of decimals depends on the narrowest interval of the row.
        shown = [f"{value:.{decimals}f}" for decimals in range(2, 7)]
        assert any(number in markdown for number in shown)
        assert any(number in text for number in shown)
    assert (tmp_path / "out/loss.png").stat().st_size > 10_000


def test_measures_of_sources_follow_the_totals_in_the_order_of_the_sources(folder, tmp_path):
    """Check that the measures of sources have the order of ``--data``.

    The source of the longest document is last in the first run, and first in the second run.
    """
    (folder / "long.txt").write_text("a long text of its own " * 3)
    paths = {name: str(folder / "text.jsonl") for name in ("z", "a")} | {"m": "long.txt"}
    data = tuple(f"{name}={folder / path}" for name, path in paths.items())
    for given in (data, data[::-1]):
        out = tmp_path / given[0][0]
        settings = ["loss.documents=1"]
        evaluate([folder / "plain"], ["loss"], out, EvaluateSettings(data=given), settings)
        found = json.loads((out / "results.json").read_text())["suites"]["loss"]["measures"]
        sources = [each[0] for each in given]
        per_source = [f"{m}, {s}" for s in sources for m in ("nats per token", "bits per byte")]
        assert list(found)[-6:] == per_source
        assert list(found)[:3] == [
            "nats per token",
            "bits per byte",
            "nats per token, tokens 1 to 16",
        ]


# The documentation and the command line

PAGE = DOCS / "evaluation.md"


def test_the_suite_of_the_docs_works(folder, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {
        "ItemGenerator": ItemGenerator,
        "ClassVar": ClassVar,
        "Item": Item,
        "Mean": Mean,
        "Path": Path,
        "Record": dict,
        "Scoring": Scoring,
        "Suite": Suite,
        "Target": Target,
        "pairwise": pairwise,
        "read_text": read_text,
    }
    exec(code, names)
    monkeypatch.setitem(SUITES, "rhymes", names["Rhymes"])
    (tmp_path / "couplets.txt").write_text("a cat\na hat\na bat")
    where = tmp_path / "out"
    with pytest.raises(UserError, match="suite 'rhymes' needs --data-dir"):
        evaluate([folder / "plain"], ["rhymes"], where, EvaluateSettings(), [])
    evaluate([folder / "plain"], ["rhymes"], where, EvaluateSettings(data_dir=tmp_path), [])
    found = json.loads((where / "results.json").read_text())["suites"]["rhymes"]
    # The items need a context of 256 tokens, and the model has only 64.
    assert found["not_run"][0].startswith("plain: 2 of 2 items need a context of up to 256 tokens")
    exec(code.replace("256", "64"), names)
    monkeypatch.setitem(SUITES, "rhymes", names["Rhymes"])
    evaluate(
        [folder / "plain"], ["rhymes"], tmp_path / "short", EvaluateSettings(data_dir=tmp_path), []
    )
    found = json.loads((tmp_path / "short/results.json").read_text())["suites"]["rhymes"]
    nats = [expected_nats(folder / "plain", text, 64)[5:] for text in ("a cata hat", "a hata bat")]
    assert found["measures"]["nats per token"]["targets"]["plain"]["value"] == pytest.approx(
        np.concatenate(nats).mean(), rel=1e-5
    )


def test_the_command_line_evaluates(folder, tmp_path, capsys):
    options = ["--data", f"held={folder / 'text.jsonl'}", "--out", str(tmp_path / "out")]
    settings = ["--set", "loss.context=32", "--set", "loss.documents=2"]
    targets = [str(folder / "plain"), str(folder / "diff")]
    command = ["evaluate", *targets, "--suite", "loss", *options, *settings]
    assert app(command, standalone_mode=False) is None
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out/report.html'}" in said
    assert re.search(
        r": diff is undecided \(2 items, fewer than 10\) beside plain: [-+]\d\S+ \[.*↓\n", said
    )
    found = json.loads((tmp_path / "out/results.json").read_text())["suites"]["loss"]
    assert found["settings"]["context"] == 32
    assert found["measures"]["nats per token"]["targets"]["plain"]["items"] == 2
