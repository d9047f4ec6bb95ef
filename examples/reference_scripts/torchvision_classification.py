"""The shape of torchvision's reference script for classification, under a policy.

    python examples/reference_scripts/torchvision_classification.py --policy policy.json --epochs 3 --output-dir runs/tv

As there: one function an epoch, parameter groups without decay on norms, label smoothing, clipping, a moving average of
the weights, checkpoints with model, optimizer, schedule and scaler, `--resume`. Lines that differ from it are marked
`# autoprec`, and what stood there before follows `# was:`. The data are scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoprec
from autoprec.tasks.images import image_batches


def set_weight_decay(model: nn.Module, weight_decay: float, norm_weight_decay: float) -> list[dict[str, Any]]:
    """Put the parameters of norms into a group of their own."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    of_norms = {id(p) for module in model.modules() if isinstance(module, norms) for p in module.parameters()}
    return [
        {"params": [p for p in model.parameters() if id(p) not in of_norms], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) in of_norms], "weight_decay": norm_weight_decay},
    ]


def train_one_epoch(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    device: torch.device,
    args: argparse.Namespace,
    scaler: torch.amp.GradScaler,
    model_ema: AveragedModel | None = None,
) -> list[float]:
    model.train()
    losses = []
    for step, (image, target) in enumerate(batches):
        image, target = image.to(device), target.to(device)
        # was: with torch.amp.autocast("cuda", enabled=scaler is not None):
        output = model(image)  # autoprec: no autocast around it, the policy is inside
        loss = criterion(output, target)
        optimizer.zero_grad()
        # was: if scaler is not None: ... else: ...
        scaler.scale(loss).backward()  # autoprec: one path, the scaler is switched off where the policy has no FP16
        if args.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if model_ema is not None and step % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, batches: Iterator[Any], device: torch.device) -> float:
    model.eval()
    correct, total = 0, 0
    with torch.inference_mode():
        for image, target in batches:
            correct += int((model(image.to(device)).argmax(1) == target.to(device)).sum())
            total += len(target)
    return correct / total


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    args = parse(arguments)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train, held_out = image_batches("digits", image_size=args.image_size, batch_size=args.batch_size)
    model = torchvision.models.get_model(args.model, weights=None, num_classes=10).to(device)

    policy = autoprec.load_policy(args.policy)  # autoprec: instead of --amp
    autoprec.apply_policy(model, policy)  # autoprec: before DistributedDataParallel and torch.compile

    groups = set_weight_decay(model, args.weight_decay, args.norm_weight_decay)
    # was: torch.optim.AdamW(groups, lr=args.lr)
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, groups, lr=args.lr)  # autoprec
    # was: torch.amp.GradScaler() if args.amp else None
    scaler = autoprec.build_grad_scaler(policy, device=device)  # autoprec
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.lr_epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    # The copy computes under the policy too.
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["lr_scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        scaler.load_state_dict(checkpoint["scaler"])
        start_epoch = checkpoint["epoch"] + 1

    losses: list[float] = []
    emulation = autoprec.emulate() if device.type == "cpu" else contextlib.nullcontext()  # autoprec: without a GPU
    with emulation:
        for epoch in range(start_epoch, args.epochs):
            torch.manual_seed(args.seed + epoch)  # the order of this epoch, also after a resume
            losses += train_one_epoch(model, criterion, optimizer, train(), device, args, scaler, model_ema)
            schedule.step()
            with autoprec.suspend_policy(model):  # autoprec: evaluated in FP32
                accuracy = evaluate(model, held_out(), device)
            with autoprec.suspend_policy(model_ema.module):  # autoprec
                accuracy_ema = evaluate(model_ema, held_out(), device)
            print(f"epoch {epoch}  loss {losses[-1]:.4f}  accuracy {accuracy:.4f}  averaged {accuracy_ema:.4f}")
            if args.output_dir:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "lr_scheduler": schedule.state_dict(),
                    "model_ema": model_ema.state_dict(),
                    "scaler": scaler.state_dict(),
                    "epoch": epoch,
                }
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
                torch.save(checkpoint, Path(args.output_dir) / f"model_{epoch}.pth")
    return losses


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="policy.json of a search")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--norm-weight-decay", type=float, default=0.0)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--model-ema-steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output-dir", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
