"""The options that say what is trained and where, shared by every command that trains; loads nothing heavy."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.policy import TrainingOptions
    from autoprec.tasks.protocol import Task
    from autoprec.trials.outcome import TrialSettings

__all__ = ["TaskOptions", "as_arguments", "option", "takes_task"]


def option(text: str, *names: str, min: float | None = None, max: float | None = None) -> Any:
    """Return a command-line option called `names` with its help; a number below `min` or above `max` is refused."""
    return typer.Option(*names, help=text, show_default=True, min=min, max=max)


MAX_SEED = 2**63 - 1
"""torch's generators take 64 bits; the proof's seeds lie above the one that is given."""


TRAINING_OPTIONS = ("accumulation_steps", "checkpoint", "channels_last", "tf32", "optimizer_implementation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a person said of the task, of the seed and of the devices; one field an option."""

    task: Annotated[
        str | None,
        option(
            "Your own: path/to/file.py:function or package.module:function; it runs. Before it lightning: or trainer: "
            "where it returns those.",
            "--task",
        ),
    ] = None
    model: Annotated[
        str,
        option(
            "resnet50 or torchvision:NAME, timm:NAME, hf:ARCHITECTURE or hf:FOLDER; gpt-small, bert-small, lstm, gru, "
            "conv1d or mlp.",
            "--model",
        ),
    ] = "resnet50"
    weights: Annotated[str | None, option("Start weights: DEFAULT or a file.", "--weights")] = None
    data: Annotated[
        str | None,
        option(
            "digits, mnist, cifar10:PATH, cifar100:PATH or imagefolder:PATH; masks:PATH; topics or text:PATH; "
            "japanese_vowels; breast_cancer. What goes with the model.",
            "--data",
        ),
    ] = None
    image_size: Annotated[int | None, option("Pixels, in the trials; 32, segmentation 64.", "--image-size")] = None
    batch_size: Annotated[int | None, option("Batch of the trials; 32, segmentation 8.", "--batch-size")] = None
    optimizer: Annotated[str, option("adamw, adam or sgd.", "--optimizer")] = "adamw"
    lr: Annotated[float, option("Learning rate.", "--lr")] = 1e-3
    seed: Annotated[int, option("Start weights, batch order and samples.", "--seed")] = 0
    device: Annotated[str | None, option("cpu or cuda; cuda where there is one.", "--device")] = None
    gpu: Annotated[str, option("Target of computed and predicted numbers.", "--gpu")] = "a100"
    target_image_size: Annotated[int | None, option("Pixels of the real run; 224.", "--target-image-size")] = None
    target_batch_size: Annotated[int, option("Batch of the real run.", "--target-batch-size")] = 128
    accumulation_steps: Annotated[
        int | None, option("Micro-batches to one optimizer step; 1.", "--accumulation-steps")
    ] = None
    checkpoint: Annotated[
        list[str] | None,
        option("Modules to compute again in the backward pass: a name or glob; may be repeated.", "--checkpoint"),
    ] = None
    channels_last: Annotated[bool, option("Images and their weights in channels_last.", "--channels-last")] = False
    tf32: Annotated[
        bool | None, option("FP32 units in TF32 on CUDA, or not; torch's own switches.", "--tf32/--no-tf32")
    ] = None
    optimizer_implementation: Annotated[
        str | None, option("foreach, fused or for-loop; torch's own choice.", "--optimizer-implementation")
    ] = None
    compile: Annotated[bool, option("torch.compile the model in the trials.", "--compile")] = False
    compile_backend: Annotated[
        str | None, option("A backend of torch.compile; inductor. eager needs no compiler.", "--compile-backend")
    ] = None

    def build_task(self, training: TrainingOptions | None = None) -> Task:
        """Build the task that the options describe.

        Args:
            training: what a policy was found with; what the command line says goes before it.

        Raises:
            UsageError, TaskError: as the task's own builder.
        """
        from autoprec.tasks.source import TaskSource, source_named

        found = {} if training is None else training.model_dump(mode="json", include=set(training.changed))
        options = found | self.training_options()
        if self.task is not None:
            return source_named(self.task, options).build()
        given = dataclasses.asdict(self)
        for name in ("task", "device", "gpu", "compile", "compile_backend", *TRAINING_OPTIONS):
            del given[name]
        return TaskSource("named", given, options).build()

    def training_options(self) -> dict[str, Any]:
        """Return the fields of `Task` that were asked for, whatever the task itself says of them."""
        given = {name: getattr(self, name) for name in TRAINING_OPTIONS}
        options = {name: value for name, value in given.items() if value not in (None, False) or name == "tf32"}
        if self.tf32 is None:
            del options["tf32"]
        if self.compile or self.compile_backend is not None:
            options["compile"] = self.compile_backend or "inductor"
        return options

    def trial_settings(self, *, num_processes: int = 1) -> TrialSettings:
        """Return seed and devices as the settings of a trial; `num_processes` GPUs train it together.

        Raises:
            UsageError: no such device or GPU, fewer GPUs than one, a seed that torch cannot take.
        """
        from autoprec.estimates.gpus import gpu_by_name
        from autoprec.search.plan import resolve_device
        from autoprec.trials.outcome import TrialSettings

        if abs(self.seed) > MAX_SEED:
            raise UsageError(f"seed: found {self.seed}; allowed: {-MAX_SEED} to {MAX_SEED}")
        if num_processes < 1:
            raise UsageError(f"GPUs per trial: {num_processes}; at least 1")
        device, gpu = resolve_device(self.device), gpu_by_name(self.gpu).name
        return TrialSettings(seed=self.seed, device=device, gpu=gpu, num_processes=num_processes)


