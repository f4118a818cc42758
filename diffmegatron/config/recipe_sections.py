"""The sections of a recipe, each checked alone."""

from pydantic import Field

from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.parallel_config import ParallelConfig, RecomputeConfig
from diffmegatron.config.recovery_config import CheckpointConfig, GuardConfig, WatchdogConfig
from diffmegatron.config.training_config import TrainingConfig
from diffmegatron.section import PathText, Section


class RecipeSections(Section):
    """Sections of a recipe before the checks between them; after these they are a ``Recipe``."""

    run_dir: PathText
    imports: tuple[str, ...] = Field(
        default=(), max_length=64, description="Python files or modules with your own code"
    )
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
