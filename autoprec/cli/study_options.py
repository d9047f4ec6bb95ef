"""The options that say how a task is searched and where the study is, shared by all that run its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from autoprec.cli.task_options import TaskOptions, option

if TYPE_CHECKING:
    from autoprec.search.plan import SearchPlan

__all__ = ["StudyOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What decides the trials of a study besides the task, and where the study is; one field an option."""

    sampler: Annotated[str, option("policy, tpe, nsga2, gp or random.", "--sampler")] = "policy"
    space: Annotated[str | None, option("By name (autoprec spaces lists them) or a TOML file.", "--space")] = None
    dtype: Annotated[
        str,
        option("auto (bf16 where the GPU has BF16 units), bf16, fp16, both or mixed (module by module).", "--dtype"),
    ] = "auto"
    margin: Annotated[
        float | None,
        option("How much worse than FP32 the metric may be, in its units; a tenth of what FP32 gains.", "--margin"),
    ] = None
    max_seeds: Annotated[int | None, option("Seeds that the proof may use; 8.", "--max-seeds")] = None
    proof_steps: Annotated[
        int | None,
        option("Steps up to which the proof's runs are doubled while FP32 learns too little; 320.", "--proof-steps"),
    ] = None
    proof_time: Annotated[
        float | None, option("Seconds within which the proof's runs may be made longer; 900.", "--proof-time")
    ] = None
    quick: Annotated[bool, option("No proof: the policy that is written says so, exit code 3.", "--quick")] = False
    compare: Annotated[
        str | None,
        option("What you run today: bf16, fp16, tf32, fp32 or a policy file; bf16 where the GPU has it.", "--compare"),
    ] = None
    min_gain: Annotated[
        float, option("Share of memory or time that a found policy must gain over plain autocast.", "--min-gain")
    ] = 0.03
    min_gain_scaler: Annotated[
        float, option("The same for one that needs a grad scaler, over one that needs none.", "--min-gain-scaler")
    ] = 0.05
    prefer: Annotated[str, option("balanced, fastest or smallest.", "--prefer")] = "balanced"
    steps: Annotated[int | None, option("Optimizer steps of a trial, warm-up included; 28.", "--steps")] = None
    gpus_per_trial: Annotated[
        int, option("GPUs that train one trial together, by DistributedDataParallel.", "--gpus-per-trial")
    ] = 1
    timeout: Annotated[
        float | None, option("Seconds in all, the proof included; what was found until then is told.", "--timeout")
    ] = None
    trial_timeout: Annotated[float, option("Seconds after which a trial is ended.", "--trial-timeout")] = 900
    storage: Annotated[str | None, option("Optuna database URL; a file in the folder.", "--storage")] = None
    study_name: Annotated[str | None, option("Name of the study.", "--study-name")] = None
    heartbeat: Annotated[
        int | None,
        option(
            "Seconds between two signs of life of a process on the study; decided by its first one; 15.", "--heartbeat"
        ),
    ] = None

    def prepare(self, task: TaskOptions, *, devices: Sequence[str] = (), **settings: Any) -> SearchPlan:
        """Prepare the search of a task; `settings` are the fields of `SearchSettings` that are no options here.

        Raises:
            UsageError, StudyError: as `try_storage`, before the task is built.
            UsageError, TaskError: as `prepare_search`.
        """
        from autoprec.search.plan import SearchSettings, prepare_search
        from autoprec.search.proof import build_proof
        from autoprec.search.storage import try_storage
        from autoprec.search.study_dtype import as_dtype
        from autoprec.search.worth import Worth, as_preference

        if self.storage is not None:
            try_storage(self.storage)
        trial = task.trial_settings(num_processes=self.gpus_per_trial).with_steps(self.steps)
        search = SearchSettings(
            sampler=self.sampler,
            space=self.space,
            dtype=as_dtype(self.dtype),
            prefer=as_preference(self.prefer),
            timeout_seconds=self.timeout,
            storage=self.storage,
            study_name=self.study_name,
            heartbeat_seconds=self.heartbeat,
            is_quick=self.quick,
            compare=self.compare,
            worth=Worth(min_gain=self.min_gain, min_gain_with_scaler=self.min_gain_scaler),
            proof=build_proof(
                self.margin,
                self.max_seeds,
                max_steps=self.proof_steps,
                max_seconds=self.proof_time,
                trial_steps=trial.warmup_steps + trial.measured_steps,
            ),
            devices=tuple(devices),
            **settings,
        )
        return prepare_search(task.build_task(), trial=trial, settings=search)
