"""Rendezvous of ranks: if some do not arrive, the others raise an error of one sentence."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffmegatron.errors import MachineError, UserError
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.parallel.rendezvous import meet
from tests.paths import ROOT
from tests.ports import reserved_ports


@pytest.fixture
def port():
    """Yield the number of a port on which no process listens."""
    with reserved_ports(1) as (port,):
        yield port


def launch(port: int, rank: int = 0, ranks: int = 2, host: str = "localhost") -> LaunchEnvironment:
    return LaunchEnvironment(rank=rank, ranks=ranks, master=(host, port))


def outcomes(launches: list[LaunchEnvironment], seconds: float, delay: float = 0.0) -> list[str]:
    """Run a rank in a thread for each launch, and return one text per launch.

    If the ranks meet, the text has the messages that all ranks put into the store. If the ranks do
    not meet, the text is the rank's error. The ranks start in the order of the launches, ``delay``
    seconds apart.
    """
    there = threading.Barrier(len(launches))

    def arrive(number: int) -> str:
        time.sleep(number * delay)
        try:
            store = meet(launches[number], seconds)
        except UserError as error:
            # A MachineError leads to a restart. Different values of WORLD_SIZE raise a plain
            # UserError, because a restart cannot solve this problem.
            assert isinstance(error, MachineError) != ("with WORLD_SIZE" in str(error))
            return str(error)
        store.set(str(number), f"met {number}")
        said = " ".join(store.get(str(other)).decode() for other in range(len(launches)))
        # The store ends when rank 0 ends, so wait here until all ranks have read the store.
        there.wait()
        return said

    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(arrive, range(len(launches))))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_meet_whoever_is_first(order, port, capfd):
    launches = [launch(port, rank, 3) for rank in order]
    assert outcomes(launches, 60, delay=0.5) == ["met 0 met 1 met 2"] * 3
    assert capfd.readouterr().err == ""


def test_missing_ranks_are_named_by_every_rank_that_arrived(port, capfd):
    expected = (
        "of the 5 ranks of WORLD_SIZE, ranks 1, 3, 4 did not arrive within 2 s; read the log "
        f"of a missing rank, or start fewer ranks (MASTER_ADDR localhost, MASTER_PORT {port})"
    )
    assert outcomes([launch(port, rank, 5) for rank in (0, 2)], 2) == [expected] * 2
    assert capfd.readouterr().err == ""


def test_only_some_of_many_missing_ranks_are_named(port):
    (said,) = outcomes([launch(port, 0, 5_000)], 0.1)
    assert "ranks 1, 2, 3, 4, 5, " in said and " 16 and 4983 more did not arrive" in said


def test_rank_0_does_not_arrive(port, capfd):
    (said,) = outcomes([launch(port, 1)], 1)
    assert said == (
        f"rank 0 did not arrive at MASTER_ADDR localhost, MASTER_PORT {port} within 1 s"
    )
    assert capfd.readouterr().err == ""


def test_rank_0_dies_while_others_wait(port):
    script = (
        "from diffmegatron.parallel.launcher import LaunchEnvironment;"
        "from diffmegatron.parallel.rendezvous import meet;"
        f"meet(LaunchEnvironment(rank=0, ranks=3, master=('localhost', {port})), 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(outcomes, [launch(port, 1, 3)], 100)
        while not second.done():
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    break
            time.sleep(0.1)
        # Give the second rank time to arrive and to wait for the outcome that rank 0 stores.
        time.sleep(3)
        process.kill()
        process.wait()
        (said,) = second.result(60)
    assert said == f"rank 0 left MASTER_ADDR localhost, MASTER_PORT {port} before all ranks " + (
        "had arrived"
    )


def test_different_world_sizes_are_reported(port):
    for said in outcomes([launch(port, 0, 2), launch(port, 1, 3)], 60):
        assert said.startswith("rank 0 was started with WORLD_SIZE 2 and rank 1 with 3; give all")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 300, "two..dots", "a host"])
def test_an_unresolvable_host_is_an_error(host, port):
    with pytest.raises(MachineError, match=r"MASTER_ADDR .* cannot be resolved .*give the host"):
        meet(launch(port, host=host), 1)


def test_a_port_in_use_is_an_error(port):
    with (
        socket.create_server(("", port)),
        pytest.raises(MachineError, match=f"MASTER_PORT {port}: Address already in use"),
    ):
        meet(launch(port), 1)


def test_another_server_at_the_port_is_an_error(port):
    with (
        socket.create_server(("", port)),
        pytest.raises(MachineError, match=f"server than rank 0 listens at .*MASTER_PORT {port}"),
    ):
        meet(launch(port, rank=1), 1)


RESTARTED = """
import os, torch
from torch import distributed
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.rendezvous import meet
launch = read_launch()
store = meet(launch, 200)
distributed.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.ranks)
distributed.all_reduce(torch.ones(1))
if launch.attempt == 0:
    os.kill(os.getpid(), 9) if launch.rank == 1 else distributed.barrier()
print("met again", flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("shared", ["0", "1"])
def test_ranks_meet_again_after_a_torchrun_restart(shared, tmp_path):
    """Check that ranks meet again, with and without the store of torchrun's agent.

    The agent keeps one store through all restarts and shares it with the ranks. If ``shared`` is
    "1", sharing is disabled.
    """
    (tmp_path / "ranks.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    result = subprocess.run(
        [*command, "--nproc-per-node=2", str(tmp_path / "ranks.py")],
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("met again") == 2
