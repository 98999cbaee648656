"""A Slurm cluster of two nodes on this machine, of Debian's slurm-wlm and munge, for root."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
HOST = socket.gethostname().partition(".")[0]
NODES = (HOST, f"{HOST}-2")
"""Their names; torchrun's rendezvous asks for the way to the first."""

CONFIGURATION = """
ClusterName=eopt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2
GresTypes=gpu
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 Gres=gpu:1\n"


def missing() -> str | None:
    """Return why there can be no cluster here; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs Debian's slurm-wlm and munge; there is no {', '.join(absent)}"
    if os.geteuid() != 0:
        return "starts Slurm's daemons, which needs root"
    return None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _write_configuration(folder: Path) -> Path:
    ports = free_ports(1 + len(NODES))
    text = CONFIGURATION.format(folder=folder, host=HOST, ports=ports)
    for name, port in zip(NODES, ports[1:], strict=True):
        text += NODE.format(name=name, host=HOST, port=port)
        (folder / f"spool.{name}").mkdir()
    # any device file will do
    gpus = [f"NodeName={name} Name=gpu File=/dev/zero\n" for name in NODES]
    (folder / "gres.conf").write_text("".join(gpus))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    path = folder / "slurm.conf"
    path.write_text(text)
    return path


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster with all its files in an empty folder; yield the environment for commands."""
    # munge wants a way to its socket on which nobody else may write
    folder.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(_write_configuration(folder))}
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    own = [f"--{option}={folder}/munge.{file}" for option, file in files.items()]
    daemons = [
        ["munged", "--foreground", "--force", f"--log-file={folder}/munge.log", *own],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]
    running = []
    try:
        for number, daemon in enumerate(daemons):
            with (folder / f"daemon{number}.log").open("w") as log:
                how = {"stdout": log, "stderr": log, "start_new_session": True}
                running.append(subprocess.Popen(daemon, env=environment, **how))
            if number == 0:
                wait_until(lambda: (folder / "munge.socket").exists(), "munge listens", 20)
        wait_until(lambda: idle_nodes(environment) == len(NODES), "both nodes are idle", 60)
        yield environment
    finally:
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
            if daemon.poll() is None:
                os.killpg(daemon.pid, signal.SIGKILL)


def slurm(environment: dict[str, str], *words: str) -> str:
    """Return what one of Slurm's commands prints."""
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout.strip()


def idle_nodes(environment: dict[str, str]) -> int:
    """Return how many nodes wait for work."""
    with contextlib.suppress(RuntimeError):
        return slurm(environment, "sinfo", "-h", "-N", "-t", "idle", "-o", "%N").count("\n") + 1
    return 0


def wait_until(holds: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {seconds:.0f} s: {what}")
        time.sleep(0.2)
