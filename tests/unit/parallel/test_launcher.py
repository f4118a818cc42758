"""Environment variables that a launcher sets: their values, errors and warnings."""

import pytest
import torch

from diffmegatron.errors import UserError
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import LaunchEnvironment, read_launch
from diffmegatron.training.safeguards import save_warnings

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
OTHERS = (
    "DIFFMEGATRON_KILL_WAIT",
    "DIFFMEGATRON_SIGNAL_SECONDS",
    "LOCAL_RANK",
    "SLURM_JOB_END_TIME",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture
def environment(monkeypatch):
    def install(values):
        for name in (*WHOLE, *OTHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return install


def test_the_environment_is_read_with_and_without_a_launcher(environment):
    environment({})
    assert read_launch() == LaunchEnvironment(rank=0, ranks=1, local_rank=0, master=None)
    environment({"SLURM_JOB_END_TIME": "1735689600"})
    assert read_launch() == LaunchEnvironment(job_end=1735689600.0)
    environment({"DIFFMEGATRON_KILL_WAIT": "30", "DIFFMEGATRON_SIGNAL_SECONDS": "600"})
    assert read_launch() == LaunchEnvironment(kill_wait=30.0, signal_seconds=600.0)
    environment(WHOLE | {"LOCAL_RANK": "1"})
    assert read_launch() == LaunchEnvironment(rank=1, ranks=2, local_rank=1, master=("host", 1234))
    environment(WHOLE | {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (read_launch().attempt, read_launch().agent_store) == (3, True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": None}, "sets WORLD_SIZE and .* but not RANK"),
        ({"WORLD_SIZE": None}, "but not WORLD_SIZE"),
        ({"WORLD_SIZE": ""}, "but not WORLD_SIZE"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'; it must be a whole number from 1 to"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE '0'"),
        ({"WORLD_SIZE": "9" * 5_000}, "WORLD_SIZE '999"),
        ({"RANK": "2"}, "RANK '2'; it must be a whole number from 0 to 1$"),
        ({"RANK": "-1"}, "RANK '-1'"),
        ({"RANK": "1.0"}, "RANK '1.0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT 'http'; it must be a whole number from 1 to 65535$"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT '65536'"),
        ({"LOCAL_RANK": "gpu0"}, "LOCAL_RANK 'gpu0'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK '-1'"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT 'x'"),
        ({"SLURM_JOB_END_TIME": "2025-01-01T00:00:00"}, "SLURM_JOB_END_TIME '2025-.*since 1970"),
        ({"SLURM_JOB_END_TIME": "nan"}, "SLURM_JOB_END_TIME 'nan'"),
        ({"SLURM_JOB_END_TIME": "1e400"}, "SLURM_JOB_END_TIME '1e400'"),
    ],
)
def test_an_invalid_environment_is_a_short_error(changes, sentence, environment):
    values = WHOLE | changes
    environment({name: value for name, value in values.items() if value is not None})
    with pytest.raises(UserError, match=sentence) as caught:
        read_launch()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_JOB_END_TIME"])
def test_variables_used_without_a_launcher_are_checked(name, environment):
    environment({name: "soon"})
    with pytest.raises(UserError, match=f"{name} 'soon'"):
        read_launch()


def test_a_rank_without_a_gpu_is_an_error(environment, monkeypatch):
    environment(WHOLE | {"LOCAL_RANK": "4"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with (
        pytest.raises(UserError, match=r"LOCAL_RANK 4, but 4 GPUs are visible; .* LOCAL_RANK 0"),
        default_group(),
    ):
        pass


@pytest.mark.parametrize(
    ("seconds", "limits", "margin", "said"),
    [
        (31.0, {"kill_wait": 30.0}, 300.0, {"kill wait"}),
        (29.0, {"kill_wait": 30.0}, 300.0, set()),
        (310.0, {"job_end": 1e9, "signal_seconds": 600.0}, 300.0, {"lead"}),
        (290.0, {"job_end": 1e9, "signal_seconds": 600.0}, 300.0, set()),
        (290.0, {"job_end": 1e9, "signal_seconds": 60.0}, 300.0, {"lead"}),
        (290.0, {"job_end": 1e9}, 600.0, set()),
        (1e4, {}, 300.0, set()),
    ],
)
def test_a_save_too_long_for_slurm_is_warned_about(seconds, limits, margin, said):
    assert set(save_warnings(seconds, LaunchEnvironment(**limits), margin)) == said
