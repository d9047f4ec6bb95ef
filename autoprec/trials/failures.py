"""How a trial ended when it did not end well: from an exception to a kind, with its evidence and nothing private."""

from __future__ import annotations

import errno
import getpass
import os
import re
import socket
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from autoprec.errors import ApplyError, AutoprecError, PolicyError
from autoprec.policy import Policy
from autoprec.training import ScaleCollapsedError
from autoprec.trials.outcome import EndKind, NonFinite

__all__ = ["TrialEnd", "classify", "describe", "is_out_of_memory", "scrub", "tail"]

MAX_MESSAGE = 600
MAX_TRACEBACK = 6_000

_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _](?:\w+[ _])?memory|not enough memory|can(?:'|no)t allocate memory"
    r"|alloc(?:ation)?_failed|failed to allocate|hiperroroutofmemory|cudaerrormemoryallocation"
    r"|insufficient (?:shared )?memory|bad[_ ]alloc|unable to (?:mmap|allocate)|resource_exhausted|invalid buffer size"
    r"|unable to find a valid cudnn algorithm|unable to find an engine to execute this computation"
    r"|could(?: not|n't) find (?:a )?valid cudnn (?:algorithm|engine)",
    re.IGNORECASE,
)
"""Spellings seen in torch's CUDA, ROCm, MPS, XPU and CPU allocators, its data loaders, and in cuBLAS, cuDNN and the C++
runtime. cuDNN says that no algorithm was found where none got its workspace."""

_STICKY = re.compile(
    r"CUDA error|CUDA driver error|HIP error|device-side assert|illegal memory access|misaligned address"
    r"|unspecified launch failure"
)
"""After these a process's device answers nothing any more; the kernels say them, whatever asked."""

_ABOUT_PRECISION = re.compile(
    r"not implemented for|same dtype|expected scalar type|scalar type|dtype|Half|BFloat16|float16|bfloat16"
    r"|primitive descriptor|unsafe to autocast|autocast|FP16|cuFFT|closure",
)


class TrialEnd(Exception):  # noqa: N818  (an end, which need not be an error)
    """Ends a trial with a kind that the training itself found."""

    def __init__(self, kind: EndKind, message: str, *, non_finite: NonFinite | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.non_finite = non_finite


def classify(error: BaseException, policy: Policy) -> EndKind:
    """Say which kind of end an exception is, under this policy.

    Where the policy uses no low precision, whatever the task raises is the user's own error.
    """
    if isinstance(error, TrialEnd):
        return error.kind
    if isinstance(error, ScaleCollapsedError):
        return "scale_collapsed"
    if is_out_of_memory(error):
        return "out_of_memory"
    if not policy.low_precisions:
        return "user_error"
    if _STICKY.search(_text(error)):
        return "crashed"
    if isinstance(error, ApplyError | PolicyError | NotImplementedError):
        return "unsupported"
    if isinstance(error, AutoprecError):
        return "user_error"
    about_precision = isinstance(error, RuntimeError) or _ABOUT_PRECISION.search(_text(error)) is not None
    return "unsupported" if about_precision else "user_error"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell memory errors by their type and by every spelling that the libraries under torch use."""
    for link in _chain(error):
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, OSError) and link.errno == errno.ENOMEM:
            return True
        if isinstance(link, RuntimeError) and _OUT_OF_MEMORY.search(_text(link)) is not None:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it came from, where the code that caught them raised another."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _text(error: BaseException) -> str:
    """Return the exception's text; one whose own code fails has none."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def describe(error: BaseException, model: nn.Module | None = None) -> str:
    """Return one line: the error's own first line, its class, and the module of `model` that it came from."""
    text = _text(error)
    first = text.splitlines()[0] if text else "no message"
    if not isinstance(error, AutoprecError | TrialEnd):
        first = f"{type(error).__name__}: {first}"
    place = _module_name(error, model) if model is not None else None
    return scrub(first + (f" (in module {place!r})" if place else ""))[:MAX_MESSAGE]


def format_traceback(error: BaseException) -> str:
    """Return the traceback without private paths, its last part where it is long."""
    return tail(scrub("".join(traceback.format_exception(error))), max_characters=MAX_TRACEBACK)


def _module_name(error: BaseException, model: nn.Module) -> str | None:
    names = {id(module): name for name, module in model.named_modules()}
    place = None
    # The first frame is the one that caught the error: reading its locals would tie the error to itself, and keep all
    # that its frames hold alive until the next collection of cycles.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    for frame, _ in traceback.walk_tb(inner):
        name = names.get(id(frame.f_locals.get("self")))
        place = name or place
    return place


def tail(text: str, *, max_characters: int) -> str:
    """Return the last part of `text`, from the start of a line where one is near."""
    if len(text) <= max_characters:
        return text
    cut = text[-max_characters:]
    return "[...]\n" + cut[cut.find("\n", 0, 400) + 1 :]


def scrub(text: str) -> str:
    """Remove what is private: absolute paths keep their last part (or the part inside the project), names of the
    host and the user become <host> and <user>."""
    text = _ABSOLUTE_PATH.sub(lambda match: _short_path(match.group()), text)
    for name, shown in _private_names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text


_ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/])(?:/|[A-Za-z]:\\|~[/\\])[\w.+@%-]+(?:[/\\][\w.+@%-]+)*")


def _short_path(path: str) -> str:
    path = path.replace("\\", "/")
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in path:
            return path.rpartition(mark)[2]
    try:
        working = str(Path.cwd())
    except FileNotFoundError:  # somebody removed it
        working = "/"
    if working not in ("/", os.path.expanduser("~")) and path.startswith(working + "/"):
        return path[len(working) + 1 :]
    return path.rpartition("/")[2]


@lru_cache(maxsize=1)
def _private_names() -> tuple[tuple[str, str], ...]:
    """Host and user; names too common to be private (or to be told from words) stay."""
    found = []
    for read, shown in ((socket.gethostname, "<host>"), (getpass.getuser, "<user>")):
        try:
            name = read()
        except (OSError, KeyError, ImportError):
            continue
        if len(name) >= 4 and name not in ("root", "localhost", "user", "main", "test", "train", "torch"):
            found.append((name, shown))
    home = os.path.expanduser("~").rpartition("/")[2]
    if len(home) >= 4 and home not in ("root", "home"):
        found.append((home, "<user>"))
    return tuple(found)
