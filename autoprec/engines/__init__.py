"""Thin launchers of `autoprec worker` on what a cluster has: SLURM by submitit, Ray. No scheduler of our own.

`command` is what a job runs, `run` starts the jobs, watches the study and has it proved; `slurm` and `ray` each know
one engine and are the only modules that import its package.
"""

from autoprec.engines.command import Command, Finished, WorkerLostError
from autoprec.engines.run import ENGINES, Engine, Job, open_engine, run_on_engine

__all__ = ["Command", "Finished", "WorkerLostError", "ENGINES", "Engine", "Job", "open_engine", "run_on_engine"]
