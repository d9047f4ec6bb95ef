"""torch's ZeroRedundancyOptimizer with a policy's optimizer settings: states sharded, parameters replicated by DDP.

model = DistributedDataParallel(autoprec.apply_policy(model, policy))
optimizer = build_zero_optimizer(policy, torch.optim.AdamW, model.parameters(), lr=1e-3)
scaler = autoprec.build_grad_scaler(policy)             # the loop stays what it was
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from autoprec.apply.optimizers import chosen_settings
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Policy
from autoprec.training import list_dtypes, low_precision_parameters, needs_closure

__all__ = ["PolicyZeroOptimizer", "build_zero_optimizer"]


class PolicyZeroOptimizer(ZeroRedundancyOptimizer):
    """torch's own, which keeps what a policy decides when a state with other settings is loaded.

    Attributes:
        kept: for each parameter group, the settings that are the policy's.
    """

    kept: list[dict[str, Any]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a consolidated state, on every process; what is given is left as it is."""
        groups = state_dict["param_groups"]
        changed = [
            f"{key} {group.get(key)} -> {value}"
            for group, own in zip(groups, self.kept, strict=True)
            for key, value in own.items()
            if group.get(key) != value
        ]
        states = dict(state_dict["state"])
        for group, own in zip(groups, self.kept, strict=True):
            if own.get("amsgrad"):
                states |= {index: _with_amsgrad(states[index]) for index in group["params"] if index in states}
        own_groups = [{**group, **own} for group, own in zip(groups, self.kept, strict=True)]
        super().load_state_dict({**state_dict, "state": states, "param_groups": own_groups})
        if changed:
            message = f"kept the policy's optimizer settings: {', '.join(dict.fromkeys(changed))}"
            warnings.warn(message, PrecisionWarning, stacklevel=2)


def build_zero_optimizer(
    policy: Policy,
    optimizer: type[torch.optim.Optimizer],
    params: Iterable[Any],
    *,
    process_group: Any = None,
    parameters_as_bucket_view: bool = False,
    **settings: Any,
) -> PolicyZeroOptimizer:
    """Build `optimizer(params, **settings)` sharded over the process group, as `build_optimizer` builds one.

    The loop, the grad scaler and clipping are those of DDP. Every process gets the same parameters in the same order.

    Raises:
        ApplyError: no process group; parameters that fully_shard has sharded already, or that are no FP32 masters; an
            optimizer with a closure; `overlap_with_ddp`, which steps where no grad scaler can skip.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ApplyError("ZeroRedundancyOptimizer shards over a process group, and there is none; init_process_group")
    if settings.pop("overlap_with_ddp", False):
        raise ApplyError("overlap_with_ddp steps inside DDP's backward pass, where no grad scaler can skip a step")
    if needs_closure(optimizer):
        raise ApplyError(f"{optimizer.__name__} evaluates the loss in a closure, which cannot be sharded")
    params = list(params)
    _check_parameters(params, optimizer, settings)
    chosen = chosen_settings(policy, optimizer, params, settings)
    built = PolicyZeroOptimizer(
        params,
        optimizer_class=optimizer,
        process_group=process_group,
        parameters_as_bucket_view=parameters_as_bucket_view,
        **settings,
        **chosen,
    )
    built.kept = [{key: group[key] for key in chosen} for group in built.param_groups]
    return built


def _check_parameters(params: list[Any], optimizer: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    copies = [dict(each) if isinstance(each, dict) else each for each in params]
    plain = optimizer(copies, **settings)  # the class's own checks, and groups in one form
    if any(isinstance(p, DTensor) for group in plain.param_groups for p in group["params"]):
        raise ApplyError("the parameters are sharded by fully_shard, and so are their states; use build_optimizer")
    low = low_precision_parameters(optimizers=[plain])
    if low:
        raise ApplyError(f"trainable parameters must be FP32 masters, found {list_dtypes(low)}")


def _with_amsgrad(state: dict[str, Any]) -> dict[str, Any]:
    """A state saved without amsgrad has no maximum yet: it starts from the second moment that is there."""
    if "exp_avg_sq" in state and "max_exp_avg_sq" not in state:
        return {**state, "max_exp_avg_sq": state["exp_avg_sq"].clone()}
    return state
