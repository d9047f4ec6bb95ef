"""What runs at a module's forward once a policy is installed: the root, regions, and members of half regions.

Installed as `module.forward = PolicyForward(run_..., module, region)`: a module-level function with plain data, so
that the whole model pickles, copies, compiles and exports. While torch.compile or torch.export traces, the caches, the
locks and the thread-local state are left out: the compiler merges equal casts by itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any

import torch
from torch import nn

from autoprec.apply.casts import CastCache
from autoprec.apply.fastpath import WITHOUT_FASTPATH
from autoprec.apply.losses import FP32Losses
from autoprec.apply.originals import CASTS, traced_casts
from autoprec.apply.shadow import Member, Shadow, TracedShadow
from autoprec.apply.state import LOCAL, Entered, Lock, autocast, device_type_of
from autoprec.apply.structure import class_forward
from autoprec.apply.trees import Copies, cast_tree
from autoprec.emulation import is_emulating
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Policy, Precision

__all__ = ["PolicyForward", "Region", "Root", "run_region", "run_root"]

_MODULE_FILE = nn.Module.__call__.__code__.co_filename
_NOTHING: frozenset[int] = frozenset()
_NO_OFFER = nullcontext()
_task = torch._C._current_graph_task_id


class PolicyForward(functools.partial[Any]):
    """The forward of a module under a policy; shows the signature of the forward that it stands for."""

    @property
    def __signature__(self) -> inspect.Signature:
        module, state = self.args
        region: Region = state.region if isinstance(state, Root) else state
        return inspect.signature(region.inner or class_forward(module, is_static=region.is_static))


@dataclass(eq=False)
class Region:
    """How one module computes.

    Attributes:
        dtype: of floating inputs for fp32, fp16 and bf16; the autocast dtype for autocast.
        inner: the user's own instance forward, given back by remove_policy; None for the class's.
        members: the modules whose weights are cast when the region is entered; empty where there is nothing to cast.
        own: those of them that a call inside the region looks at again: this module and its children without a call.
        runs: for an nn.Sequential of several precisions: neighbours of equal precision are one region.
        keeps_output: leave outputs as they are: at the root, and where a loss is computed inside.
        writes_input: the forward is known to change its input in place.
        is_static: the class's forward is a static or class method.
        gives_fp32: outputs are cast to FP32: at the root.
        changes_input: the forward's own code changes an argument in place, so that a tracer cannot tell a cast from
            what became of it.
    """

    precision: Precision
    dtype: torch.dtype
    inner: Callable[..., Any] | None = None
    lock: Lock = field(default_factory=Lock)
    members: list[Member] = field(default_factory=list)
    own: list[Member] = field(default_factory=list)
    runs: list[tuple[list[str], Region]] | None = None
    keeps_output: bool = False
    writes_input: bool = False
    protects_losses: bool = False
    without_fastpath: bool = False
    is_static: bool = False
    gives_fp32: bool = False
    changes_input: bool = False
    key: str = field(init=False)
    is_special: bool = field(init=False)
    is_plain_autocast: bool = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"{self.precision} {self.dtype}"
        self.wrap(self.inner)

    def wrap(self, inner: Callable[..., Any] | None) -> None:
        """Take the forward that the instance has of its own."""
        self.inner = inner
        self.is_special = self.runs is not None or self.protects_losses or self.without_fastpath or self.is_static
        self.is_plain_autocast = self.precision == "autocast" and not self.is_special and self.inner is None


@dataclass(eq=False)
class Root:
    """The root's own region and what the whole forward needs to know."""

    policy: Policy
    region: Region
    uses_autocast: bool
    uses_fp16: bool
    autocast_dtype: torch.dtype
    installed: list[tuple[nn.Module, PolicyForward]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    has_warned: bool = False
    wants_compile: bool = False


def run_root(module: nn.Module, root: Root, /, *args: Any, **kwargs: Any) -> Any:
    """Run the root's forward under its policy; floating outputs come back in FP32."""
    if torch.compiler.is_compiling():
        with _outermost(root, device_type_of(module, args, kwargs)):
            return cast_tree(run_region(module, root.region, *args, **kwargs), torch.float32)
    local = LOCAL
    if local.root is root and local.task == _task():  # the root calls itself
        return run_region(module, replace(root.region, gives_fp32=False), *args, **kwargs)
    _refuse_copies(module, sys._getframe(1))
    device_type = device_type_of(module, args, kwargs)
    if root.uses_fp16 and not root.has_warned and device_type == "cpu":
        _warn_of_slow_fp16(root)
    if root.wants_compile and torch.is_grad_enabled():
        _warn_of_eager_training(root)
    outer = (local.key, local.task, local.root, local.cache, local.covered)
    region, cache = root.region, CastCache()
    context = _outermost(root, device_type)
    clears = type(context) is not nullcontext
    try:
        if clears:
            torch.clear_autocast_cache()
        with context:
            local.key, local.task, local.root, local.cache, local.covered = region.key, _task(), root, cache, _NOTHING
            local.num_regions = 1
            if region.is_plain_autocast:
                output = type(module).forward(module, *args, **kwargs)
            else:
                output = run_region(module, region, *args, **kwargs)
        if type(output) is GeneratorType:
            return _steps(module, region, output)
        return cast_tree(output, torch.float32)
    except RuntimeError as error:
        _explain(error, module, root)
        raise
    finally:
        if clears:
            torch.clear_autocast_cache()
        local.num_casts = cache.num_casts
        local.key, local.task, local.root, local.cache, local.covered = outer


def run_region(module: nn.Module, region: Region, /, *args: Any, **kwargs: Any) -> Any:
    """Run one module's forward in its precision; nothing but input casts where that precision is in force already.

    A part that is called by itself, outside of any forward of the model, gives FP32 as the root does: what it returns
    may go straight into a loss.
    """
    compiling = torch.compiler.is_compiling()
    local = LOCAL
    is_outermost = not compiling and not local.key and _task() == -1
    entered = not compiling and local.key == region.key and local.task == _task()
    if region.precision == "autocast":
        if entered:
            if region.is_plain_autocast:
                return type(module).forward(module, *args, **kwargs)
            return _call(module, region, args, kwargs)
        if not compiling:
            _refuse_copies(module, sys._getframe(1))
        with _context(region, device_type_of(module, args, kwargs), compiling):
            output = _call(module, region, args, kwargs)
        if type(output) is GeneratorType and not compiling:
            return _steps(module, region, output)
        return cast_tree(output, torch.float32) if is_outermost else output
    if not (entered or compiling):
        _refuse_copies(module, sys._getframe(1))
    dtype = region.dtype
    copies = Copies(assume_written=region.writes_input if compiling else None)
    inputs = args
    for value in args:
        if not (isinstance(value, torch.Tensor) and value.dtype is dtype):
            inputs = tuple([cast_tree(value, dtype, copies) for value in args])
            break
    named = {name: cast_tree(value, dtype, copies) for name, value in kwargs.items()} if kwargs else kwargs
    with _offering(region, copies, compiling):
        if entered:
            output = _call_shadowed(module, region, inputs, named)
        else:
            with _context(region, device_type_of(module, args, kwargs), compiling):
                output = _call_shadowed(module, region, inputs, named)
        if region.gives_fp32 or is_outermost:
            output = cast_tree(output, torch.float32)
    if copies.pairs or copies.tensors:
        copies.write_back()
    if type(output) is GeneratorType and not compiling:
        return _steps(module, region, output, copies)
    return output if region.keeps_output or is_outermost else cast_tree(output, dtype)


def _offering(region: Region, copies: Copies, compiling: bool) -> Any:
    """Let whoever computes in FP32 inside the block have what its half inputs were cast from."""
    if region.dtype is torch.float32 or region.precision == "autocast":
        return _NO_OFFER
    if compiling:
        return _NO_OFFER if region.changes_input else _traced(copies)
    return _offered(copies) if copies.tensors else _NO_OFFER


@contextmanager
def _offered(copies: Copies) -> Iterator[None]:
    outer = CASTS.known
    CASTS.known = (*copies.tensors, *outer)
    try:
        yield
    finally:
        CASTS.known = outer


@contextmanager
def _traced(copies: Copies) -> Iterator[None]:
    num_outer = len(traced_casts)
    for given, cast in copies.known.values():
        if isinstance(given, torch.Tensor):
            traced_casts.append((given, cast))
    try:
        yield
    finally:
        del traced_casts[num_outer:]


def _steps(
    module: nn.Module, region: Region, generator: Generator[Any, Any, Any], copies: Copies | None = None
) -> Generator[Any, Any, Any]:
    """Go on with a forward that yields: its code runs after the region was left, so each step enters it again."""
    step = replace(region, inner=generator.send, runs=None)
    sent: Any = None
    try:
        while True:
            try:
                with nullcontext() if copies is None else _offering(region, copies, compiling=False):
                    item = run_region(module, step, sent)
            except StopIteration as end:
                return end.value
            sent = yield item
    finally:
        generator.close()


def _run_sequence(module: nn.Module, runs: list[tuple[list[str], Region]], value: Any) -> Any:
    """Run an `nn.Sequential`, entering each run of neighbours of one precision once."""
    compiling = torch.compiler.is_compiling()
    for names, run in runs:
        children: list[Any] = [module._modules[name] for name in names]
        if compiling or len(children) == 1 or LOCAL.key == run.key:
            for child in children:
                value = child(value)
            continue
        with _context(run, device_type_of(module, (value,), {}), compiling):
            copies = Copies()
            if run.precision != "autocast":
                value = cast_tree(value, run.dtype, copies)
            with _offering(run, copies, compiling):
                for child in children:
                    value = child(value)
            copies.write_back()
            if run.precision != "autocast":
                value = cast_tree(value, run.dtype)
    return value


def _context(region: Region, device_type: str, compiling: bool) -> Any:
    context = autocast(device_type, region.dtype, enabled=region.precision == "autocast")
    return context if compiling else Entered(region.key, context)


def _outermost(root: Root, device_type: str) -> Any:
    """The outermost context of a forward: it keeps the cache of casts for all autocast regions in it."""
    if root.uses_autocast and "," not in device_type and torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, dtype=root.autocast_dtype, enabled=root.region.precision == "autocast")
    return autocast(
        device_type, root.autocast_dtype, enabled=root.uses_autocast and root.region.precision == "autocast"
    )


