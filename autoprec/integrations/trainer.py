"""Transformers: a `Trainer` that trains under a policy.

    trainer = PolicyTrainer(policy="policy.json", model=model, args=args, train_dataset=data)

Needs the extras: pip install 'autoprec[hf,accelerate]'.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoprec.errors import ApplyError
from autoprec.integrations.accelerate import PolicyAccelerator
from autoprec.integrations.setting import Evaluation, PolicyLike, PolicySetting, without_extra

try:
    from transformers import Trainer
except ImportError as error:
    raise without_extra("Transformers", "hf,accelerate") from error

__all__ = ["PolicyTrainer", "PolicyTraining"]

_SECOND_SETTINGS = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


class PolicyTraining:
    """What makes a Trainer of transformers train under a policy; goes before the Trainer: `class Mine(PolicyTraining,
    Seq2SeqTrainer)`.

    The policy is applied when the model is prepared, before it is wrapped, and stays on it. The grad scaler is the
    policy's, in checkpoints too; the optimizer gets the policy's eps and amsgrad, which `TrainingArguments` cannot say.

    Args:
        policy: a `Policy`, or the path of its file.
        evaluation: "policy", or "fp32" to evaluate and predict without the policy.
        emulates: emulate half precision on a CPU; None where the policy has FP16, with a warning that says so.
        lift_half_parameters: turn trainable FP16 and BF16 parameters into FP32 masters (models of recent checkpoints
            load in BF16); else they are refused.
        arguments, others: of the Trainer.

    Raises:
        ApplyError: `TrainingArguments` have a precision of their own, or several GPUs in one process (DataParallel);
            when the training starts: the policy does not fit the model.
    """

    accelerator: Any
    args: Any

    def __init__(
        self,
        *arguments: Any,
        policy: PolicyLike,
        evaluation: Evaluation = "policy",
        emulates: bool | None = None,
        lift_half_parameters: bool = False,
        **others: Any,
    ) -> None:
        self.policy_setting = PolicySetting.of(
            policy, evaluation=evaluation, emulates=emulates, lift_half_parameters=lift_half_parameters
        )
        super().__init__(*arguments, **others)

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator, and give it the policy."""
        given = [name for name in _SECOND_SETTINGS if getattr(self.args, name, False)]
        if given:
            raise ApplyError(
                f"TrainingArguments({', '.join(f'{name}=True' for name in given)}) is a second precision setting"
                " beside the policy; leave it out"
            )
        if self.args.n_gpu > 1:
            raise ApplyError(
                f"{self.args.n_gpu} GPUs in one process are DataParallel, which no policy survives; launch with"
                " torchrun or accelerate"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        PolicyAccelerator.adopt(self.accelerator, self.policy_setting)

    def prediction_step(self, model: nn.Module, *arguments: Any, **others: Any) -> Any:
        """Evaluate one batch, under the policy or in FP32."""
        with self.policy_setting.evaluating(model):
            return super().prediction_step(model, *arguments, **others)  # type: ignore[misc]


class PolicyTrainer(PolicyTraining, Trainer):
    """Transformers' `Trainer` under a policy: `PolicyTrainer(policy="policy.json", model=model, args=args, ...)`."""
