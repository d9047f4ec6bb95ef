"""Everything a search fixes before its first trial: space, parameters, arms, proof, names and folder."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoprec.apply import describe_model, read_structure
from autoprec.apply.portability import has_native_bf16
from autoprec.errors import AutoprecError, UsageError, did_you_mean
from autoprec.estimates.gpus import gpu_by_name
from autoprec.policy import ModelInfo, Policy, content_hash, load_policy
from autoprec.search.arms import (
    AUTOCAST_BF16,
    AUTOCAST_FP16,
    BASELINES,
    FP32,
    PRESENT_POLICY,
    Arm,
    baselines,
    warm_starts,
)
from autoprec.search.decision import Decision
from autoprec.search.decisions import build_decisions
from autoprec.search.families import choose_space
from autoprec.search.fingerprint import Identity, identity_hash, study_identity, versions
from autoprec.search.parameters import Parameters, build_parameters
from autoprec.search.proof import Proof
from autoprec.search.samplers import SAMPLERS
from autoprec.search.scoring import OBJECTIVES, Limits
from autoprec.search.space import AskedDtype, SearchSpace, load_space
from autoprec.search.storage import sqlite_url
from autoprec.search.study import stored_identity
from autoprec.search.study_dtype import StudyDtype, as_dtype, choose_dtype, resolve_space
from autoprec.search.worth import Prefer, Worth, as_preference
from autoprec.tasks.batches import BatchStream, cut_batch, move_batch
from autoprec.tasks.code import code_digest
from autoprec.tasks.options import training_options
from autoprec.trials.building import lift_half_parameters
from autoprec.trials.checking import check_task
from autoprec.trials.compiling import check_compile
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.pool import default_num_workers
from autoprec.trials.worker import can_travel
from autoprec.units import Units, find_units

if TYPE_CHECKING:
    from torch import nn

    from autoprec.tasks.protocol import Task

__all__ = [
    "SearchSettings",
    "SearchPlan",
    "file_name",
    "prepare_search",
    "resolve_device",
    "resolve_devices",
    "target_of",
    "task_identity",
    "trial_identity",
]

MAX_FINALISTS = 2
NUM_SAMPLES_FOR_UNITS = 8
EMULATION_FACTOR = 1.4
OVERHEAD_SECONDS = 3.0
"""Rough figures for the first forecast: an emulated step over one in FP32; an evaluation and an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How a task is searched.

    Attributes:
        n_trials: finished trials in all, baselines and warm starts included, the proof's runs not.
        sampler: "policy", "tpe", "nsga2", "gp" or "random".
        prefer: what the recommendation weighs: "balanced", "fastest" or "smallest"; no part of the study's identity.
        memory_budget_bytes: what uses more is not recommended, and the largest batch in it is told; no part of the
            study's identity.
        timeout_seconds: of the whole search; of it the proof is left what it will probably need. No part of the study's
            identity.
        is_quick: no proof: what the trials say is written, as not proved. No part of the study's identity.
        compare: what the user runs today, against which gains are told: "bf16", "fp16" (stock autocast), "tf32", "fp32"
            or a policy file; None: stock autocast, in BF16 where the target has it. No part of the study's identity.
        worth: what a gain has to be; no part of the study's identity.
        space: name of a built-in search space or a TOML file; None chooses by the model's structure.
        dtype: "bf16", "fp16", "both" (each policy is of one of them), "mixed" (BF16 with FP16 modules) or "auto": what
            the space says, else BF16 where the target has BF16 units and FP16 elsewhere.
        num_workers: trials at once on a CPU, where no time is measured; None takes `default_num_workers`.
        devices: CUDA devices of one product that run a trial each at the same time; empty: the trials' own alone.
        storage: an Optuna database URL; None takes `study.db` in the output folder.
        study_name: None takes `<model>-<hash of the settings>`.
        heartbeat_seconds: between two signs of life of a process on the study, where this one makes it; None takes
            `presence.HEARTBEAT_SECONDS`.
        output: the folder for the files; None takes `runs/<study name>`.
        limits: when a trial is feasible.
        proof: how the finalists are proved.
    """

    n_trials: int = 12
    sampler: str = "policy"
    prefer: Prefer = "balanced"
    memory_budget_bytes: float | None = None
    timeout_seconds: float | None = None
    is_quick: bool = False
    compare: str | Path | Policy | None = None
    worth: Worth = field(default_factory=Worth)
    space: str | Path | None = None
    dtype: AskedDtype = "auto"
    num_workers: int | None = None
    devices: Sequence[str] = ()
    storage: str | None = None
    study_name: str | None = None
    heartbeat_seconds: int | None = None
    output: str | Path | None = None
    limits: Limits = field(default_factory=Limits)
    proof: Proof = field(default_factory=Proof)

    def __post_init__(self) -> None:
        if self.n_trials < 1:
            raise UsageError(f"n_trials is {self.n_trials}; at least 1")
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"num_workers is {self.num_workers}; at least 1")
        if self.heartbeat_seconds is not None and self.heartbeat_seconds < 1:
            raise UsageError(f"heartbeat_seconds is {self.heartbeat_seconds}; at least 1")
        if self.sampler not in SAMPLERS:
            nearest = did_you_mean(self.sampler, SAMPLERS)
            raise UsageError(f"sampler {self.sampler!r}; allowed: {', '.join(SAMPLERS)}{nearest}")
        as_preference(self.prefer)
        as_dtype(self.dtype)
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise UsageError(f"timeout is {self.timeout_seconds:g} s; a positive number is needed")
        if self.memory_budget_bytes is not None and not 0 < self.memory_budget_bytes < float("inf"):
            raise UsageError(f"memory_budget_bytes is {self.memory_budget_bytes}; a positive number is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A search that is ready to run.

    `target` names the device that memory and throughput are for; `step_seconds` is the time of one FP32 step here;
    `unit_calls` names the units in call order, one entry a call; `notes` is what the check of the task found that a
    reader must know; `present` names the arm that the user runs today; `capacity_bytes` is the target's memory.
    """

    task: Task
    trial: TrialSettings
    settings: SearchSettings
    space: SearchSpace
    parameters: Parameters
    arms: Sequence[Arm]
    model: ModelInfo
    identity: Identity
    study_name: str
    folder: Path
    target: str
    target_is_here: bool
    step_seconds: float
    num_workers: int
    devices: Sequence[str]
    unit_calls: Sequence[str]
    notes: Sequence[str] = ()
    present: str = AUTOCAST_BF16
    capacity_bytes: float | None = None

    @property
    def worth(self) -> Worth:
        """What a gain has to be on the target, for the memory that is wanted."""
        return dataclasses.replace(
            self.settings.worth,
            capacity_bytes=self.capacity_bytes,
            memory_budget_bytes=self.settings.memory_budget_bytes,
            gpu="" if self.target_is_here else self.trial.gpu,
            present=self.present,
        )

    @property
    def decisions(self) -> Sequence[Decision]:
        return self.parameters.decisions

    @property
    def trial_seconds(self) -> float:
        """Expected time of one trial, before any has run."""
        steps = self.trial.warmup_steps + self.trial.measured_steps + self.trial.batchnorm_batches
        return OVERHEAD_SECONDS + EMULATION_FACTOR * steps * self.step_seconds

    def proof_seconds(self, trial_seconds: float) -> tuple[float, float]:
        """Expected time of the proof with its first look alone, and with all looks; a trial takes `trial_seconds`."""
        extra = self.settings.proof.num_steps - self.trial.warmup_steps - self.trial.measured_steps
        run = trial_seconds + EMULATION_FACTOR * extra * self.step_seconds
        runs = run * sum(arm.is_baseline for arm in self.arms)
        return runs * self.settings.proof.looks[0], runs * self.settings.proof.max_seeds


