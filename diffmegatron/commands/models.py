"""Commands on a recipe or a model, and the check of the installation."""

import sys
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from diffmegatron.errors import UserError

RecipePath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="Recipe, a YAML file such as configs/quickstart.yaml"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides such as optimizer.lr=1e-3", metavar="KEY=VALUE"),
]


def plan(
    config: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of ranks; default: the fewest that fill the layout")
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=(
                "GPU to estimate for: A100, H100, H100 PCIe, H100 NVL, H200 or B200, or the "
                "measurements of tune (.json)"
            ),
        ),
    ] = "H100",
    search: Annotated[
        int | None,
        typer.Option(metavar="GPUS", help="List the best layouts for this many GPUs instead"),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run two steps of a shrunk model on CPU ranks instead"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Estimate memory, traffic and step time of a recipe.

    No GPU is needed. With --search, rank the layouts of a number of GPUs instead. With --rehearse,
    train a shrunk model for two steps on CPU ranks instead.
    """
    from diffmegatron import plan as planning
    from diffmegatron.attention.kinds.dex import assumptions
    from diffmegatron.config.load import load_stages
    from diffmegatron.data.index.corpus_manifest import with_document_mask

    if rehearse and (as_json or search is not None):
        raise UserError("--rehearse runs a layout; drop --search and --json")
    if search is not None and gpus is not None:
        raise UserError(f"--search {search} ranks layouts of that many GPUs; drop --gpus {gpus}")
    loaded = load_stages(config, overrides or [], allow_missing_files=True)
    stages = [with_document_mask(stage) for stage in loaded]
    # Standard output may be JSON, so print assumptions about missing files to standard error.
    kinds = [kind for stage in stages for kind in stage.model.attention.kinds]
    for sentence in dict.fromkeys(assumptions(kinds)):
        print(f"assumed: {sentence}", file=sys.stderr)
    if rehearse:
        from diffmegatron.plan.rehearse import rehearse as rehearse_stages

        rehearse_stages(stages, gpus)
    elif search is not None:
        planning.run_search(stages, search, hardware=hardware, as_json=as_json)
    else:
        planning.run_plan(stages, gpus, hardware=hardware, as_json=as_json)


def tune(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...", help="Recipes, then overrides such as parallel.tensor=2"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write instead of the one in the user's cache"),
    ] = None,
) -> None:
    """Verify and time the kernels of recipes on this machine.

    Training with attention_backend auto then takes the fastest backend that is right here. Use the
    same launcher as for training to time collectives too.

    The table of an attention shape has a row for each backend: whether its result is right, its
    largest error divided by the allowed one, the median and half the spread of the times of the
    forward and backward pass, and its time divided by the fastest right backend's.

    Example: diffmegatron tune configs/quickstart.yaml
    """
    from diffmegatron.config.load import load_stages
    from diffmegatron.data.index.corpus_manifest import with_document_mask
    from diffmegatron.parallel.launcher import read_launch
    from diffmegatron.tuning import tune as tuning
    from diffmegatron.tuning.tables import print_tuned

    overrides = [each for each in recipes if "=" in each]
    paths = [each for each in recipes if "=" not in each]
    if not paths:
        raise UserError("tune has overrides and no recipe; give a recipe such as quickstart.yaml")
    stages = [
        with_document_mask(stage)
        for path in paths
        for stage in load_stages(path, overrides, allow_missing_files=True)
    ]
    found = tuning.tune(stages, out)
    if found is not None:
        print_tuned(found, stages, read_launch().ranks)


def train(config: RecipePath, overrides: Overrides = None) -> None:
    """Train a recipe, in one process or under torchrun.

    A run resumes from the newest checkpoint in run_dir.

    Exit status 0: the run is finished, saved and evaluated.

    75: a signal or the job's time limit stopped the run after a save; start it again to resume.

    2: the input has a mistake, the last save failed, the end of a job stopped the run twice
    before a new step, or the run stopped after several steps in a row with a spike or a
    non-finite value of the loss or gradient norm.

    69: some ranks did not connect; another start may succeed.

    1: the run crashed, or the watchdog ended a run that hung.
    """
    from diffmegatron import api
    from diffmegatron.attempts.ends import EXIT_STOPPED, RankRecord
    from diffmegatron.config.load import load_stages
    from diffmegatron.training.safeguards import exit_on_stop_signal

    with RankRecord.of_environment() as record, exit_on_stop_signal(record):
        stages = load_stages(config, overrides or [])
        if not api.train(stages, record=record):
            raise typer.Exit(EXIT_STOPPED)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint such as RUN_DIR/checkpoints/step_00001000, or RUN_DIR for its newest",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create")],
    serving: Annotated[
        bool,
        typer.Option(
            "--serving", help="Export diff_v1 as a class that vLLM loads; other kinds always are"
        ),
    ] = False,
    verify: Annotated[bool, typer.Option(help="Compare logits with the trained network's")] = True,
) -> None:
    """Export a checkpoint to a Hugging Face folder.

    Unless --no-verify is given, transformers loads the folder, and the command compares its logits
    with the trained network's.
    """
    from diffmegatron import api

    # An empty working directory may be the output, and is then replaced.
    written = out.absolute()
    verified = api.export(checkpoint, out, serving=serving, verify=verify)
    from diffmegatron.hf.write_export import loading_code

    print(f"wrote {out}")
    if verified is not None:
        print(verified)
    print(f"load it with\n\n{indent(loading_code(written, str(out)), '    ')}")


def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="Folder of a model: config.json and weights"),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create")],
    vocab_multiple: Annotated[
        int,
        typer.Option(min=1, help="Pad the vocabulary to a multiple of this number"),
    ] = 1,
    verify: Annotated[bool, typer.Option(help="Compare logits with those of transformers")] = True,
) -> None:
    """Import a Hugging Face model as a run to start from.

    Unless --no-verify is given, the logits of both models are compared.

    To train the imported network, write a recipe with "extends: OUT/recipe.yaml", its own run_dir
    and data, and checkpoint.start_from: OUT.

    Example: diffmegatron import SmolLM2-135M runs/smollm2
    """
    from diffmegatron.parallel.engine_imports import importing_engines
    from diffmegatron.parallel.launcher import check_launch

    check_launch()
    with importing_engines():
        from diffmegatron.hf.import_model import import_model

    verified = import_model(folder, out, vocab_multiple=vocab_multiple, verify=verify)
    print(f"wrote {out}")
    if verified is not None:
        print(verified)


def doctor() -> None:
    """Show installed and missing packages and chosen backends."""
    from diffmegatron import doctor as examination

    examination.print_examination()
