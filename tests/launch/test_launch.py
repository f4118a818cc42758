"""``diffmegatron launch``: it reports every mistake before it submits a job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.attempts.ledger import Ledger
from diffmegatron.commands.jobs import launch as launch_command
from diffmegatron.config.load import load_recipe
from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.errors import UserError
from diffmegatron.operations import launch
from diffmegatron.operations.cluster import Cluster, load_cluster, parse_time
from diffmegatron.operations.launch import (
    prepare_chain,
    prepare_launch,
    submit,
    submit_chain,
    summary,
)
from diffmegatron.operations.status import examine_run
from diffmegatron.operations.torchrun import torchrun_file
from tests.checkpoints import write_checkpoint
from tests.launch.conftest import FACTS, FOUR, SMALL, checkpoint
from tests.paths import ROOT

STAGES = """
stages:
  - {name: first}
  - {name: second, training: {steps: 5}}
  - {name: third, training: {steps: 4}}
"""


@pytest.fixture
def launched(corpus, tmp_path, monkeypatch):
    """Return a function that prepares a launch, by default on two nodes with two ranks each."""
    (tmp_path / "four.yaml").write_text(FOUR.format(run_dir=tmp_path / "run", corpus=corpus))
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str, nodes: int = 2, dependency=None, spares: int = 0, **changes):
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(SMALL | changes))
        return prepare_launch(tmp_path / "four.yaml", overrides, nodes, file, dependency, spares)

    return make


@pytest.fixture
def chained(launched, tmp_path):
    """Return a function that prepares the launch of a chain of three stages."""
    launched()  # writes cluster.yaml
    file = tmp_path / "stages.yaml"
    file.write_text((tmp_path / "four.yaml").read_text() + STAGES)

    def make(*overrides: str, recipe: str = "stages.yaml", dependency=None, **changes):
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(SMALL | changes))
        return prepare_chain(tmp_path / recipe, overrides, 2, tmp_path / "cluster.yaml", dependency)

    return make


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return a function that writes scripts that replace Slurm's commands.

    PATH has no other commands.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return make


def sbatch_lines(text: str) -> set[str]:
    return {line[10:] for line in text.splitlines() if line.startswith("#SBATCH --")}


def test_the_job_file_contains_every_cluster_setting(launched, tmp_path):
    text = launched(
        dependency="afterok:17",
        partition="gpu",
        account="us",
        qos="long",
        constraint="h100&nvme",
        exclude=["n3", "n5"],
        exclusive=True,
        memory="0",
        gpus_per_node=8,
        ranks_per_node=2,
        export="NONE",
        sbatch_options=["--mail-user=a@b.org", "--comment=paper #2", "--gres=nvme:1", "--no-bell"],
    ).text
    assert sbatch_lines(text) == {
        *("job-name=run", f"chdir={tmp_path}", f"output={tmp_path}/run/job_%j.log"),
        *("open-mode=append", "nodes=2", "ntasks-per-node=2", "cpus-per-task=1"),
        *("gpus-per-node=8", "mem=0", "time=30", "signal=USR1@600", "partition=gpu"),
        *("account=us", "qos=long", "constraint=h100&nvme", "exclude=n3,n5"),
        *("dependency=afterok:17", "export=NONE", "requeue", "exclusive"),
        *("mail-user=a@b.org", "comment='paper #2'", "gres=nvme:1", "no-bell"),
    }
    assert text.endswith((ROOT / "launch/slurm.sh").read_text().split("set -uo", 1)[1])


def test_an_omitted_cluster_key_adds_no_sbatch_option(launched):
    given = {line.partition("=")[0] for line in sbatch_lines(launched(cpus_per_rank=None).text)}
    assert given.isdisjoint({"cpus-per-task", "mem", "gpus-per-node", "partition", "exclusive"})
    assert "cpus-per-task" in {line.partition("=")[0] for line in sbatch_lines(launched().text)}
    assert Cluster(gpus_per_node=8, time_limit="30").cpus_per_rank is None


def test_spare_nodes_are_requested_and_have_no_ranks(launched):
    found = launched(spares=2)
    assert {"nodes=4", "ntasks-per-node=2", "no-kill"} <= sbatch_lines(found.text)
    assert "\nspares=2\n" in found.text
    assert found.job.ranks == 4
    assert "4 nodes are requested, 2 of them spare" in summary(found)


def test_the_job_file_quotes_values_for_the_shell(launched, tmp_path):
    image = tmp_path / "an image.sif"
    image.touch()
    text = launched(
        "run_dir=runs/a $(touch oops)",
        setup=["module load cuda"],
        environment={"NCCL_SOCKET_IFNAME": "ib0 'x'"},
        container={"kind": "apptainer", "image": str(image), "mounts": ["/data"]},
    ).text
    beginning = text.split("set -uo")[0].replace("module load cuda", "true")
    script = beginning + 'printf "%s\\n" "$@" "${container_command[@]}" "$NCCL_SOCKET_IFNAME"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        str(tmp_path / "four.yaml"),
        "run_dir=runs/a $(touch oops)",
        *("apptainer", "exec", "--nv", "--bind=/data", str(image), "ib0 'x'"),
    ]
    assert "module load cuda\n" in text


def test_a_pyxis_container_sets_srun_options(launched):
    text = launched(
        container={"kind": "pyxis", "image": "nvcr.io#a/b", "mounts": ["/a", "/b"]}
    ).text
    assert (
        "srun_options=(--container-image=nvcr.io#a/b --no-container-mount-home "
        "--container-mounts=/a:/a,/b:/b)"
    ).replace("--container-image=nvcr.io#a/b", "'--container-image=nvcr.io#a/b'") in text
    assert "container_command=()\n" in text


@pytest.mark.parametrize(
    ("overrides", "changes", "sentence"),
    [
        (["training.stepz=3"], {}, "did you mean 'steps'"),
        (["parallel.tensor=2"], {"ranks_per_node": 3, "nodes": 1}, "--nodes 1 means 3 ranks"),
        (["training.global_batch_size=6"], {}, "--nodes 2 means 4 ranks on this cluster: "),
        ([], {"partitoin": "gpu"}, "unknown key 'partitoin'; did you mean 'partition'"),
        ([], {"time_limit": "soon"}, "time_limit is 'soon': .*give minutes, H:MM:SS"),
        ([], {"partition": "a b"}, "partition is 'a b'"),
        ([], {"memory": 0}, "memory is 0: quote it, because YAML reads it as a number$"),
        (
            [],
            {"environment": {"OMP_NUM_THREADS": 1}},
            "environment.OMP_NUM_THREADS is 1: quote it, because YAML reads it as a number$",
        ),
        (
            [],
            {"environment": {"NCCL_IB_DISABLE": True}},
            "environment.NCCL_IB_DISABLE is True: quote it, because YAML reads it as a boolean$",
        ),
        ([], {"environment": {"A-B": "1"}}, "environment"),
        ([], {"setup": ["a\nb"]}, "setup.0 is"),
        ([], {"sbatch_options": ["mail-user=a"]}, "sbatch_options.0 is 'mail-user=a'"),
        ([], {"sbatch_options": ["--comment=a\nb"]}, "sbatch_options.0 is"),
        *(
            ([], {"sbatch_options": [option]}, f"{option}, but launch sets this option itself")
            for option in ("--time=1", "--part=x", "--no-requeue", "--array=1-3", "--exclusive")
        ),
        ([], {"dependency": "afterok:17\n"}, "option --dependency='afterok:17.n'; "),
        ([], {"gpu": "H1000"}, "hardware 'H1000' is unknown"),
        (
            [],
            {"container": {"kind": "apptainer", "image": "/no/such.sif"}},
            "container image /no/such.sif is missing",
        ),
        (["data.sources=[{path: nowhere}]"], {}, "nowhere"),
        (
            ["checkpoint.start_from=nowhere"],
            {},
            "checkpoint.start_from .*nowhere holds no checkpoint: ",
        ),
        (
            ["training.steps=1000000", "data.on_exhausted=stop"],
            {},
            r"reads source .* times, and data.on_exhausted is 'stop'",
        ),
    ],
)
def test_a_mistake_is_an_error_and_creates_no_run_dir(
    overrides, changes, sentence, launched, tmp_path
):
    with pytest.raises(UserError, match=sentence):
        launched(*overrides, **changes)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_newline_adds_no_line_to_the_job_file(launched, tmp_path, monkeypatch):
    (tmp_path / "a\n#SBATCH --uid=root").mkdir()
    monkeypatch.chdir(tmp_path / "a\n#SBATCH --uid=root")
    with pytest.raises(UserError, match=r"option --chdir='.*n#SBATCH .*without control characters"):
        launched()


def test_a_run_dir_with_sbatch_patterns_is_quoted(launched, tmp_path):
    lines = sbatch_lines(launched("run_dir=exp #2 %j").text)
    assert {"job-name='exp #2 %j'", f"output='{tmp_path}/exp #2 %%j/job_%j.log'"} <= lines


def test_a_dry_run_prints_no_secret_and_needs_no_corpus(launched, tmp_path, capsys):
    launched(environment={"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "WARN"}, gpu="H100")
    arguments = (tmp_path / "four.yaml", ["data.sources=[{path: nowhere}]"])
    for more in ({}, {"torchrun": True, "rendezvous": "n0:29500"}):
        launch_command(*arguments, nodes=2, cluster=tmp_path / "cluster.yaml", dry_run=True, **more)
        script, warnings = capsys.readouterr()
        assert "hf_abc" not in script
        assert "export NCCL_DEBUG=WARN\n" in script
        assert "warning: source nowhere is not prepared; the run would fail" in warnings
        line = next(line for line in script.splitlines() if "HF_TOKEN" in line)
        for environment, status in (({}, 127), ({"HF_TOKEN": "x"}, 0)):
            ran = subprocess.run(["bash", "-c", line], env=environment, capture_output=True)
            assert (ran.returncode, b"HF_TOKEN: set its value" in ran.stderr) == (
                status,
                status > 0,
            )


def test_the_recorded_environment_contains_no_secrets():
    script = (ROOT / "launch/slurm.sh").read_text()
    function = script[script.index("recorded_environment() {") :].partition("\n}\n")[0] + "\n}\n"
    kept = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n0", "FI_PROVIDER": "efa"}
    kept |= {"PATH": "/bin:/usr/bin", "TORCHELASTIC_RUN_ID": "a"}
    left = {"SLURM_JWT": "s", "DIFFMEGATRON_API_KEY": "s", "FILES": "s", "A": "x\nSLURM_B=s"}
    command = ["bash", "-c", f"{function} recorded_environment"]
    said = subprocess.run(command, env=kept | left, capture_output=True, text=True, check=True)
    assert dict(line.split("=") for line in said.stdout.splitlines()) == kept


def test_an_invalid_cluster_file_is_an_error(tmp_path):
    (tmp_path / "c.yaml").write_text("gpus_per_node: 8\n")
    with pytest.raises(UserError, match="key 'time_limit' is missing"):
        load_cluster(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("- 8\n")
    with pytest.raises(UserError, match="must be a mapping of keys, not list"):
        load_cluster(tmp_path / "c.yaml")


def test_the_example_cluster_file_loads():
    found = load_cluster(ROOT / "configs/clusters/example.yaml")
    assert (found.ranks, found.seconds, found.memory) == (8, 86_400, "0")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("24:00:00", 86_400),
        ("2-0", 172_800),
        ("1-02:30", 95_400),
        ("1-02:30:05", 95_405),
    ],
)
def test_slurm_time_formats_are_parsed(text, seconds):
    assert parse_time(text) == seconds
    assert Cluster(gpus_per_node=1, time_limit=text).seconds == seconds


def test_a_running_or_finished_run_is_not_launched_again(launched, attempt, tmp_path):
    attempt(75)
    launched()
    begun = attempt(None)
    with pytest.raises(UserError, match=r"is used by job 17: attempt 2 starts: .*wait for its end"):
        launched()
    for rank in range(4):
        RankRecord(tmp_path / f"run/attempts/{begun.number:04d}", rank).end(0)
    Ledger(tmp_path / "run").end(begun)
    with pytest.raises(UserError, match="is finished; give another run_dir"):
        launched()


def test_a_run_with_a_pending_job_is_not_launched_again(launched, commands, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job_number").write_text("23\n")
    commands(squeue="echo 22 RUNNING; echo 23 PENDING")
    with pytest.raises(
        UserError, match="has job 23, which is pending; wait for its end, scancel it"
    ):
        launched()
    commands(squeue="echo 22 RUNNING")
    launched()


def test_a_run_can_be_launched_again_once_its_job_left_the_queue(launched, commands, attempt):
    attempt(None)
    for script in ("echo 17 RUNNING", "echo no answer >&2; exit 1"):
        commands(squeue=script)
        with pytest.raises(UserError, match="is used by job 17: attempt 1 starts"):
            launched()
    commands(squeue="echo 18 RUNNING")
    launched()


def test_submitting_without_slurm_is_an_error(launched, commands, tmp_path):
    commands()
    with pytest.raises(UserError, match="there is no sbatch on this machine; go to a login node"):
        submit(launched())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("error: Batch job submission failed: no such thing", "Batch job submission failed: no"),
        ("fatal: Could not establish a configuration", "Could not establish a configuration"),
    ],
)
def test_a_rejection_by_slurm_is_an_error(said, sentence, launched, commands):
    commands(sbatch=f"echo 'sbatch: {said}' >&2; exit 1")
    with pytest.raises(UserError, match=f"^Slurm rejects the job: {sentence}"):
        submit(launched())


def test_an_unwritable_run_dir_is_an_error_before_submission(launched, commands, tmp_path):
    commands(sbatch=f"touch {tmp_path}/submitted; echo 1")
    (tmp_path / "file").touch()
    for run_dir, sentence in {
        "/proc/run": "cannot write in /proc/run: No such file",
        f"{tmp_path}/file": "file/attempts: Not a directory",
    }.items():
        with pytest.raises(UserError, match=sentence):
            submit(launched(f"run_dir={run_dir}"))
    assert not (tmp_path / "submitted").exists()


def test_the_signal_comes_two_saves_and_two_steps_before_the_end(launched, commands, tmp_path):
    (tmp_path / "run").mkdir()
    commands(scontrol='echo "KillWait                = 30 sec"')
    assert launched(time_limit="60").job.signal_seconds == 600
    entries = [
        {"step": 1, "time": 1.0, "perf/tokens_per_second": 51.2},
        {"step": 1, "time": 1.0, "ckpt/total_seconds": 40.0},
    ]
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (tmp_path / "run/metrics.jsonl").write_text(lines)
    found = launched(time_limit="60")
    # At 51.2 tokens/s, a step of 8 x 64 tokens needs 10 seconds.
    assert found.job.signal_seconds == 2 * 40 + 2 * 10 + 60
    (remark,) = found.remarks
    assert remark.startswith("a save has taken 40 s, and 30 s after a SIGTERM Slurm kills")


def test_a_time_limit_that_the_margin_fills_is_refused(launched):
    with pytest.raises(UserError, match=r"margin 3600 is not below the 3600 s of time_limit 60"):
        launched("checkpoint.time_limit_margin=3600", time_limit="60")


def test_the_seconds_of_a_step_are_those_of_the_slowest_stage(tiny_recipe, tmp_path):
    stages = []
    for name, length, speed in (("short", 64, 51.2), ("long", 512, 1024.0)):
        stages.append(tiny_recipe(f"run_dir={tmp_path}/{name}", f"training.seq_length={length}"))
        (tmp_path / name).mkdir()
        entry = {"step": 1, "time": 1.0, "perf/tokens_per_second": speed}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    assert launch._measured_seconds(stages) == (None, pytest.approx(8 * 64 / 51.2))


def test_a_remark_names_bad_hosts_of_the_ledger(launched, commands, ledger, attempt):
    commands(squeue="true")
    for _ in range(2):
        begun = attempt(None)
        for rank in range(3):
            RankRecord(ledger.folder(begun.number), rank).end(0)
        ledger.end(begun)  # rank 3, on n1, has recorded no end
    (remark,) = launched().remarks
    assert remark.startswith("n1 failed or slowed down two of the last ten attempts")
    assert launched(exclude=["n1"]).remarks == ()


def test_the_summary_estimates_gpu_hours_for_a_known_gpu(launched):
    found = launched(gpu="H100", time_limit="24:00:00")
    line = summary(found)[0]
    assert "2 nodes, 4 ranks" in line and "GPU-hours" in line
    assert line.endswith(", in 1 attempt of 24:00:00")


def test_the_summary_counts_one_node_and_one_rank_in_the_singular(launched):
    one = {"nodes": 1, "ranks_per_node": 1}
    overrides = ["training.global_batch_size=4", "parallel.tensor=1", "parallel.pipeline=1"]
    assert summary(launched(*overrides, **one))[0].startswith("1 node, 1 rank; no estimate")
    assert ": 1 node, 1 rank, " in summary(launched(*overrides, gpu="H100", **one))[0]


def test_a_submission_prints_the_log_and_the_command_for_its_status(
    chained, commands, tmp_path, capsys
):
    commands(sbatch="echo 17")
    cluster = tmp_path / "cluster.yaml"
    launch_command(tmp_path / "four.yaml", [], nodes=2, cluster=cluster)
    run = tmp_path / "run"
    assert capsys.readouterr().out.splitlines() == [
        f"submitted job 17: {run}/job.sh",
        f"  log, when it starts: {run}/job_17.log",
        f"diffmegatron status {run}",
    ]
    (run / "job_number").unlink()
    launch_command(tmp_path / "stages.yaml", [], nodes=2, cluster=cluster, chain=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[-1] == f"diffmegatron status {run}"
    assert lines[1] == f"  log, when it starts: {run}/first/job_17.log"


def test_start_from_may_be_missing_if_the_job_has_a_dependency(launched, tmp_path):
    start = f"checkpoint.start_from={tmp_path}/before"
    launched(start, dependency="afterok:17")
    write_checkpoint(tmp_path / "before", 3)
    launched(start)
    launched(f"{start}/checkpoints/step_00000003")
    (tmp_path / "before/checkpoints/step_00000003/manifest.json").unlink()
    with pytest.raises(UserError, match="before holds no checkpoint: "):
        launched(start)
    checkpoint(tmp_path / "run", 1)
    launched(start)  # a run with its own checkpoint does not read start_from


def test_a_remark_names_a_source_read_about_five_times(launched, corpus):
    tokens = read_corpus_manifest(corpus).tokens
    steps = -(-5 * tokens // (8 * 64))
    (remark,) = launched(f"training.steps={steps}").remarks
    assert remark.startswith(f"{launched().path.parent} reads source {corpus} about 5 times; give")
    assert launched(f"training.steps={steps * 4 // 5 - 1}").remarks == ()


def test_slurm_runs_the_job_file_and_rejects_a_wrong_partition(
    cluster, launched, tmp_path, monkeypatch
):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/script.json").write_text(json.dumps([{"0": "end 75 so"}, {}]))
    with pytest.raises(UserError, match=r"rejects the job: .*Invalid partition"):
        submit(launched(partition="nowhere"))
    path = f"PATH={os.environ['PATH']}"
    found = launched(export="NONE", setup=[f"export {path}", f"export PYTHONPATH={ROOT}"])
    command = [
        sys.executable,
        "-m",
        "diffmegatron",
        "launch",
        "four.yaml",
        "--nodes=2",
        "--dry-run",
    ]
    printed = subprocess.run(
        [*command, "--cluster=cluster.yaml"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.replace("four.yaml", "X") == found.text.replace(str(tmp_path / "four.yaml"), "X")
    number = submit(found)
    assert cluster.wait(number)["ExitCode"] == "0:0"
    first, second = Ledger(tmp_path / "run").attempts()
    assert (first.cause, second.cause) == ("stopped", "finished")
    assert Path(tmp_path / f"run/job_{number}.log").exists()
    assert Path(tmp_path / "run/job.sh").read_text() == found.text
    # Start the job again with a broken recipe.
    (tmp_path / "four.yaml").write_text("model: [")
    number = cluster.call("sbatch", "--parsable", str(found.path)).strip()
    assert cluster.wait(number)["ExitCode"] == "2:0"
    assert examine_run(tmp_path / "run").state.startswith("ended by a mistake in attempt 3: ")


def test_a_chain_has_a_job_for_each_unfinished_stage(chained, tmp_path, attempt):
    first, second, third = chained("training.seed=5", dependency="afterok:17")
    assert [each.path.parent for each in (first, second, third)] == [
        tmp_path / "run" / name for name in ("first", "second", "third")
    ]
    assert "dependency=afterok:17" in sbatch_lines(first.text)
    assert not any("dependency" in line for line in sbatch_lines(second.text))
    assert f"set -- {tmp_path}/run/second/job.yaml\n" in second.text
    (tmp_path / "job.yaml").write_text(second.recipe)
    recipe = load_recipe(tmp_path / "job.yaml")
    assert (recipe.training.total_steps, recipe.training.seed) == (5, 5)
    assert recipe.checkpoint.start_from == f"{tmp_path}/run/first"
    done = Ledger(tmp_path / "run/first")
    begun = done.begin([recipe.model_copy(update={"run_dir": str(done.run_dir)})], FACTS)
    for rank in range(4):
        RankRecord(done.folder(begun.number), rank).end(0)
    done.end(begun)
    assert [each.job.name for each in chained()] == ["second", "third"]


def test_a_chain_needs_a_recipe_with_stages(chained):
    with pytest.raises(UserError, match=r"four.yaml has no stages, and --chain submits a job per"):
        chained(recipe="four.yaml")


def test_a_rejected_job_cancels_the_submitted_jobs_of_its_chain(chained, commands, tmp_path):
    commands(
        sbatch=f'[ -z "$2" ] || [ "$2" = {tmp_path}/run/first/job.sh ] && echo 8 && exit; '
        "echo sbatch: error: no more >&2; exit 1",
        scancel=f'echo "$@" >{tmp_path}/cancelled',
    )
    with pytest.raises(UserError, match="rejects the job: no more"):
        submit_chain(chained())
    assert (tmp_path / "cancelled").read_text() == "8\n"


def test_a_failed_stage_cancels_the_later_jobs_of_its_chain(
    cluster, chained, tmp_path, monkeypatch
):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    for name, script in {"first": [{"0": "end 75 so"}], "second": [{"0": "end 2 no"}]}.items():
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "script.json").write_text(json.dumps(script))
    first, second, third = submit_chain(chained())
    assert cluster.wait(third)["JobState"] == "CANCELLED", "the second stage did not finish"
    assert [cluster.job(each)["ExitCode"] for each in (first, second)] == ["0:0", "2:0"]
    causes = [each.cause for each in Ledger(tmp_path / "run/first").attempts()]
    assert causes == ["stopped", "finished"], "a requeue must not start the next job"
    (attempt,) = Ledger(tmp_path / "run/second").attempts()
    assert attempt.cause == "mistake"
    assert not (tmp_path / "run/third/attempts").exists()


def test_the_torchrun_file_sets_nodes_ranks_and_environment(launched, tmp_path):
    launched(setup=["module load cuda"], environment={"NCCL_SOCKET_IFNAME": "ib0 x"})
    arguments = (tmp_path / "four.yaml", ["training.seed=5"], 2, tmp_path / "cluster.yaml")
    path, text, remarks = torchrun_file(*arguments, "n0:29500")
    assert path == tmp_path / "run/torchrun.sh" and not remarks
    beginning, last = text.rstrip().rsplit("\n", 1)
    script = f"module() {{ :; }}; {beginning}\n" + 'printf "%s\\n" "$PWD" "$NNODES" "$RANKS" '
    script += '"$RENDEZVOUS" "$NCCL_SOCKET_IFNAME"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(tmp_path), "2", "2", "n0:29500", "ib0 x"]
    started = ROOT / "launch/torchrun.sh"
    assert last == f"exec bash {started} {tmp_path}/four.yaml training.seed=5"


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "changes", "sentence"),
    [
        (2, None, {}, "--nodes 2 with --torchrun needs --rendezvous; give HOST:PORT"),
        (1, "n0:29500", {}, "--rendezvous is for several machines; leave it out"),
        (2, "n0", {}, "--rendezvous is 'n0'; give HOST:PORT"),
        (3, "n0:29500", {}, "--nodes 3 means 6 ranks on this cluster"),
        (
            2,
            "n0:29500",
            {"container": {"kind": "pyxis", "image": "a#b"}},
            "container a#b is entered only under Slurm",
        ),
    ],
)
def test_an_invalid_torchrun_launch_is_an_error(
    nodes, rendezvous, changes, sentence, launched, tmp_path
):
    launched(**changes)
    arguments = (tmp_path / "four.yaml", [], nodes, tmp_path / "cluster.yaml", rendezvous)
    with pytest.raises(UserError, match=sentence):
        torchrun_file(*arguments)
    assert not (tmp_path / "run").exists()
