"""A policy as a setting of a framework: which, on what, evaluated how, and emulated where there is no GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from autoprec.apply import applied_policy, apply_policy, suspend_policy
from autoprec.apply.structure import unwrap
from autoprec.emulation import emulate
from autoprec.errors import ApplyError, PrecisionWarning, UsageError, did_you_mean
from autoprec.policy import Policy, load_policy

__all__ = ["Evaluation", "PolicyLike", "PolicySetting", "device_of", "without_extra"]

PolicyLike = Policy | str | os.PathLike[str]
"""A policy, or the path of its file."""
Evaluation = Literal["policy", "fp32"]


def without_extra(framework: str, extra: str) -> ImportError:
    """Return the error of a module whose framework is not installed."""
    return ImportError(f"{framework} is not installed; install it with: pip install 'autoprec[{extra}]'")


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's parameters are; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@dataclass
class PolicySetting:
    """What a person says to a framework, and what follows from it.

    Attributes:
        policy: a `Policy`, or the path of its file.
        evaluation: "policy" evaluates as it trains, "fp32" suspends the policy meanwhile.
        emulates: compute half precision on a CPU by autoprec's emulation; None where the policy has FP16.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters; else they are refused.
    """

    policy: Policy
    evaluation: Evaluation = "policy"
    emulates: bool | None = None
    lift_half_parameters: bool = False
    _has_told: bool = field(default=False, init=False)

    @classmethod
    def of(cls, policy: PolicyLike, *, evaluation: str = "policy", **others: Any) -> PolicySetting:
        """Read and check what was said.

        Raises:
            UsageError: `evaluation` is neither "policy" nor "fp32".
            PolicyError: no such policy file, or not a policy.
        """
        if evaluation not in get_args(Evaluation):
            allowed = ", ".join(get_args(Evaluation))
            raise UsageError(
                f"evaluation is {evaluation!r}; allowed: {allowed}{did_you_mean(evaluation, get_args(Evaluation))}"
            )
        loaded = policy if isinstance(policy, Policy) else load_policy(policy)
        return cls(loaded, evaluation=evaluation, **others)  # type: ignore[arg-type]

    def install(self, model: nn.Module) -> bool:
        """Apply the policy, unless it is there already; return whether it was applied now.

        Raises:
            ApplyError: another policy is there (a second precision setting), or the policy does not fit.
        """
        found = applied_policy(model)
        if found == self.policy:
            return False
        if found is not None:
            raise ApplyError(
                "the model has another policy than the framework was given: two precision settings;"
                " remove_policy(model) first, or give both the same policy"
            )
        apply_policy(model, self.policy, lift_half_parameters=self.lift_half_parameters)
        return True

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward or a backward: the emulation where it is asked for, else nothing.

        Raises:
            ApplyError: autocast is on around it, a second precision setting.
        """
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            raise ApplyError(
                "torch.autocast is on around the training step: a second precision setting; the policy brings its own"
                " autocast where it wants it"
            )
        if not self.emulates_on(device):
            return nullcontext()
        self._tell()
        return emulate()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate under the policy or, where that was asked for, without it."""
        if self.evaluation == "policy" or applied_policy(model) is None:
            yield
            return
        with suspend_policy(unwrap(model)):
            yield

    def emulates_on(self, device: torch.device) -> bool:
        """Whether a forward on the device is emulated."""
        wanted = "fp16" in self.policy.low_precisions if self.emulates is None else self.emulates
        return wanted and device.type == "cpu" and bool(self.policy.low_precisions)

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            formats = " and ".join(name.upper() for name in sorted(self.policy.low_precisions))
            message = (
                f"half precision ({formats}) on a CPU is emulated here: FP32 inside, rounded once to half, with CUDA's"
                " autocast rules; no other format is put in its place, and its speed says nothing of a GPU"
            )
            warnings.warn(message, PrecisionWarning, stacklevel=4)
