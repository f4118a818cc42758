"""The sections of a recipe, each with checks of its own values only."""

from pydantic import Field

from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.parallel_config import ParallelConfig, RecomputeConfig
from diffmegatron.config.recovery_config import CheckpointConfig, GuardConfig, WatchdogConfig
from diffmegatron.config.training_config import TrainingConfig
from diffmegatron.section import PathText, Section


class RecipeSections(Section):
    """The sections of a recipe. The subclass ``Recipe`` adds the checks across sections."""

    run_dir: PathText = Field(description="folder of everything that the run writes")
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
