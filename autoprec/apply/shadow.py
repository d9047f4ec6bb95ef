"""Half copies of a module's weights for the time of one forward, while the FP32 masters stay where they are.

A copy is put into the module's `__dict__`, which Python looks at before `nn.Module` looks into `_parameters`. Autograd
carries the gradient of the copy to the master. Modules with running statistics keep their affine parameters and
statistics, and a tensor that the forward is seen to write to stays FP32 (`writes`). A write to a copy that shows only
afterwards is carried over to a buffer or plain attribute, and refused for a parameter. Threads that run one module at
the same time share the copies: the first puts them in, the last takes them out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import nn

from autoprec.apply.casts import (
    CastCache,
    cast_weight,
    keeps_running_statistics,
    parametrizations,
    plain_tensors,
    state_of,
    wants_cast,
)
from autoprec.errors import ApplyError, PrecisionWarning

__all__ = ["Member", "Shadow", "TracedShadow"]

_MISSING = object()


@dataclass(slots=True)
class _Record:
    """One substitution: `namespace[name]` is `substitute` as long as it stands."""

    namespace: dict[str, Any]
    name: str
    original: Any
    original_state: tuple[int, int] | None
    substitute: Any
    is_plain: bool = False
    is_buffer: bool = False
    state: tuple[int, int] | None = None
    """State of the substitute as it was put in; None where writes to it do not matter."""

    def stands_for(self, original: Any) -> bool:
        return (
            self.original is original
            and self.original_state == state_of(original)
            and self.namespace.get(self.name, _MISSING) is self.substitute
        )

    @property
    def was_written(self) -> bool:
        return self.state is not None and self.state != state_of(self.substitute)

    def put_in(self) -> None:
        self.namespace[self.name] = self.substitute

    def take_out(self) -> None:
        if self.namespace.get(self.name, _MISSING) is not self.substitute:
            if self.is_plain:
                _widen(self.namespace, self.name, self.original, self.substitute)
            return
        if self.is_plain:
            self.namespace[self.name] = self.original
        else:
            del self.namespace[self.name]


@dataclass(eq=False)
class Member:
    """One module whose weights a half region casts; `kept` names those of its tensors that stay FP32."""

    module: nn.Module
    kept: set[str] = field(default_factory=set)
    num_users: int = 0
    records: dict[str, _Record] = field(default_factory=dict)
    num_attributes: int = -1
    """How many attributes the module had when all its tensors were substituted; -1 where that has to be looked at."""

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "kept": self.kept, "num_users": 0, "records": {}, "num_attributes": -1}

    def is_current(self, dtype: torch.dtype) -> bool:
        """Whether every substitution that a wider region made here still stands; quick, for calls inside it."""
        module, records = self.module, self.records
        own = module.__dict__
        if len(own) != self.num_attributes or module._forward_pre_hooks:
            return False
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                known = records.get(name)
                if known is None:
                    if wants_cast(tensor, dtype) and name not in self.kept:
                        return False
                elif not known.stands_for(tensor):
                    return False
        return True


class Shadow:
    """The substitutions of one forward; `enter` module by module, `leave` once. Hold the model's lock around both."""

    __slots__ = ("cache", "changes", "dtype", "members")

    def __init__(self, dtype: torch.dtype, cache: CastCache | None) -> None:
        self.dtype = dtype
        self.cache = cache
        self.members: list[Member] = []
        self.changes: list[tuple[Member, str, _Record | None]] = []

    def enter(self, member: Member, *, is_part: bool = False) -> None:
        """Substitute the module's own floating tensors where that has not been done.

        Args:
            is_part: the module's own forward is still to come: leave distributed tensors for it, when they are
                gathered, and weights that a hook of torch.nn.utils computes before it.
        """
        module = member.module
        if keeps_running_statistics(module) or (is_part and _computes_weights_in_hooks(module)):
            return
        self.members.append(member)
        member.num_users += 1
        records, own = member.records, module.__dict__
        for name, parameter in module._parameters.items():
            known = records.get(name)
            if name in member.kept or (known is not None and known.stands_for(parameter)):
                continue
            if (known is not None or name not in own) and wants_cast(parameter, self.dtype, is_part):
                self._substitute(member, own, name, parameter, self._cast(parameter))
        for name, buffer in module._buffers.items():
            known = records.get(name)
            if name in member.kept or (known is not None and known.stands_for(buffer)):
                continue
            if (known is not None or name not in own) and wants_cast(buffer, self.dtype, is_part):
                self._substitute(member, own, name, buffer, buffer.to(self.dtype), is_buffer=True)
        plain = plain_tensors(module)
        for name in plain:
            if name not in member.kept and wants_cast(own[name], self.dtype, is_part):
                self._substitute(member, own, name, own[name], self._cast(own[name]), is_plain=True)
        is_simple = not plain
        if isinstance(module, nn.RNNBase):
            self._enter_recurrent(member, module)
            is_simple = False
        if "parametrizations" in module._modules:
            for name, namespace, call in parametrizations(module, self.dtype):
                self._substitute(member, namespace, "forward", None, call, key=f"parametrizations.{name}")
            is_simple = False
        member.num_attributes = len(own) if is_simple else -1

    def _enter_recurrent(self, member: Member, module: nn.RNNBase) -> None:
        """Give a recurrent layer its list of half weights, and references to them so that it does not rebuild it."""
        own = module.__dict__
        flat = own.get("_flat_weights")
        if not isinstance(flat, list) or not any(wants_cast(weight, self.dtype) for weight in flat):
            return
        weights = [getattr(module, name, None) for name in module._flat_weights_names]
        references = [ref(weight) if weight is not None else None for weight in weights]
        self._substitute(member, own, "_flat_weights", flat, weights, is_plain=True)
        if "_flat_weight_refs" in own:
            self._substitute(member, own, "_flat_weight_refs", own["_flat_weight_refs"], references, is_plain=True)
        if weights and weights[0] is not None and weights[0].is_cuda:
            module.flatten_parameters()

    def leave(self) -> None:
        """Give everything back; carry over to the masters what the forward wrote into buffers and plain attributes.

        Raises:
            ApplyError: the forward wrote to a parameter, in a way that its code did not show.
        """
        written: list[str] = []
        for member in self.members:
            member.num_users -= 1
        for member, key, before in reversed(self.changes):
            if member.num_users and before is not None and key in member.records:
                written += _revert(member, key, before)
        for member in self.members:
            if not member.num_users:
                for record in member.records.values():
                    written += _keep_writes(member, record)
                    record.take_out()
                member.records.clear()
        if written:
            raise ApplyError(
                f"the forward wrote to the parameter {', '.join(written)}, which has a copy in "
                f"{str(self.dtype).removeprefix('torch.')}, so the write was lost; give the module whose code does "
                "that, and what it writes to, fp32 or autocast"
            )

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast_weight(tensor, self.dtype) if self.cache is None else self.cache.cast(tensor, self.dtype)

    def _substitute(
        self,
        member: Member,
        namespace: dict[str, Any],
        name: str,
        original: Any,
        substitute: Any,
        *,
        key: str | None = None,
        is_plain: bool = False,
        is_buffer: bool = False,
    ) -> None:
        before = state_of(original) if isinstance(original, torch.Tensor) else None
        # cuDNN lays the weights of recurrent layers out anew by itself
        is_watched = isinstance(substitute, torch.Tensor) and (is_buffer or not isinstance(member.module, nn.RNNBase))
        state = state_of(substitute) if is_watched else None
        record = _Record(namespace, name, original, before, substitute, is_plain, is_buffer, state)
        self.changes.append((member, key or name, member.records.get(key or name)))
        member.records[key or name] = record
        record.put_in()


