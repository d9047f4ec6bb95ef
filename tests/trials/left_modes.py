"""Modes that a task can leave behind in its process: each is entered here and never left."""

from __future__ import annotations

import builtins
import gc
import math
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_KEPT: list[Any] = []


def _enter(context: Any) -> None:
    _KEPT.append(context)
    context.__enter__()


def _patch(holder: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put another function in the place of one; it calls that and changes what comes back."""
    old = getattr(holder, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return change(old(*args, **kwargs))

    setattr(holder, name, patched)


def _half(result: Any) -> Any:
    return result * 0.5


class _Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.linear else result


class _Halved(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.addmm.default else result


def _hooks(module: str, name: str, hook: Any) -> Callable[[], Any]:
    return lambda: getattr(sys.modules[module], name)(hook)


def _module_hook(name: str, hook: Any) -> Callable[[], Any]:
    return _hooks("torch.nn.modules.module", name, hook)


def _optimizer_hook(name: str) -> Callable[[], Any]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return _hooks("torch.optim.optimizer", name, hook)


def _set(holder: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(holder, name, value)


def _alarm(timer: int, number: int) -> None:
    signal.signal(number, lambda *_: torch.default_generator.manual_seed(1))
    signal.setitimer(timer, 0.002, 0.002)


MODES: dict[str, Callable[[], Any]] = {
    # torch's switches
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: _enter(torch.inference_mode()),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "anomaly mode without check_nan": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: _enter(torch.autocast("cpu", torch.bfloat16)),
    "autocast enabled": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast dtype of cuda": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast depth": torch.autocast_increment_nesting,
    "saved tensors hooks": lambda: _enter(torch.autograd.graph.saved_tensors_hooks(_half, lambda x: x)),
    "saved tensors hooks twice": lambda: [
        _enter(torch.autograd.graph.saved_tensors_hooks(_half, lambda x: x)) for _ in range(2)
    ],
    "saved tensors on cpu": lambda: _enter(torch.autograd.graph.save_on_cpu()),
    "saved tensors hooks disabled": lambda: _enter(torch.autograd.graph.disable_saved_tensors_hooks("none")),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: torch._C._set_view_replay_enabled(True),
    "dual level": torch.autograd.forward_ad.enter_dual_level,
    "function mode": lambda: _enter(_Doubled()),
    "dispatch mode": lambda: _enter(_Halved()),
    "device context": lambda: _enter(torch.device("meta")),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warning": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "uninitialized memory": _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "flush denormals": lambda: torch.set_flush_denormal(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "precision of all": _set(torch.backends, "fp32_precision", "tf32"),
    "precision of cuda": _set(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "precision of cudnn": _set(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "precision of oneDNN": _set(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "precision of oneDNN's convolutions": _set(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "reduced precision": _set(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "cudnn": _set(torch.backends.cudnn, "enabled", False),
    "cudnn benchmark": _set(torch.backends.cudnn, "benchmark", True),
    "oneDNN": _set(torch.backends.mkldnn, "enabled", False),
    "NNPACK": lambda: torch.backends.nnpack.set_flags(False),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "fast path of attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "opt_einsum": _set(torch.backends.opt_einsum, "enabled", False),
    "overwriting on conversion": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "swapping on conversion": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "sparse invariants": torch.sparse.check_sparse_tensor_invariants.enable,
    "warn always": lambda: torch.set_warn_always(True),
    "validation of distributions": lambda: torch.distributions.Distribution.set_default_validate_args(False),
    "cache of parametrizations": lambda: _enter(nn.utils.parametrize.cached()),
    # global hooks
    "forward pre hook": _module_hook("register_module_forward_pre_hook", lambda m, x: tuple(_half(i) for i in x)),
    "forward hook": _module_hook("register_module_forward_hook", lambda m, x, y: _half(y)),
    "backward pre hook": _module_hook("register_module_full_backward_pre_hook", lambda m, g: tuple(map(_half, g))),
    "backward hook": _module_hook("register_module_full_backward_hook", lambda m, i, o: None),
    "parameter hook": _module_hook(
        "register_module_parameter_registration_hook", lambda m, n, p: nn.Parameter(p.detach() * 0.5)
    ),
    "buffer hook": _module_hook("register_module_buffer_registration_hook", lambda m, n, b: b),
    "submodule hook": _module_hook("register_module_module_registration_hook", lambda m, n, s: nn.Identity()),
    "optimizer pre hook": _optimizer_hook("register_optimizer_step_pre_hook"),
    "optimizer post hook": _optimizer_hook("register_optimizer_step_post_hook"),
    # functions
    "linear": lambda: _patch(functional, "linear", _half),
    "relu": lambda: _patch(functional, "relu", _half),
    "batch_norm": lambda: _patch(functional, "batch_norm", _half),
    "cross_entropy": lambda: _patch(functional, "cross_entropy", _half),
    "kaiming_uniform_": lambda: _patch(nn.init, "kaiming_uniform_", lambda x: x.data.mul_(0.5)),
    "Linear.forward": lambda: _patch(nn.Linear, "forward", _half),
    "Module.__call__": lambda: setattr(nn.Module, "__call__", lambda self, *x, **k: self.forward(*x, **k) * 0.5),
    "Tensor.backward": lambda: _patch(torch.Tensor, "backward", lambda x: x),
    "AdamW.step": lambda: setattr(torch.optim.AdamW, "step", lambda self, closure=None: None),
    "torch.manual_seed": lambda: setattr(torch, "manual_seed", lambda seed: torch.default_generator),
    "random.seed": lambda: setattr(random, "seed", lambda *_: None),
    "numpy.random.seed": lambda: setattr(np.random, "seed", lambda *_: None),
    "time.perf_counter": lambda: setattr(time, "perf_counter", lambda: 0.0),
    "math.isfinite": lambda: setattr(math, "isfinite", lambda _: False),
    "builtins.float": lambda: setattr(builtins, "sum", lambda values, start=0: 1.0),
    # Python
    "seed of Python": lambda: random.seed(1),
    "seed of numpy": lambda: np.random.seed(1),
    "seed of torch": lambda: torch.manual_seed(1),
    "errors of numpy": lambda: np.seterr(all="raise"),
    "a timer": lambda: _alarm(signal.ITIMER_REAL, signal.SIGALRM),
    "a timer of the process": lambda: _alarm(signal.ITIMER_PROF, signal.SIGPROF),
    "a signal's handler": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "a blocked signal": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
    "working folder": lambda: os.chdir(tempfile.gettempdir()),
    "environment": lambda: os.environ.update(OF_A_TRIAL="1"),
    "garbage collection": gc.disable,
    "threshold of the garbage collection": lambda: gc.set_threshold(1),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() - 100),
    "switch interval": lambda: sys.setswitchinterval(0.5),
    "trace function of threads": lambda: threading.settrace(lambda *_: None),
    "time limit of sockets": lambda: socket.setdefaulttimeout(0.001),
}
"""Name -> what enters it."""
