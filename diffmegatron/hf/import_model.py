"""``diffmegatron import``: write a pretrained Hugging Face model as a verified run directory."""

from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from diffmegatron.checkpoint.checkpoint_format import RECIPE, open_checkpoint
from diffmegatron.checkpoint.weights import write_checkpoint
from diffmegatron.config.load import check_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import HuggingFaceTokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_json, shorten
from diffmegatron.hf.atomic_directory import atomic_directory
from diffmegatron.hf.configuration import model_section, read_config
from diffmegatron.hf.export_checkpoint import sample, training_logits
from diffmegatron.hf.pretrained_files import PretrainedTensors, keep_original
from diffmegatron.hf.tokenizer import TOKENIZER_CONFIG
from diffmegatron.hf.weight_mapping import from_hf, table
from diffmegatron.hf.write_export import SUMMATION, Verified, verify_export
from diffmegatron.yaml_documents import dump_yaml

FOLDER = "hugging_face"
# Largest allowed difference of the logits, divided by the largest absolute logit. Both networks
# compute in float32 with equal weights, so only the order of summation differs.
_TOLERANCE = 1e-4
_SEQ_LENGTH = 2048


def import_model(
    folder: Path, out: Path, *, vocab_multiple: int = 1, verify: bool = True
) -> Verified | None:
    """Write a pretrained model as a run directory whose weights other runs can start from.

    On success, ``out`` contains

    - ``recipe.yaml``, which recipes of other runs extend;
    - a checkpoint of step 0 with weights only;
    - ``hugging_face/`` with the model's configuration and tokenizer, which exports of the other
      runs keep.

    Args:
        folder: folder of the model, with ``config.json``, safetensors files, ``tokenizer.json`` and
            ``tokenizer_config.json``.
        vocab_multiple: the embedding and the output layer are padded to a multiple of this number
            of rows, so that tensor-parallel ranks can shard them. Exports have no padding rows.
        verify: whether to compare the logits of ``transformers`` and of the training network. Both
            models must then fit into this process's memory in float32.

    Returns:
        The comparison; None without ``verify``.

    Raises:
        UserError: the model's files cannot be used, a recipe cannot express its network, ``out``
            exists and is not empty, or the logits differ too much. Nothing is then written to
            ``out``.
    """
    transformers_logging.disable_progress_bar()
    config, source = read_config(folder), PretrainedTensors(folder)
    tokenizer = HuggingFaceTokenizer(str(folder))
    section = model_section(config, -config.vocab_size % vocab_multiple)
    length = min(config.max_position_embeddings, _SEQ_LENGTH)
    recipe = _recipe(section, source, length, out, f"the recipe of {format_path(folder)}")
    _check_tokenizer(tokenizer, recipe)
    rules = table(recipe.model)
    source.check(rules, tied=recipe.model.tied_embeddings)
    with atomic_directory(out) as directory:
        keep_original(source, directory / FOLDER)
        (directory / RECIPE).write_text(_relative_recipe(recipe))
        weights = from_hf(source.stream(rules), recipe.model)
        written = write_checkpoint(weights, recipe, directory)
        if not verify:
            return None
        tokens = sample(tokenizer)
        difference = verify_export(
            folder, tokens, training_logits(open_checkpoint(written), tokens)
        )
        if not difference.relative <= _TOLERANCE:
            raise UserError(
                f"the imported network's logits differ from those of transformers by "
                f"{difference.relative:.1e} relative, more than {_TOLERANCE:g}; {format_path(out)} "
                "was not written"
            )
    return Verified(*difference, _TOLERANCE, SUMMATION)


def _recipe(
    section: dict[str, Any], source: PretrainedTensors, length: int, out: Path, name: str
) -> Recipe:
    """Return a recipe of the model, which recipes of other runs extend.

    Its data sources, number of steps, batch size and learning rate are placeholders. ``name`` is
    the name of the recipe in error messages.
    """
    out = out.resolve()
    values = {
        "run_dir": str(out),
        "model": section,
        "data": {"tokenizer": str(out / FOLDER), "sources": [{"path": "PREFIX"}]},
        "training": {
            "seq_length": length,
            "global_batch_size": 8,
            "steps": 1000,
            "precision": "bf16" if source.usual_dtype == "BF16" else "fp32",
        },
        "optimizer": {"lr": 1e-5},
    }
    return check_recipe(values, name)


def _relative_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML whose tokenizer is found beside it, also if the folder is moved."""
    values = recipe.model_dump(mode="json")
    values["data"]["tokenizer"] = f"./{FOLDER}"
    return dump_yaml(values)


def _check_tokenizer(tokenizer: HuggingFaceTokenizer, recipe: Recipe) -> None:
    config = tokenizer.folder / TOKENIZER_CONFIG
    if code := read_json(config, dict[str, Any]).get("auto_map"):
        raise UserError(
            f"{format_path(config)} has auto_map {shorten(repr(code))}, code that is not run here; "
            "if tokenizer.json gives the same ids, remove the key"
        )
    if tokenizer.vocab_size > recipe.model.tokens:
        raise UserError(
            f"the tokenizer in {format_path(Path(tokenizer.name))} uses {tokenizer.vocab_size} "
            f"ids, and config.json has vocab_size {recipe.model.tokens}; use the model's own "
            "tokenizer"
        )
