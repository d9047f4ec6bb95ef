"""Lay out a plan as regions: which modules get a forward of ours, and with what. Pure: installs nothing."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from autoprec.apply.casts import owns_tensors
from autoprec.apply.checkpointing import own_forward
from autoprec.apply.losses import is_loss_module, losses_called
from autoprec.apply.plan import Plan
from autoprec.apply.regions import PolicyForward, Region, Root, run_region, run_root
from autoprec.apply.shadow import Member
from autoprec.apply.state import Lock
from autoprec.apply.structure import has_forward, has_static_forward, is_scripted, unwrap
from autoprec.apply.trees import CASTABLE
from autoprec.apply.unholdable import find_unholdable, multiplies
from autoprec.apply.writes import changes_arguments, tensors_kept
from autoprec.errors import PrecisionWarning
from autoprec.formats import FORMATS
from autoprec.policy import Policy, Precision

__all__ = ["make_installations"]

MAX_NAMES = 4
"""How many tensors a warning names."""
_HALF = ("fp16", "bf16")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TRANSFORMERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def make_installations(plan: Plan, policy: Policy) -> list[tuple[nn.Module, PolicyForward]]:
    """Return each module that gets a forward of ours, with that forward; the root comes first.

    Warns once of values that a half region loses: buffers that half cannot hold, where the module's code takes no FP32.
    """
    layout = _Layout(plan)
    installations = layout.installations(policy)
    if layout.lost:
        shown = "; ".join(layout.lost[:MAX_NAMES])
        more = f"; and {len(layout.lost) - MAX_NAMES} more" if len(layout.lost) > MAX_NAMES else ""
        message = f"half cannot hold what these modules keep, and their code takes no FP32 there: {shown}{more}"
        warnings.warn(message, PrecisionWarning, stacklevel=3)
    return installations


class _Layout:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.structure = plan.structure
        self.lock = Lock()
        self.default = plan.precision("")
        self.is_mixed = len(set(plan.precisions.values())) > 1
        self.known_members: dict[int, Member | None] = {}
        self.below: dict[int, list[Member]] = {}
        self.lost: list[str] = []
        self.with_losses = self._with_losses()

    def installations(self, policy: Policy) -> list[tuple[nn.Module, PolicyForward]]:
        result: list[tuple[nn.Module, PolicyForward]] = []
        for name, module in self.structure.unique():
            if name == "":
                root = self._root(policy, self._region(name, module))
                result.append((module, PolicyForward(run_root, module, root)))
            elif self._is_place(name, module):
                result.append((module, PolicyForward(run_region, module, self._region(name, module))))
        root.installed = list(result)
        root.modules = list(self.structure.modules.values())
        return result

    def _root(self, policy: Policy, region: Region) -> Root:
        used = set(self.plan.precisions.values()) | {region.precision}
        low = {self.plan.policy.dtype if precision == "autocast" else precision for precision in used}
        return Root(
            policy=policy,
            region=region,
            uses_autocast="autocast" in used,
            uses_fp16="fp16" in low,
            autocast_dtype=_dtype(self.plan.policy.dtype),
            wants_compile=policy.training is not None and policy.training.compile is not None,
        )

    def _is_place(self, name: str, module: nn.Module) -> bool:
        """Whether the module's forward is replaced."""
        if not has_forward(module) or is_scripted(module) or name in self.structure.governors:
            return False
        precision = self.plan.precisions[id(module)]
        if precision != self.default or (self.is_mixed and precision != "autocast"):
            return True
        parents = [self.structure.calling_parent(alias) for alias in self.structure.names[id(module)]]
        return (
            any(parent is None or self.plan.precision(parent) != precision for parent in parents)
            or ("" in parents and precision != "fp32" and self._is_called_from_outside(name))
            or bool(self._own(name, module))
            or self._runs_needed(name, module)
            or self._protects_losses(name, module)
            or self._without_fastpath(module)
        )

    def _is_called_from_outside(self, name: str) -> bool:
        """Whether people call the module itself, as in `model.encoder(x)`: the direct parts of a model of their own."""
        return "." not in name and not isinstance(self.structure.modules[""], _CONTAINERS)

    def _region(self, name: str, module: nn.Module) -> Region:
        precision = self.plan.precision(name)
        has_loss = id(module) in self.with_losses
        return Region(
            precision=precision,
            dtype=self._region_dtype(precision),
            inner=own_forward(module),
            lock=self.lock,
            members=self._members(module),
            own=self._own(name, module),
            runs=self._runs(module) if self._runs_needed(name, module) else None,
            keeps_output=name == "" or (precision in _HALF and has_loss),
            writes_input=bool(getattr(module, "inplace", False)),
            gives_fp32=name == "" and precision in _HALF,
            changes_input=precision in _HALF and changes_arguments(module),
            protects_losses=self._protects_losses(name, module),
            without_fastpath=self._without_fastpath(module),
            is_static=has_static_forward(module),
        )

    def _region_dtype(self, precision: Precision) -> torch.dtype:
        return _dtype(self.plan.policy.dtype if precision == "autocast" else precision)

    def _member(self, module: nn.Module) -> Member | None:
        """Return the module as one whose own tensors are cast; None where there is nothing to cast."""
        if id(module) not in self.known_members:
            precision = self.plan.precisions[id(module)]
            casts = owns_tensors(module) if precision in _HALF else precision == "fp32" and _owns_half_tensors(module)
            kept = tensors_kept(module) | self._unholdable(module) if casts and precision in _HALF else set()
            self.known_members[id(module)] = Member(module, kept) if casts else None
        return self.known_members[id(module)]

    def _unholdable(self, module: nn.Module) -> set[str]:
        """Return the names of tensors that stay FP32 since half cannot hold them; note those that cannot stay."""
        precision = self.plan.precisions[id(module)]
        found = list(find_unholdable(module, self._region_dtype(precision)))
        if not found or not multiplies(module):
            return {each.name for each in found}
        name = self.structure.names[id(module)][0]
        for each in found:
            if each.is_lost:
                path = f"{name}.{each.name}" if name else each.name
                rule = f"give {name!r} autocast or fp32" if name else "let the default be autocast"
                self.lost.append(f"{path} ({each.reason} in {precision}): {rule}")
        return set()

    def _members(self, module: nn.Module) -> list[Member]:
        """Return everything of one precision in the subtree that has tensors to cast."""
        if id(module) in self.below:
            return self.below[id(module)]
        member = self._member(module)
        found = {} if member is None else {id(module): member}
        for child_name, child in module._modules.items():
            inner = unwrap(child) if child is not None else None
            if inner is None or child_name == "parametrizations" or is_scripted(inner):
                continue
            if self.plan.precisions[id(inner)] == self.plan.precisions[id(module)]:
                found |= {id(each.module): each for each in self._members(inner)}
        self.below[id(module)] = list(found.values())
        return self.below[id(module)]

    def _own(self, name: str, module: nn.Module) -> list[Member]:
        """Return the module and those below that are never called themselves: parameter lists, parts of attention."""
        member = self._member(module)
        found = [] if member is None else [member]
        for child_name, child in module._modules.items():
            path = f"{name}.{child_name}" if name else child_name
            if child is None or child_name == "parametrizations" or is_scripted(child):
                continue
            inner = unwrap(child)
            is_called = path not in self.structure.governors and has_forward(inner)
            if not is_called and self.plan.precisions[id(inner)] == self.plan.precisions[id(module)]:
                found += self._own(path, inner)
        return found

    def _runs_needed(self, name: str, module: nn.Module) -> bool:
        if type(module).forward is not nn.Sequential.forward or own_forward(module) is not None:
            return False
        inside = [self.plan.precisions[id(unwrap(child))] for child in module._modules.values() if child is not None]
        precision = self.plan.precision(name)
        return len(inside) == len(module._modules) and any(other != precision for other in inside)

    def _runs(self, module: nn.Module) -> list[tuple[list[str], Region]]:
        runs: list[tuple[list[str], Region]] = []
        for child_name, child in module._modules.items():
            precision = self.plan.precisions[id(unwrap(child))]  # type: ignore[arg-type]
            if runs and runs[-1][1].precision == precision:
                runs[-1][0].append(child_name)
            else:
                region = Region(precision=precision, dtype=self._region_dtype(precision), lock=self.lock)
                runs.append(([child_name], region))
        return runs

    def _with_losses(self) -> set[int]:
        """Return the ids of modules that compute a loss themselves or in a module below."""
        found: set[int] = set()
        for name, module in reversed(self.structure.modules.items()):
            if id(module) in found or is_loss_module(module) or losses_called(type(module)):
                found.add(id(module))
                parent = self.structure.parents[name]
                if parent is not None:
                    found.add(id(self.structure.modules[parent]))
        return found

    def _protects_losses(self, name: str, module: nn.Module) -> bool:
        """Losses are FP32 in half regions; autocast's own rules do the same, but ban one of them."""
        precision = self.plan.precision(name)
        if precision == "fp32" or is_loss_module(module):
            return False
        called = losses_called(type(module))
        return bool(called) if precision in _HALF else "binary_cross_entropy" in called

    def _without_fastpath(self, module: nn.Module) -> bool:
        if not isinstance(module, _TRANSFORMERS):
            return False
        inside = [self.plan.precisions.get(id(unwrap(each)), "fp32") for each in module.modules()]
        return any(precision != "fp32" for precision in inside)


def _owns_half_tensors(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
    return any(isinstance(t, torch.Tensor) and t.dtype in CASTABLE - {torch.float32} for t in own)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype
