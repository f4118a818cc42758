"""Metrics of a run in Weights & Biases (W&B), in addition to the files in ``run_dir``."""

import importlib.util
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import WandbConfig
from diffmegatron.errors import UserError
from diffmegatron.files import read_text, write_durably

log = logging.getLogger(__name__)

RUN_ID = "wandb_id"  # File in run_dir with the run's id at W&B, which a resumed run uses again.
_MAX_ID_BYTES = 64


def check_installed(config: WandbConfig | None) -> None:
    """Raise a UserError if the recipe uses W&B and the package is not installed."""
    if config is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"training.wandb names project {config.project!r} and the package wandb is not "
            "installed; install diffmegatron[wandb], or leave training.wandb out"
        )


class WandbWriter:
    """Writer that sends metrics to W&B, until W&B's first error, which is logged."""

    def __init__(self, recipe: Recipe, config: WandbConfig) -> None:
        self._recipe, self._config = recipe, config
        self._run: Any = None

    def __enter__(self) -> Self:
        import wandb

        run_dir, config = Path(self._recipe.run_dir), self._config
        with self._until_failure("begin"):
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.name,
                id=_run_id(run_dir),
                resume="allow",
                dir=str(run_dir),
                config=self._recipe.model_dump(mode="json"),
            )
            # After a rollback the step decreases, but W&B's own step counter cannot decrease.
            self._run.define_metric("*", step_metric="step")
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        if self._run is not None:
            with self._until_failure("continue"):
                self._run.log({"step": step, **values})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._run is not None:
            with self._until_failure("end"):
                self._run.finish(exit_code=0 if kind is None else 1)

    @contextmanager
    def _until_failure(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            log.error("W&B could not %s: %s; the run continues without it", doing, error)


def _run_id(run_dir: Path) -> str:
    path = run_dir / RUN_ID
    if path.exists():
        return read_text(path, max_bytes=_MAX_ID_BYTES).strip()
    name = uuid.uuid4().hex
    write_durably(path, f"{name}\n".encode())
    return name
