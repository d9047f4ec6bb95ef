"""A SLURM cluster of a test's own: one node, this machine, that believes in two GPUs. No munge and no accounting."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
START_SECONDS = 60
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=5
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def has_programs() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


@contextmanager
def slurm_cluster() -> Iterator[Path]:
    """Start a cluster, and yield its configuration file, to be named by SLURM_CONF."""
    with tempfile.TemporaryDirectory(prefix="autoprec-slurm-") as name, ExitStack() as stack:
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        path = folder / "slurm.conf"
        text = CONFIGURATION.format(host=host, user=getpass.getuser(), folder=folder, ports=free_ports(2))
        path.write_text(text)
        devices = ("/dev/null", "/dev/zero")  # which are there on every machine
        (folder / "gres.conf").write_text("".join(f"NodeName={host} Name=gpu File={device}\n" for device in devices))
        environment = {**os.environ, "SLURM_CONF": str(path)}
        for program in ("slurmctld", "slurmd"):
            log = stack.enter_context((folder / f"{program}.log").open("w"))
            more = ["-i"] if program == "slurmctld" else []
            process = subprocess.Popen(
                [program, "-D", *more, "-f", str(path)], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        deadline = time.monotonic() + START_SECONDS
        while "idle" not in told(environment):
            assert time.monotonic() < deadline, "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log"))
            time.sleep(0.2)
        yield path


def told(environment: dict[str, str]) -> str:
    shown = subprocess.run(["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True)
    return shown.stdout


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
