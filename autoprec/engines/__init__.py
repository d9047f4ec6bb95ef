"""Thin launchers of `autoprec worker` on what a cluster has: SLURM by submitit, Ray. No scheduler of our own.

`command` is what a job runs, and loads nothing heavy; `run` starts the jobs, watches the study and has it proved;
`slurm` and `ray` each know one engine and are the only modules that import its package.
"""

__all__ = ["ENGINES"]

ENGINES = ("local", "slurm", "ray")