def prepare_search(task: Task, *, trial: TrialSettings, settings: SearchSettings) -> SearchPlan:
    """Check the task, read the model's units, build the parameters and fix the study's identity.

    Runs no trial and writes nothing.

    Raises:
        UsageError: a setting that cannot be followed.
        TaskError: a part of the task is not what a trial needs.
    """
    check_compile(task, torch.device(trial.device))
    if trial.num_processes > 1:
        from autoprec.trials.group import check_group  # needs POSIX, this module does not

        check_group(task, trial)
    num_workers = _num_workers(task, trial, settings)
    num_steps = max(trial.warmup_steps + trial.measured_steps, settings.proof.num_steps)
    notes = check_task(task, trial, num_steps=num_steps)
    if not can_travel(task):
        notes.append(
            "the trials run in this process: another one cannot build this task (give the function that makes it, in a"
            " file or module of its own, for a time limit and protection from crashes)"
        )
    torch.manual_seed(trial.seed)
    model = task.model()
    if task.lift_half_parameters:
        lift_half_parameters(model)
    batch = move_batch(next(BatchStream(task.train_batches, num_samples=task.num_samples)), torch.device("cpu"))
    units = _find_units(task, model, batch)
    target, here = target_of(trial)
    native_bf16 = _has_native_bf16(trial, here=here)
    as_written = _space(settings, model)
    info = describe_model(read_structure(model), task.name)
    dtype = choose_dtype(settings.dtype, as_written, native_bf16=native_bf16, target=target)
    identity = _identity(task, trial, settings, info, resolve_space(as_written, dtype), dtype)
    if settings.dtype == "auto" and dtype == "bf16" and not as_written.named_choices & {"bf16"}:
        older = _identity(task, trial, settings, info, resolve_space(as_written, "fp16"), "fp16")
        if _goes_on(settings, task, older):
            dtype, identity = "fp16", older
            notes.append("this study was begun in FP16 and goes on in it; --dtype bf16 is another study")
    space = resolve_space(as_written, dtype)
    parameters = build_parameters(
        build_decisions(units, space, model, composites=units.composites),
        space,
        optimizer_defaults=_optimizer_defaults(task),
        native_bf16=native_bf16,
        dtype=dtype,
        fp32_code=[name for name, refused in units.composites.items() if "autocast" in refused],
    )
    first = baselines(parameters, native_bf16=native_bf16)
    present, present_arms, present_notes = _present(settings.compare, parameters, trial, native_bf16=native_bf16)
    if present in BASELINES and present not in {arm.name for arm in first}:  # `compare` names the other dtype
        present_arms = [Arm(present, parameters.values(lambda decision: "autocast"), BASELINES[present])]
    notes += present_notes
    name = _study_name(settings, task, identity)
    return SearchPlan(
        task=task,
        trial=trial,
        settings=settings,
        space=space,
        parameters=parameters,
        arms=(*first, *present_arms, *warm_starts(parameters)),
        model=info,
        identity=identity,
        study_name=name,
        folder=Path(settings.output) if settings.output is not None else Path("runs") / file_name(name),
        target=target,
        target_is_here=here,
        step_seconds=_time_step(task, model, batch),
        num_workers=num_workers,
        devices=tuple(settings.devices) or (trial.device,),
        unit_calls=units.calls,
        notes=notes,
        present=present,
        capacity_bytes=_capacity(trial, here=here),
    )


