"""The numbers of a run every ``training.log_interval`` steps."""

from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.observations import lambdas, peak_memory, utilization
from diffmegatron.training.run import Run


class MetricsHook(Hook):
    """Records what a step and the steps since the last record have shown, and prints a line."""

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        if run.step % run.recipe.training.log_interval and not run.is_at_last_step:
            return
        speed = run.progress.tokens_per_second(run.step)
        values = run.values | {
            "perf/tokens_per_second": speed,
            **utilization(run.recipe, run.parallel_state.world_size, speed),
            "mem/peak_gib": peak_memory() / 2**30,
            "data/consumed_samples": run.loader.consumed_samples,
            "data/consumed_tokens": run.loader.consumed_tokens,
        }
        others = (
            lambdas(run.network, run.parallel_state)
            | run.guard.metrics()
            | run.clock.report(run.parallel_state)
            | run.source_losses.report()
        )
        run.rank_record.reported(run.clock.slow_ranks)
        run.write_metrics(values | others)
        if run.parallel_state.is_main:
            run.progress.line(run.step, values)
