"""The shape of timm's train.py, under a policy: pip install 'autoprec[timm]'.

    python examples/reference_scripts/timm_train.py --policy policy.json --epochs 3 --output runs/timm

As there: a task that computes the loss, `create_optimizer_v2`, timm's schedule by updates, a loss scaler that is called
with loss and optimizer, accumulation, a moving average of the weights, `CheckpointSaver` and `resume_checkpoint`. Lines
that differ from it are marked `# autoprec`, and what stood there before follows `# was:`. The data are scikit-learn's
digits.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, NativeScaler
from torch import nn

import autoprec
from autoprec.apply import configure_optimizer
from autoprec.tasks.images import image_batches


class PolicyScaler(NativeScaler):  # autoprec: timm's scaler around the policy's grad scaler
    def __init__(self, policy: autoprec.Policy, device: torch.device) -> None:
        self._scaler = autoprec.build_grad_scaler(policy, device=device)


def train_one_epoch(
    epoch: int,
    task: ClassificationTask,
    batches: Iterator[Any],
    num_batches: int,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    args: argparse.Namespace,
    lr_scheduler: Any,
    loss_scaler: NativeScaler,
) -> list[float]:
    task.train()
    losses = []
    num_updates = epoch * (num_batches // args.grad_accum_steps)
    optimizer.zero_grad()
    for index, (image, target) in zip(range(num_batches), batches, strict=False):
        need_update = (index + 1) % args.grad_accum_steps == 0
        # was: with amp_autocast(): result = task(image, target)
        result = task(image.to(device), target.to(device))  # autoprec: no autocast, the policy is inside the model
        losses.append(result["loss"].item())
        loss_scaler(
            result["loss"] / args.grad_accum_steps,
            optimizer,
            clip_grad=args.clip_grad,
            clip_mode="norm",
            parameters=model_parameters(task.trainable_module),
            need_update=need_update,
        )
        if need_update:
            num_updates += 1
            optimizer.zero_grad()
            task.update_ema(step=num_updates)
            lr_scheduler.step_update(num_updates=num_updates)
    return losses


def validate(model: nn.Module, batches: Iterator[Any], device: torch.device) -> float:
    model.eval()
    correct, total = 0, 0
    with torch.inference_mode():
        for image, target in batches:
            correct += int((model(image.to(device)).argmax(1) == target.to(device)).sum())
            total += len(target)
    return correct / total


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each micro-batch."""
    args = parse(arguments)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train, held_out = image_batches("digits", image_size=args.image_size, batch_size=args.batch_size)
    num_batches = sum(1 for _ in train()) // args.grad_accum_steps * args.grad_accum_steps
    torch.manual_seed(args.seed)
    model = timm.create_model(args.model, num_classes=10, in_chans=3, **_input_size(args)).to(device)

    policy = autoprec.load_policy(args.policy)  # autoprec: instead of --amp and --amp-dtype
    autoprec.apply_policy(model, policy)  # autoprec: before the task compiles or distributes it

    optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
    configure_optimizer(policy, optimizer)  # autoprec: the policy's eps and amsgrad
    # was: amp_autocast = partial(torch.autocast, ...); loss_scaler = NativeScaler(device=device.type)
    loss_scaler = PolicyScaler(policy, device)  # autoprec
    task = ClassificationTask(model, criterion_kwargs={"smoothing": 0.1}, device=device, verbose=False)
    task.setup_ema(decay=0.98)
    updates_per_epoch = num_batches // args.grad_accum_steps
    lr_scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=args.lr_epochs, step_on_epochs=False, updates_per_epoch=updates_per_epoch
    )

    start_epoch = 0
    if args.resume:
        start_epoch = resume_checkpoint(
            model, args.resume, optimizer=optimizer, loss_scaler=loss_scaler, log_info=False
        )
        averaged = torch.load(args.resume, map_location="cpu", weights_only=True)["state_dict_ema"]
        task.load_checkpoint_state(averaged, ema=True)
        lr_scheduler.step_update(start_epoch * updates_per_epoch)
    saver = None
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        saver = CheckpointSaver(model, optimizer, amp_scaler=loss_scaler, task=task, checkpoint_dir=args.output)

    losses: list[float] = []
    emulation = autoprec.emulate() if device.type == "cpu" else contextlib.nullcontext()  # autoprec: without a GPU
    with emulation:
        for epoch in range(start_epoch, args.epochs):
            torch.manual_seed(args.seed + epoch)  # the order of this epoch, also after a resume
            losses += train_one_epoch(
                epoch, task, train(), num_batches, optimizer, device, args, lr_scheduler, loss_scaler
            )
            with autoprec.suspend_policy(model):  # autoprec: validated in FP32
                accuracy = validate(model, held_out(), device)
            print(f"epoch {epoch}  loss {losses[-1]:.4f}  accuracy {accuracy:.4f}")
            if saver is not None:
                saver.save_checkpoint(epoch, metric=accuracy)
    return losses


def _input_size(args: argparse.Namespace) -> dict[str, int]:
    return {"img_size": args.image_size} if "vit" in args.model else {}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="policy.json of a search")
    parser.add_argument("--model", default="test_vit")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