def _identity(
    task: Task, trial: TrialSettings, settings: SearchSettings, model: ModelInfo, space: SearchSpace, dtype: StudyDtype
) -> Identity:
    """Return what identifies the study; one in FP16 does not name its dtype, as before there was a choice."""
    return study_identity(
        task=task_identity(task),
        trial=trial_identity(trial),
        objectives=dict(OBJECTIVES),
        model=content_hash(model.model_dump_json()),
        space=content_hash(space.model_dump_json(exclude={"dtype"})),
        sampler=settings.sampler,
        limits=dataclasses.asdict(settings.limits),
        proof=settings.proof.identity,
        versions=versions(),
        **({} if dtype == "fp16" else {"dtype": dtype}),
    )


def _study_name(settings: SearchSettings, task: Task, identity: Identity) -> str:
    return settings.study_name or f"{file_name(task.name)}-{identity_hash(identity)}"


def _goes_on(settings: SearchSettings, task: Task, identity: Identity) -> bool:
    """Whether the storage of this search holds the FP16 study of that name; what is wrong with it is told later."""
    name = _study_name(settings, task, identity)
    folder = Path(settings.output) if settings.output is not None else Path("runs") / file_name(name)
    try:
        stored = stored_identity(settings.storage or sqlite_url(folder / "study.db"), name)
    except AutoprecError:
        return False
    return stored is not None and "dtype" not in stored


