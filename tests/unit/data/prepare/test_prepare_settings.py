"""The command line, Python and the manifest have the same settings of ``prepare``."""

import inspect
from dataclasses import fields

from typer.testing import CliRunner

from diffmegatron import cli
from diffmegatron.commands import data
from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.prepare.prepare_settings import PrepareSettings


def test_every_setting_is_an_option_with_the_same_default():
    options = inspect.signature(data.prepare).parameters
    assert "settings" not in options
    for setting in fields(PrepareSettings):
        assert options[setting.name].default == setting.default


def test_the_command_line_and_python_write_the_same_manifest(tmp_path):
    lines = ['{"body": "one", "key": 1}', '{"body": "one", "key": 2}', '{"body": "long text"}', "x"]
    corpus = tmp_path / "in.jsonl"
    corpus.write_text("\n".join(lines))
    words = "--tokenizer bytes --text-field body --id-field key --deduplicate"
    limits = "--max-document-bytes 26 --max-reject-share 0.5"
    result = CliRunner().invoke(
        cli.app,
        ["prepare", str(corpus), "--output", str(tmp_path / "a"), *words.split(), *limits.split()],
    )
    assert result.exit_code == 0, result.output
    manifest = prepare(
        [corpus],
        tmp_path / "b",
        "bytes",
        "body",
        id_field="key",
        deduplicate=True,
        max_document_bytes=26,
        max_reject_share=0.5,
        show_progress=False,
    )
    assert manifest.settings == {
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "layout": "text",
        "text_field": "body",
        "prompt_field": "prompt",
        "response_field": "response",
        "messages_field": "messages",
        "id_field": "key",
        "deduplicate": True,
        "max_document_bytes": 26,
    }
    other = read_corpus_manifest(tmp_path / "a")
    assert other.settings == manifest.settings
    assert (other.documents, other.duplicates, other.rejected) == (2, 1, 1)
    assert manifest.documents == other.documents
