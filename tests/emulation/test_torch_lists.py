"""torch's own lists of what CUDA autocast does, which its wheel carries for its own tests, hold under emulation."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autoprec

LISTS = Path(torch.__file__).parent / "testing" / "_internal" / "autocast_test_lists.py"
RESULTS = {
    "torch_fp16": torch.float16,
    "torch_fp32": torch.float32,
    "torch_need_autocast_promote": torch.float32,
    "torch_expect_builtin_promote": None,
    "methods_fp16": torch.float16,
    "methods_fp32": torch.float32,
    "methods_expect_builtin_promote": None,
    "nn_fp16": torch.float16,
    "nn_fp32": torch.float32,
    "linalg_fp16": torch.float16,
}
"""List -> the dtype of its operators' results; None where each entry says its own."""


NOT_HERE = {
    "cudnn_convolution": "has no kernel on a CPU",
    "cudnn_convolution_transpose": "has no kernel on a CPU",
    "einsum": "the list gives matrices for an equation of four indices",
    "equal": "gives a Python bool, and no tensor",
}
"""What the list names and nothing can be seen of, with the reason."""


def load_lists() -> Any:
    """Run torch's file without the two imports of its test harness, which needs a package of its own."""
    text = re.sub(r"^from torch\.testing.*$", "", LISTS.read_text(), flags=re.MULTILINE)
    namespace: dict[str, Any] = {"TEST_WITH_ROCM": False, "TestCase": object}
    exec(compile(text, str(LISTS), "exec"), namespace)
    torch.manual_seed(0)
    return namespace["AutocastTestLists"](torch.device("cpu"))


def entries() -> list[Any]:
    lists, found, seen = load_lists(), [], {}
    for kind in RESULTS:
        for entry in getattr(lists, kind):
            if entry[0] in NOT_HERE:
                continue
            name = f"{kind}-{entry[0]}"
            seen[name] = seen.get(name, 0) + 1
            found.append(pytest.param(kind, entry, id=f"{name}-{seen[name]}"))
    return found


def call(kind: str, entry: Any) -> Any:
    name, args = entry[0], entry[1]
    if kind.startswith("methods"):
        return getattr(args[0], name)(*args[1:])
    if name == "einsum":
        return torch.einsum(entry[1], *entry[2])
    owner = {"nn": torch._C._nn, "linalg": torch._C._linalg}.get(kind.partition("_")[0], torch)
    keywords = next((part for part in entry[2:] if isinstance(part, dict)), {})
    function = getattr(owner, name, None) or getattr(torch.nn.functional, name, None) or getattr(torch._VF, name)
    return function(*args, **keywords)


@pytest.mark.parametrize(("kind", "entry"), entries())
def test_an_operator_gives_the_dtype_that_torchs_list_says(kind: str, entry: Any) -> None:
    expected = RESULTS[kind] or next(part for part in entry[2:] if isinstance(part, torch.dtype))
    with warnings.catch_warnings(), autoprec.emulate(), torch.autocast("cpu", dtype=torch.float16):
        warnings.simplefilter("ignore")
        result = call(kind, entry)
    tensors = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]
    assert tensors
    assert {t.dtype for t in tensors if t.is_floating_point() or expected is torch.bool} == {expected}