def _call_shadowed(module: nn.Module, region: Region, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _call_traced(module, region, args, kwargs) if region.members else _call(module, region, args, kwargs)
    local = LOCAL
    covered = local.covered
    is_inside = id(module) in covered
    members = region.own if is_inside else region.members
    if not members or (is_inside and _are_current(members, region.dtype)):
        return _call(module, region, args, kwargs)
    shadow = Shadow(region.dtype, local.cache)
    try:
        with region.lock:
            for member in members:
                shadow.enter(member, is_part=member.module is not module)
        if not is_inside:
            local.covered = covered.union([id(member.module) for member in members], (id(module),))
        return _call(module, region, args, kwargs)
    finally:
        local.covered = covered
        with region.lock:
            shadow.leave()


def _explain(error: RuntimeError, module: nn.Module, root: Root) -> None:
    """Add to torch's message on two dtypes what is behind it: parameters that stay FP32, modules that came later."""
    if "type" not in str(error):
        return
    regions = {id(forward): forward.args[1] for _, forward in root.installed[1:]}
    members = {id(m): m for region in (root.region, *regions.values()) for m in region.own}
    for member in members.values():
        if member.kept:
            error.add_note(
                f"{type(member.module).__name__} keeps {', '.join(sorted(member.kept))} in FP32 in a half region (its "
                "forward writes to it, its gradient is sparse, or half cannot hold it); where the two meet, give the "
                "module fp32 or autocast"
            )
    known = set(map(id, root.modules))
    added = [
        name
        for name, each in module.named_modules()
        if id(each) not in known and each._parameters and "parametrizations" not in name
    ]
    if added:
        error.add_note(
            f"modules were added or replaced after the policy was applied and follow none of its rules: "
            f"{', '.join(added[:8])}{' ...' if len(added) > 8 else ''}; remove_policy, then apply_policy again"
        )


def _are_current(members: list[Member], dtype: torch.dtype) -> bool:
    for member in members:  # noqa: SIM110 (a loop: this runs at every call inside a half region)
        if not member.is_current(dtype):
            return False
    return True


def _call_traced(module: nn.Module, region: Region, args: Any, kwargs: Any) -> Any:
    shadow = TracedShadow(region.dtype)
    try:
        for member in region.members:
            shadow.enter(member, is_part=member.module is not module)
        return _call(module, region, args, kwargs)
    finally:
        shadow.leave()


def _call(module: nn.Module, region: Region, args: Any, kwargs: Any) -> Any:
    if not region.is_special:
        inner = region.inner
        return type(module).forward(module, *args, **kwargs) if inner is None else inner(*args, **kwargs)
    if region.runs is not None and len(args) == 1 and not kwargs and _is_whole(module, region.runs):
        return _run_sequence(module, region.runs, args[0])
    with ExitStack() as stack:
        if region.protects_losses:
            stack.enter_context(FP32Losses())
        if region.without_fastpath:
            stack.enter_context(WITHOUT_FASTPATH)
        forward = region.inner or class_forward(module, is_static=region.is_static)
        return forward(*args, **kwargs)


def _is_whole(module: nn.Module, runs: list[tuple[list[str], Region]]) -> bool:
    """Whether the sequence still has the children that the policy was resolved for."""
    return [name for names, _ in runs for name in names] == list(module._modules)


def _refuse_copies(module: nn.Module, caller: Any) -> None:
    """Refuse a call from `nn.Module.__call__` of another module: a shallow copy that would run this one's weights."""
    if caller.f_code.co_filename == _MODULE_FILE:
        calling = caller.f_locals.get("self", module)
        if calling is not module and type(calling) is type(module):
            raise ApplyError(
                f"this {type(calling).__name__} is a shallow copy (copy.copy, DataParallel, a clone of __dict__) of a "
                "module with a policy and would run the original's weights; use copy.deepcopy, or remove_policy first "
                "and apply_policy to the copy"
            )


def _warn_of_slow_fp16(root: Root) -> None:
    if not is_emulating():
        root.has_warned = True
        message = "FP16 on a CPU is slow in torch; `with autoprec.emulate():` computes it in FP32 and rounds once"
        warnings.warn(message, PrecisionWarning, stacklevel=5)


def _warn_of_eager_training(root: Root) -> None:
    root.wants_compile = False
    options = root.policy.training
    assert options is not None
    message = (
        f"the policy was found with torch.compile(model, backend={options.compile!r}) and this model trains eagerly:"
        " its memory and speed will differ"
    )
    warnings.warn(message, PrecisionWarning, stacklevel=5)