class TracedShadow:
    """The same substitutions while a compiler traces: no counting, no versions, casts that the compiler merges."""

    __slots__ = ("added", "dtype", "plain")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.plain: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.added: list[tuple[dict[str, Any], str]] = []

    def enter(self, member: Member, *, is_part: bool = False) -> None:
        """Substitute the module's own floating tensors where that has not been done."""
        module = member.module
        if keeps_running_statistics(module) or (is_part and _computes_weights_in_hooks(module)):
            return
        own = module.__dict__
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if name not in own and name not in member.kept and wants_cast(tensor, self.dtype, is_part):
                own[name] = tensor.to(self.dtype)
                self.added.append((own, name))
        for name in plain_tensors(module):
            if name not in member.kept and wants_cast(own[name], self.dtype, is_part):
                original, own[name] = own[name], own[name].to(self.dtype)
                self.plain.append((own, name, original, own[name]))
        if isinstance(module, nn.RNNBase) and isinstance(flat := own.get("_flat_weights"), list):
            own["_flat_weights"] = [w.to(self.dtype) if wants_cast(w, self.dtype) else w for w in flat]
            self.plain.append((own, "_flat_weights", flat, own["_flat_weights"]))
        if "parametrizations" in module._modules:
            for _, namespace, call in parametrizations(module, self.dtype):
                namespace["forward"] = call
                self.added.append((namespace, "forward"))

    def leave(self) -> None:
        """Give everything back."""
        for namespace, name in self.added:
            if name in namespace:
                del namespace[name]
        for namespace, name, original, substitute in self.plain:
            if namespace.get(name) is substitute:
                namespace[name] = original
            else:
                _widen(namespace, name, original, substitute)


