"""Stages of a recipe: names, overrides, and checks that one run can start from another."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import lexists, realpath
from pathlib import Path
from typing import Any

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.attention.kinds.layer_kinds import in_layer_order, without_windows
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import read_bytes, shorten

MAX_STAGES = 64
# Prefix of an override that changes only one stage: stages.NAME.key=value.
STAGES = "stages."
# Files and folders that a run and its jobs write into run_dir. Stages must not have these names,
# because the folders of stages are in run_dir too.
RESERVED = frozenset(
    {"attempts", "checkpoints", "events", "job.sh", "job.yaml", "job_number", "lock", "profile"}
    | {
        "metrics.jsonl",
        "recipe.yaml",
        "stacks",
        "stopped_at",
        "tensorboard",
        "torchrun.sh",
        "wandb_id",
    }
)
# Numbered files of jobs and ranks, and temporary files that are renamed to a reserved name.
_RESERVED_FORMS = re.compile(
    rf"job_\d+\.log|preflight_\d+|({'|'.join(map(re.escape, sorted(RESERVED)))})\..*"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# Files of a Hugging Face tokenizer that determine its ids and the end of a document.
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json")
# A stage may change these keys, because the weights of an earlier stage fit any value of them.
_FREE = frozenset({"model.rope_theta", "model.rope_scaling", "model.initialization"})


@dataclass(frozen=True)
class Stage:
    """One entry of ``stages``.

    Attributes:
        changes: values that replace those outside of ``stages``, nested by section.
        start_from: earlier stage whose weights this stage starts with; None: the stage uses its
            ``checkpoint.start_from``.
    """

    changes: dict[str, Any]
    start_from: str | None


def read_stages(stages: Any, path: str) -> dict[str, Stage]:
    """Return the stages of a recipe by name, in order."""
    if not isinstance(stages, list) or not 1 <= len(stages) <= MAX_STAGES:
        raise UserError(
            f"{path}: stages is {shorten(repr(stages))}; give a list of 1 to {MAX_STAGES} "
            "mappings, or leave it out"
        )
    named: dict[str, Stage] = {}
    for stage in stages:
        changes = dict(stage) if isinstance(stage, dict) else {}
        name = changes.pop("name", None)
        if not isinstance(name, str) or name in named or not is_stage_name(name):
            raise UserError(
                f"{path}: stages must be a list of mappings, each with its own name: up to 64 "
                "letters, digits, '_', '-' and '.', no '-' or '.' first, and none of "
                f"{', '.join(sorted(RESERVED))}; {shorten(repr(stage))} is not"
            )
        start = changes.pop("start_from", next(reversed(named), None))
        if start is not None and (not isinstance(start, str) or start not in named):
            hint = f"give one of {', '.join(named)}" if named else "give checkpoint.start_from"
            raise UserError(
                f"{path}, stage {name!r}: start_from is {shorten(repr(start))}, which is not "
                f"an earlier stage; {hint}"
            )
        checkpoint = changes.get("checkpoint")
        if start is not None and isinstance(checkpoint, dict) and "start_from" in checkpoint:
            raise _starts_elsewhere(f"{path}, stage {name!r}", checkpoint["start_from"])
        named[name] = Stage(changes, start)
    return named


def is_stage_name(name: str) -> bool:
    """Return whether a stage and its folder in ``run_dir`` may have this name."""
    is_reserved = name in RESERVED or _RESERVED_FORMS.fullmatch(name)
    return _NAME.fullmatch(name) is not None and not is_reserved


def _starts_elsewhere(origin: str, start: Any) -> UserError:
    return UserError(
        f"{origin}: checkpoint.start_from is {shorten(repr(start))}; a stage after the first "
        "starts from the stage before it, or from its key start_from; leave it out"
    )


def by_stage(
    overrides: Sequence[str], stages: Mapping[str, Stage], path: str
) -> dict[str, list[str]]:
    """Return stage name -> overrides of the stage; overrides for all stages come first.

    An override ``stages.NAME.key=value`` becomes ``key=value`` of the stage NAME.
    """
    shared = [each for each in overrides if not each.startswith(STAGES)]
    own: dict[str, list[str]] = {name: [] for name in stages}
    for override in overrides:
        if not override.startswith(STAGES):
            continue
        rest = override.removeprefix(STAGES)
        # Names may contain dots, so one can be a prefix of another; choose the longest.
        name = max((each for each in stages if rest.startswith(f"{each}.")), key=len, default=None)
        if name is None:
            raise UserError(
                f"override {shorten(override)!r} names no stage of {path}; give "
                f"stages.NAME.section.key=value with one of {', '.join(stages)}"
            )
        key, _, value = rest.removeprefix(f"{name}.").partition("=")
        if key == "checkpoint.start_from" and stages[name].start_from is not None:
            raise _starts_elsewhere(f"override {shorten(override)!r}", value)
        own[name].append(rest.removeprefix(f"{name}."))
    return {name: [*shared, *changes] for name, changes in own.items()}


def check_can_start_from(before: Recipe, before_name: str, now: Recipe, now_name: str) -> None:
    """Check that the run ``now`` can start with the weights of the run ``before``.

    The networks, layer by layer, and tokenizers must be equal, except that ``now`` may:

    - add LoRA,
    - change the keys in ``_FREE``, the windows and the ``free_keys`` of its attention,
    - have a kind of attention whose ``foundation`` has the kind of ``before``.

    With muP, ``model.initialization`` must be equal too.
    """
    attention = now.model.attention
    foundation = attention.foundation
    if foundation is not None and foundation.kind.kind == before.model.attention.kind:
        attention = LayerKinds(kinds=(foundation.kind,))
    earlier = in_layer_order(without_windows(before.model.attention), before.model.num_layers)
    attention = in_layer_order(without_windows(attention), now.model.num_layers)
    was, is_now = (
        model_keys(recipe.model, of) | {"data.tokenizer": recipe.data.tokenizer}
        for recipe, of in ((before, earlier), (now, attention))
    )
    free = _FREE | {f"model.attention.{key}" for key in attention.free_keys}
    if is_same_tokenizer(was["data.tokenizer"], is_now["data.tokenizer"]):
        free |= {"data.tokenizer"}
    if now.model.initialization.scheme == "mup":
        # The learning rates of muP fit only weights that began with it.
        free -= {"model.initialization"}
    for key, value in is_now.items():
        is_new_lora = key == "model.lora" and was.get(key) is None
        if key not in free and not is_new_lora and was.get(key) != value:
            raise UserError(
                f"{before_name} has {key} {was.get(key)!r} and {now_name} has {value!r}; a run "
                "that starts with another's weights must have the same network and tokenizer"
            )


def is_same_tokenizer(one: str, other: str) -> bool:
    """Return whether two values of ``data.tokenizer`` have one name, one path or equal files."""
    if one == other or realpath(one) == realpath(other):
        return True
    files = _tokenizer_files(one)
    return files is not None and files == _tokenizer_files(other)


def _tokenizer_files(name: str) -> tuple[bytes, ...] | None:
    """Return the files of a tokenizer that determine its ids; None if a required one is missing."""
    path = Path(name)
    if path.name == _FOLDER_FILES[0]:
        path = path.parent
    files = [path / each for each in _FOLDER_FILES]
    if path.suffix == ".tiktoken":
        rules = path.with_suffix(".json")
        files = [path, rules] if lexists(rules) else [path]
    try:
        return tuple(read_bytes(file) for file in files)
    except UserError:
        return None


def model_keys(model: ModelConfig, attention: LayerKinds) -> dict[str, Any]:
    """Return the settings of a network by dotted key, such as ``model.num_layers``.

    The settings of ``attention`` replace those of ``model.attention``.
    """
    others = model.model_dump(exclude={"attention"})
    return {f"model.attention.{key}": value for key, value in attention.keys().items()} | {
        f"model.{key}": value for key, value in others.items()
    }
