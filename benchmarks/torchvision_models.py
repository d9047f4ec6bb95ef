"""Try every torchvision classification model: dry run, random policy, one step, one evaluation, removal.

    python benchmarks/torchvision_models.py [NAME ...]

Each model up to 200 million parameters runs at batch 8 and the smallest image size from 64 px that it takes, under the
emulation of a GPU's half precision. Removal has to give back outputs that are bit-identical to those before the policy.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from autoprec import Policy, apply_policy, build_grad_scaler, emulate, remove_policy
from autoprec.units import find_units

MAX_PARAMETERS = 200_000_000
BATCH_SIZE = 8
SIZES = {"inception_v3": 299, "maxvit_t": 224}
"""Image sizes of the models that do not take 64 px."""
PRECISIONS = ("fp32", "autocast", "fp16", "bf16")


@dataclass(frozen=True)
class Result:
    name: str
    image_size: int
    num_units: int
    loss: float
    bare_loss: float
    seconds: float
    problem: str = ""


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy; auxiliary heads, which show in train mode only, count .3 each as in the papers."""
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, labels)
    main, *auxiliary = output
    return F.cross_entropy(main, labels) + sum(
        0.3 * F.cross_entropy(head, labels) for head in auxiliary if head is not None
    )


def random_policy(units: Any, seed: int) -> Policy:
    """One precision for each unit at random, among those it can compute in; tied units share one."""
    rng = random.Random(seed)
    modules: dict[str, Any] = {}
    for unit in units:
        tied = next((modules[name] for name in unit.tied if name in modules), None)
        modules[unit.name] = tied or rng.choice(unit.choices)
    return Policy(default="autocast", dtype="fp16", modules=modules)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sized = {"image_size": 64} if name.startswith("vit_") else {}
        return models.get_model(name, weights=None, num_classes=10, **sized)


def try_model(name: str, *, seed: int = 0) -> Result:
    """Run one model through everything; `problem` says what went wrong."""
    start = time.perf_counter()
    model, size = build(name), SIZES.get(name, 64)
    images = torch.randn(BATCH_SIZE, 3, size, size, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(BATCH_SIZE) % 10
    units = find_units(model.train(), lambda m: m(images[:2]), try_precisions=False)
    with torch.no_grad():
        bare = model.eval()(images)
        bare_loss = float(F.cross_entropy(bare, labels))
    statistics = {key: buffer.clone() for key, buffer in model.named_buffers()}
    policy = random_policy(units, seed)
    apply_policy(model, policy)
    problem = ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = build_grad_scaler(policy, device="cpu")
    scaler.scale(loss_of(model.train()(images), labels)).backward()
    scaler.step(optimizer)
    scaler.update()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        loss = float(F.cross_entropy(model.eval()(images), labels))
    if missing:
        problem = f"no gradient: {', '.join(missing[:3])}"
    elif any(not torch.equal(value, state[key]) for key, value in model.state_dict().items()):
        problem = "the evaluation changed the state"
    remove_policy(model)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            buffer.copy_(statistics[key])
        if not torch.equal(model.eval()(images), bare):
            problem = "outputs after removal differ"
    return Result(name, size, len(units), loss, bare_loss, time.perf_counter() - start, problem)


def num_parameters(name: str) -> int:
    """Return torchvision's own count for 1,000 classes."""
    return int(next(iter(models.get_model_weights(name))).meta["num_params"])


def names() -> list[str]:
    return models.list_models(module=models)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args().names or names()
    torch.set_num_threads(2)
    print(f"{'model':22s} {'px':>4s} {'units':>5s} {'loss':>7s} {'fp32':>7s} {'s':>6s}")
    num_failed = 0
    warnings.simplefilter("ignore", FutureWarning)  # torchvision's own, about initialisation
    with emulate(), torch.random.fork_rng():
        for name in sorted(chosen, key=num_parameters):
            if num_parameters(name) > MAX_PARAMETERS:
                print(f"{name:22s} left out: {num_parameters(name) / 1e6:.0f} million parameters")
                continue
            try:
                result = try_model(name)
            except Exception as error:  # the table names whatever goes wrong
                num_failed += 1
                print(f"{name:22s} FAILED: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            verdict = result.problem or (
                "passed" if result.loss == result.loss else "passed; loss not finite under this policy"
            )
            num_failed += bool(result.problem)
            figures = f"{result.image_size:4d} {result.num_units:5d} {result.loss:7.3f} {result.bare_loss:7.3f}"
            print(f"{name:22s} {figures} {result.seconds:6.1f}  {verdict}", flush=True)
    print(f"{len(chosen)} models, {num_failed} failed")


if __name__ == "__main__":
    main()