def _computes_weights_in_hooks(module: nn.Module) -> bool:
    """Whether old-style weight_norm, spectral_norm or pruning computes the module's weight before its forward."""
    return any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values())


def _widen(namespace: dict[str, Any], name: str, original: Any, substitute: Any) -> None:
    """A plain attribute that the forward set anew (a hidden state) keeps the dtype that it had outside."""
    current = namespace.get(name)
    if isinstance(current, torch.Tensor) and isinstance(original, torch.Tensor) and current.dtype is substitute.dtype:
        namespace[name] = current.to(original.dtype)


def _revert(member: Member, key: str, before: _Record) -> list[str]:
    """End a substitution made inside a wider one that is still standing; return what `_keep_writes` does."""
    record = member.records[key]
    written = _keep_writes(member, record)
    record.take_out()
    del member.records[key]
    if not before.is_plain and before.name not in before.namespace:
        member.records[key] = before
        before.put_in()
    return written


def _keep_writes(member: Member, record: _Record) -> list[str]:
    """Carry over what the forward wrote though its code did not look like it; the tensor stays FP32 from then on.

    Returns:
        The name of a parameter that was written to: its master would be rounded at every step.
    """
    name, original = record.name, record.original
    is_replaced = record.is_buffer and member.module._buffers.get(name) is not original
    if not is_replaced and not record.was_written:
        return []
    if not (record.is_buffer or record.is_plain):
        return [f"{name!r} of {type(member.module).__name__}"]
    cast: torch.Tensor = record.substitute
    with torch.no_grad():
        if not is_replaced:
            original.copy_(torch.where(cast == original.to(cast.dtype), original, cast.to(original.dtype)))
        elif (current := member.module._buffers.get(name)) is not None:
            member.module._buffers[name] = current.to(original.dtype)
    member.kept.add(name)
    kind = "buffer" if record.is_buffer else "tensor"
    message = (
        f"the forward of {type(member.module).__name__} writes to its {kind} {name!r}; this first write was "
        f"rounded to {str(cast.dtype).removeprefix('torch.')}, the {kind} stays in {original.dtype} from now on"
    )
    warnings.warn(message, PrecisionWarning, stacklevel=2)
    return []
