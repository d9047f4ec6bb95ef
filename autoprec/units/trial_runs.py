"""Try units, and the code between them, in each precision: what raises takes the choice away, with the reason."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from autoprec.apply import apply_policy, remove_policy
from autoprec.apply.structure import Structure, is_scripted
from autoprec.apply.trees import CASTABLE, first_tensor
from autoprec.emulation import emulate, is_emulating
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import PRECISIONS, Policy, Precision
from autoprec.units.find import Call, undisturbed

__all__ = ["refused_by_units", "refused_by_composites", "first_failure", "map_tensors", "MAX_ROUNDS"]

LOW: tuple[Precision, ...] = tuple(precision for precision in PRECISIONS if precision != "fp32")
MAX_ROUNDS = 16
"""How many modules the search for code that cannot run in a precision names before it gives up on that precision."""


def refused_by_units(calls: Mapping[str, Call]) -> dict[str, dict[Precision, str]]:
    """Run each unit on its recorded input, forward and backward, in each precision.

    Under autocast also on that input in half, which is what a neighbour in half hands it.
    Units of one class with the same settings and input shapes are tried once.
    """
    known: dict[Any, dict[Precision, str]] = {}
    refused: dict[str, dict[Precision, str]] = {}
    for name, call in calls.items():
        signature = _signature(call)
        if signature not in known:
            known[signature] = _refused_precisions(call)
        refused[name] = dict(known[signature])
    return refused


def refused_by_composites(
    structure: Structure,
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    refused: Mapping[str, dict[Precision, str]],
) -> dict[str, dict[Precision, str]]:
    """Run the whole model in each precision; return the modules whose own code (between the units) cannot run in it.

    A unit that fails on what another unit hands it (a half FFT input, say) is added to `refused`.
    """
    found: dict[str, dict[Precision, str]] = {}
    if is_scripted(structure.modules[""]):
        return {"": dict.fromkeys(("fp16", "bf16"), "the model is TorchScript")}
    for precision in LOW:
        pinned: dict[str, Precision] = {
            name: "fp32" for name, reasons in refused.items() if precision in reasons and name
        }
        for _ in range(MAX_ROUNDS):
            place = first_failure(structure, model, run, Policy(default=precision, modules=pinned))
            if place is None:
                break
            name, reason = place
            (refused[name] if name in refused else found.setdefault(name, {}))[precision] = reason
            if name in pinned or not name:
                break
            pinned[name] = "fp32"
            children = [child for child, parent in structure.parents.items() if parent == name]
            own: dict[str, Precision] = {child: precision for child in children if child not in structure.governors}
            pinned = {**own, **pinned}
    return found


def _refused_precisions(call: Call) -> dict[Precision, str]:
    if is_scripted(call.module):
        scripted = "TorchScript: its weights cannot be cast from outside"
        return {"fp16": scripted, "bf16": scripted}
    refused: dict[Precision, str] = {}
    for precision in LOW:
        reason = _failure(call, precision)
        if reason is None and precision == "autocast" and (found := _failure(call, precision, half=True)) is not None:
            reason = f"on a half input: {found}"
        if reason is not None:
            refused[precision] = reason
    return refused


def _failure(call: Call, precision: Precision, *, half: bool = False) -> str | None:
    module = call.module
    dtype = "bf16" if precision == "bf16" else "fp16"
    try:
        with undisturbed(module), _quietly(module, precision, call.args, call.kwargs):
            apply_policy(module, Policy(default=precision, dtype=dtype))
            try:
                args, kwargs, inputs = _fresh_inputs(call, half=half)
                output = module.forward(*args, **kwargs)
                _backward(output, [*inputs, *module.parameters()])
            finally:
                remove_policy(module)
    except ApplyError as error:
        return str(error)
    except Exception as error:
        return _reason(error)
    return None


def _fresh_inputs(call: Call, *, half: bool) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    inputs: list[torch.Tensor] = []

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone()
        if copied.dtype in CASTABLE:
            copied.requires_grad_(True)
            inputs.append(copied)
            return (copied * 1).half() if half else copied * 1
        return copied

    return (
        tuple(map_tensors(value, fresh) for value in call.args),
        {key: map_tensors(value, fresh) for key, value in call.kwargs.items()},
        inputs,
    )


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [map_tensors(item, function) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    return copy.copy(value)


def _backward(output: Any, wrt: list[torch.Tensor]) -> None:
    outputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and tensor.dtype in CASTABLE:
            outputs.append(tensor.float().sum())
        return tensor

    map_tensors(output, collect)
    wanted = [tensor for tensor in wrt if tensor.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(torch.stack(outputs).sum(), wanted, allow_unused=True)


def first_failure(
    structure: Structure, model: nn.Module, run: Callable[[nn.Module], Any], policy: Policy
) -> tuple[str, str] | None:
    """Run the model under a policy; return the innermost module that raised and why, None where nothing did."""
    root = structure.modules[""]
    try:
        with undisturbed(root), _quietly(root, policy.default, (), {}):
            apply_policy(model, policy)
            try:
                run(model)
            finally:
                remove_policy(model)
    except Exception as error:
        names = {id(module): names[0] for module, names in _named(structure)}
        return _innermost(error.__traceback__, names), _reason(error)
    return None


def _named(structure: Structure) -> Iterator[tuple[nn.Module, list[str]]]:
    for module in structure.modules.values():
        yield module, structure.names[id(module)]


def _innermost(traceback: TracebackType | None, names: Mapping[int, str]) -> str:
    """Return the name of the module whose forward was the innermost one on the stack."""
    found = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)]
        traceback = traceback.tb_next
    return found


@contextmanager
def _quietly(module: nn.Module, precision: Precision, args: Any, kwargs: Any) -> Iterator[None]:
    """Emulate on a CPU, and hold back warnings: a trial run is not the user's run."""
    tensor = first_tensor(args, kwargs)
    tensor = next(module.parameters(), None) if tensor is None else tensor
    on_cpu = tensor is None or tensor.device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        warnings.simplefilter("ignore", UserWarning)
        with emulate() if on_cpu and not is_emulating() and precision != "fp32" else nullcontext():
            yield


def _signature(call: Call) -> Any:
    shapes: list[Any] = []

    def describe(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        return tensor

    map_tensors((call.args, call.kwargs), describe)
    module = call.module
    if not type(module).__module__.startswith("torch.nn."):
        return id(module)
    return (type(module), module.extra_repr(), module.training, tuple(shapes), tuple(map(repr, call.kwargs)))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else ""
    function = _function_name(error.__traceback__)
    return (f"{function}: " if function else "") + f"{type(error).__name__}: {message[:200]}"


def _function_name(traceback: TracebackType | None) -> str:
    """Return the class name of a custom autograd.Function on the stack, "" where there is none."""
    found = ""
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if (
                isinstance(value, type)
                and issubclass(value, torch.autograd.Function)
                and value is not torch.autograd.Function
            ):
                found = value.__name__
        traceback = traceback.tb_next
    return found