def resolve_device(name: str | None) -> str:
    """Return the device to train on: CUDA where there is one and no name is given.

    Raises:
        UsageError: no such device, or none here.
    """
    available = torch.cuda.is_available()
    if name is None:
        return "cuda" if available else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(f"device {name!r}; allowed: cpu, cuda, cuda:N{did_you_mean(kind, ('cpu', 'cuda'))}")
    if kind == "cuda" and (not available or int(index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here; --device cpu works"
        )
    return name


def _num_workers(task: Task, trial: TrialSettings, settings: SearchSettings) -> int:
    """Return how many trials run at once.

    Raises:
        UsageError: more than one is asked for where that cannot be.
    """
    if settings.devices:
        return _num_devices(task, trial, settings)
    possible = default_num_workers(task, trial.device)
    if trial.num_processes > 1:
        possible = 1
    if settings.num_workers is None or settings.num_workers == 1:
        return settings.num_workers or possible
    if trial.num_processes > 1:
        raise UsageError("num_workers: one trial at a time where a trial takes several GPUs")
    if torch.device(trial.device).type != "cpu":
        raise UsageError("num_workers: one trial at a time on a GPU, where time is measured")
    if not can_travel(task):
        raise UsageError("num_workers: this task cannot travel to other processes; its trials run in this one")
    return settings.num_workers


def _num_devices(task: Task, trial: TrialSettings, settings: SearchSettings) -> int:
    if settings.devices[0] != trial.device:
        raise UsageError(
            f"devices {', '.join(settings.devices)}: the trials' device, {trial.device!r}, is not the first"
        )
    if settings.num_workers is not None and settings.num_workers != len(settings.devices):
        raise UsageError("num_workers: with devices it is their number, one trial at a time on each")
    if len(settings.devices) > 1 and not can_travel(task):
        raise UsageError(
            "devices: this task cannot travel to other processes; its trials run in this one, on one device"
        )
    return len(settings.devices)


def resolve_devices(names: str) -> list[str]:
    """Return the devices of "cuda:0,cuda:1": different ones of the same product.

    Raises:
        UsageError: one is not there or is given twice, or they are not alike, so that times could not be compared.
    """
    found = [resolve_device(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise UsageError("devices: none is given; such as cuda:0,cuda:1")
    if len(found) > 1:
        if any(torch.device(name).type != "cuda" for name in found):
            raise UsageError(f"devices {names!r}: several are for CUDA; on a CPU --workers runs several trials at once")
        found = [name if ":" in name else f"{name}:0" for name in found]
        if len(set(found)) < len(found):
            raise UsageError(
                f"devices {names!r}: one is given twice; two trials on one device would disturb their times"
            )
        products = {torch.cuda.get_device_name(name) for name in found}
        if len(products) > 1:
            raise UsageError(f"devices {names!r}: {', '.join(sorted(products))}; times of one study need one product")
    return found


def target_of(trial: TrialSettings) -> tuple[str, bool]:
    """Return the name of the device that memory and throughput are for, and whether it is this machine's."""
    if torch.device(trial.device).type == "cuda":
        return torch.cuda.get_device_name(trial.device), True
    return gpu_by_name(trial.gpu).product, False


def _time_step(task: Task, model: nn.Module, batch: Any) -> float:
    """Time one forward and backward in FP32; the model is not used again."""
    started = time.perf_counter()
    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - started


def _find_units(task: Task, model: nn.Module, batch: Any) -> Units:
    """Find the units on a few samples, which show as much as a whole batch; on all where the task cannot run those."""
    few = cut_batch(batch, size=NUM_SAMPLES_FOR_UNITS, num_samples=task.num_samples)
    try:
        return find_units(model, run=lambda module: task.loss(module, few))
    except Exception:
        if few is batch:
            raise
        return find_units(model, run=lambda module: task.loss(module, batch))


def _space(settings: SearchSettings, model: nn.Module) -> SearchSpace:
    return choose_space(model) if settings.space is None else load_space(settings.space)


def _has_native_bf16(trial: TrialSettings, *, here: bool) -> bool:
    if here:
        return has_native_bf16(torch.device(trial.device))
    return gpu_by_name(trial.gpu).native_bf16


def _capacity(trial: TrialSettings, *, here: bool) -> float:
    """Return the bytes of the target's memory."""
    if here:
        return float(torch.cuda.get_device_properties(trial.device).total_memory)
    return float(gpu_by_name(trial.gpu).memory_bytes)


STOCK_NAMES = ("bf16", "fp16", "tf32", "fp32")


def _present(
    compare: str | Path | Policy | None, parameters: Parameters, trial: TrialSettings, *, native_bf16: bool
) -> tuple[str, list[Arm], list[str]]:
    """Return the name of the arm that the user runs today, an arm for it where it is a file, and what is to be told.

    Raises:
        UsageError, PolicyError: the target cannot run it, or it is neither one of the names nor a policy file.
    """
    if compare is None:
        return (AUTOCAST_BF16 if native_bf16 else AUTOCAST_FP16), [], []
    if isinstance(compare, str) and compare.lower() in STOCK_NAMES:
        name = compare.lower()
        target, here = target_of(trial)
        if name == "bf16" and not native_bf16:
            raise UsageError(f"compare: {target} has no BF16 units; allowed there: fp16, fp32 or a policy file")
        has_tf32 = torch.cuda.get_device_capability(trial.device) >= (8, 0) if here else _gpu_has_tf32(trial)
        if name == "tf32" and not has_tf32:
            raise UsageError(f"compare: {target} has no TF32; allowed there: fp16, fp32 or a policy file")
        notes = []
        if name == "fp32" and has_tf32 and not here:
            notes.append("compare fp32: the figures of FP32 are predicted with products in TF32, as this GPU offers")
        return {"bf16": AUTOCAST_BF16, "fp16": AUTOCAST_FP16}.get(name, FP32), [], notes
    if isinstance(compare, str) and not Path(compare).exists():
        nearest = did_you_mean(compare, STOCK_NAMES)
        allowed = f"{', '.join(STOCK_NAMES)} or a policy file"
        raise UsageError(f"compare: found {compare[:80]!r}; allowed: {allowed}{nearest}")
    given = compare if isinstance(compare, Policy) else load_policy(Path(compare))
    policy = given.replace(training=None, model=None, recommendation=None, evidence=None, provenance=None)
    values = parameters.values(lambda decision: parameters.precision(policy, decision))
    name = f"{PRESENT_POLICY} {parameters.key(policy)[:8]}"
    return name, [Arm(name, values, policy)], []


def _gpu_has_tf32(trial: TrialSettings) -> bool:
    return gpu_by_name(trial.gpu).tf32_tflops is not None


def _optimizer_defaults(task: Task) -> dict[str, Any]:
    """Return eps and amsgrad of an Adam-like optimizer class, those left out that the task sets itself."""
    builders = list(task.optimizer.values()) if isinstance(task.optimizer, Mapping) else [task.optimizer]
    known = [inspect.signature(build).parameters for build in builders]
    if not all({"eps", "amsgrad"} <= set(parameters) for parameters in known):
        return {}
    defaults = {name: {p[name].default for p in known} for name in ("eps", "amsgrad")}
    return {
        name: values.pop()
        for name, values in defaults.items()
        if name not in task.optimizer_settings and len(values) == 1
    }


def trial_identity(trial: TrialSettings) -> dict[str, Any]:
    """Return what decides the numbers of trials: of the device its product, not which of several equal ones it is."""
    kind = torch.device(trial.device).type
    device = {"device": kind} if kind == "cpu" else {"device": kind, "device_name": target_of(trial)[0]}
    return trial.model_dump(mode="json", exclude={"abort"}) | device


def task_identity(task: Task) -> dict[str, Any]:
    """Return what decides a task's numbers, as JSON values."""
    return {
        "name": task.name,
        "settings": dict(task.settings),
        "optimizer": _optimizer_names(task.optimizer),
        "optimizer_settings": {name: _plain(value) for name, value in task.optimizer_settings.items()},
        "code": code_digest(task),
        "metric": task.metric_name,
        "max_grad_norm": task.max_grad_norm,
        "accumulation_steps": task.accumulation_steps,
        "target": None if task.target is None else [task.target.batch_size, task.target.description],
        **{name: value for name, value in training_options(task).changed.items() if name != "accumulation_steps"},
    }


def _optimizer_names(optimizer: Any) -> Any:
    if isinstance(optimizer, Mapping):
        return {name: _optimizer_names(build) for name, build in optimizer.items()}
    return getattr(optimizer, "__name__", type(optimizer).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else type(value).__name__


def file_name(name: str) -> str:
    """Return a task's name as a part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "task"