NOT_ONLY_NAMED = ("task", "seed", "device", "gpu", "compile", "compile_backend", *TRAINING_OPTIONS)
"""Options that also go with a task of one's own; the others describe one of the tasks by name."""


def _refuse_named_options(context: typer.Context, without: Collection[str]) -> None:
    kept = {*NOT_ONLY_NAMED, *without}
    named = [field.name for field in dataclasses.fields(TaskOptions) if field.name not in kept]
    given = [name for name in named if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{options}: not with --task, whose function decides this (model, batches, optimizer, target)")


def as_arguments(*options: Any) -> list[str]:
    """Return the command line that gives these dataclasses of options; what is at its default is left out."""
    found: list[str] = []
    for group in options:
        hints = get_type_hints(type(group), include_extras=True)
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if value != field.default:
                declared = hints[field.name].__metadata__[0]  # typer takes its first name for a default at first
                found += _as_arguments([declared.default, *declared.param_decls], value)
    return found


def _as_arguments(names: Sequence[str], value: Any) -> list[str]:
    name, _, off = names[-1].partition("/")
    if isinstance(value, bool):
        return [name if value else off]
    values = value if isinstance(value, list) else [value]
    return [part for each in values for part in (name, str(each))]


def takes_task(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """Let a command take each field of its dataclass parameters, `TaskOptions` first, as an option of its own.

    Fields in `without` are not offered and keep their defaults; the command may have an option of that name itself.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = list(inspect.signature(command).parameters.values())
    groups = {p.name: hints[p.name] for p in parameters if dataclasses.is_dataclass(hints[p.name])}
    fields = {name: [f for f in dataclasses.fields(kind) if f.name not in without] for name, kind in groups.items()}
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=get_type_hints(kind, include_extras=True)[field.name],
        )
        for name, kind in groups.items()
        for field in fields[name]
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in parameters
        if parameter.name not in groups
    ]

    @functools.wraps(command)
    def with_options(context: typer.Context, **values: Any) -> None:
        if values["task"] is not None:
            _refuse_named_options(context, without)
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields[name]})
        command(**values)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    taken = [context, *options, *own]
    with_options.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    return with_options
