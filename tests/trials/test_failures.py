"""Ends of a trial: every spelling of out of memory, and messages with nothing private in them."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

import pytest
import torch

from autoprec.errors import ApplyError, TaskError
from autoprec.policy import Policy
from autoprec.trials import failures
from autoprec.trials.failures import classify, describe, format_traceback, scrub, tail

FP32 = Policy(default="fp32")
HALF = Policy(default="fp16")


def _raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class UntoldError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:115] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("bad allocation"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("Invalid buffer size: 12.50 GiB"),
        RuntimeError("unable to allocate shared memory(shm) for file"),
        RuntimeError("DataLoader worker is killed by signal: Bus error. There is insufficient shared memory (shm)."),
        OSError(12, "Cannot allocate memory"),
        _raised_from(ValueError("could not train"), torch.OutOfMemoryError("CUDA out of memory")),
        RuntimeError("unable to mmap 4096 bytes from file: Cannot allocate memory (12)"),
    ],
    ids=lambda error: str(error)[:40],
)
@pytest.mark.parametrize("policy", [FP32, HALF], ids=["fp32", "fp16"])
def test_each_spelling_of_out_of_memory_is_known(error: Exception, policy: Policy) -> None:
    assert classify(error, policy) == "out_of_memory"


@pytest.mark.parametrize(
    ("error", "in_fp32", "in_half"),
    [
        (RuntimeError("\"fft\" not implemented for 'Half'"), "user_error", "unsupported"),
        (RuntimeError("mat1 and mat2 must have the same dtype"), "user_error", "unsupported"),
        (NotImplementedError("no such kernel"), "user_error", "unsupported"),
        (TypeError("expected scalar type Half"), "user_error", "unsupported"),
        (ApplyError("unknown module"), "user_error", "unsupported"),
        (TaskError("no batches"), "user_error", "user_error"),
        (KeyError("labels"), "user_error", "user_error"),
        (OSError("memory of an elephant"), "user_error", "user_error"),
        (UntoldError(), "user_error", "user_error"),
        (RuntimeError("CUDA error: device-side assert triggered"), "user_error", "crashed"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "user_error", "crashed"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_exception_is_the_users_own_unless_low_precision_brought_it(
    error: Exception, in_fp32: str, in_half: str
) -> None:
    assert (classify(error, FP32), classify(error, HALF)) == (in_fp32, in_half)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no file /home/anna/data/x.png here", "no file x.png here"),
        ("at ~/secret/run.py", "at run.py"),
        (r"at C:\Users\anna\run.py", "at run.py"),
        ('File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py"', 'File "torch/nn/modules/linear.py"'),
        ("ratio 3/4, and/or, http://example.org/a/b", "ratio 3/4, and/or, http://example.org/a/b"),
        ("shapes (2x3 and 4x5)", "shapes (2x3 and 4x5)"),
        ("layer1.0/conv", "layer1.0/conv"),
    ],
)
def test_absolute_paths_keep_their_last_part_alone(text: str, expected: str) -> None:
    assert scrub(text) == expected


def test_paths_in_the_working_folder_stay_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert scrub(f'File "{tmp_path}/tasks/mine.py", line 3') == 'File "tasks/mine.py", line 3'


def test_host_and_user_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna.k")
    failures._private_names.cache_clear()
    try:
        assert scrub("anna.k on gpu-box-17: annabel") == "<user> on <host>: annabel"
    finally:
        failures._private_names.cache_clear()


def test_a_traceback_has_no_absolute_path() -> None:
    try:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    except RuntimeError as error:
        text = format_traceback(error)
    assert "test_failures.py" in text
    assert os.getcwd() not in text
    assert str(Path(torch.__file__).parent) not in text


def test_a_message_is_one_line_with_the_class() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(ValueError()) == "ValueError: no message"
    assert describe(UntoldError()) == "UntoldError: no message"
    assert describe(TaskError("plain words")) == "plain words"


def test_the_tail_of_a_long_text_starts_at_a_line() -> None:
    text = "\n".join(f"line {n}" for n in range(1000))
    cut = tail(text, max_characters=100)
    assert len(cut) <= 110
    assert cut.startswith("[...]\nline ")
    assert cut.endswith("line 999")
    assert tail("short", max_characters=100) == "short"
