"""Train a torchvision model on scikit-learn's digits under a policy.json: an ordinary PyTorch loop.

    python examples/train_with_policy.py --policy runs/resnet18-.../policy.json
    python examples/train_with_policy.py --fp32

The four lines that a training of your own needs are marked with `# autoprec`.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits

import autoprec


def digits(image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's 1,797 digits as images in [-1, 1], shape (n, 3, size, size), and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(image_size, image_size), mode="bilinear")
    return images.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(data.target)


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        correct = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(128), labels.split(128), strict=True)
        )
    model.train()
    return correct / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", help="policy.json of a search; without one the training is FP32")
    parser.add_argument("--fp32", action="store_true", help="ignore the policy and train in FP32")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    images, labels = digits(args.image_size)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[360:], order[:360]
    model = torchvision.models.get_model(args.model, num_classes=args.num_classes).to(device)

    policy = autoprec.Policy(default="fp32")
    if args.policy and not args.fp32:
        policy = autoprec.load_policy(args.policy)  # autoprec
    autoprec.apply_policy(model, policy)  # autoprec
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, model.parameters(), lr=1e-3)  # autoprec
    scaler = autoprec.build_grad_scaler(policy, device=device)  # autoprec

    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=args.steps)
    batches = torch.Generator().manual_seed(args.seed)
    # Without a GPU, FP16 is emulated; on one, this line does nothing.
    with autoprec.emulate() if device.type == "cpu" else contextlib.nullcontext():
        for step in range(args.steps):
            picked = train[torch.randint(len(train), (args.batch_size,), generator=batches)]
            x, y = images[picked].to(device), labels[picked].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:  # a step with inf or NaN gradients was skipped and lowered the scale
                schedule.step()
            if step % 50 == 0 or step == args.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.4f}  scale {scaler.get_scale():g}", flush=True)
    with autoprec.suspend_policy(model):
        held_out_accuracy = accuracy(model, images[held_out].to(device), labels[held_out].to(device))
    print(f"held-out accuracy {held_out_accuracy:.4f} (evaluated in FP32)")


if __name__ == "__main__":
    main()
