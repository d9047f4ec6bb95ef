"""Try models by name: a search's dry run, a random policy of what it leaves, a training step, an evaluation, removal.

    python benchmarks/named_models.py [NAME ...]

NAME is what `autoprec search --model` takes; without one, every family in turn: all of torchvision's classifiers up to
200 million parameters and its segmentation models, all of timm's `test_*` architectures, and architectures of
transformers from small configurations. Each trains on its own data, images at the smallest size from 64 px that the
model takes, under the emulation of a GPU's half precision. Removal has to give back outputs that are bit-identical to
those before the policy. A family whose package is missing is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchvision import models

from autoprec import Policy, apply_policy, build_grad_scaler, emulate, remove_policy
from autoprec.policy import Precision
from autoprec.tasks.batches import tensors_of
from autoprec.tasks.named import named_task
from autoprec.tasks.networks import MODEL_NAMES, SEGMENTATION_NAMES, SMALLEST_IMAGE
from autoprec.tasks.protocol import Task
from autoprec.units import Units, find_units

MAX_PARAMETERS = 200_000_000
BATCH_SIZE = 8
IMAGE_SIZE = 64
TEXT_ARCHITECTURES = (
    "albert", "bart", "bert", "bloom", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "esm",
    "falcon", "fnet", "funnel", "gemma", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "mamba", "mistral",
    "mixtral", "mobilebert", "modernbert", "mpnet", "olmo2", "opt", "phi3", "qwen2", "qwen3", "roberta", "roformer",
    "smollm3", "squeezebert", "xlm-roberta",
)  # fmt: skip
IMAGE_ARCHITECTURES = (
    "beit", "convnext", "convnextv2", "deit", "dinov2", "levit", "mobilenet_v2", "mobilevit",
    "poolformer", "pvt", "regnet", "resnet", "segformer", "swinv2", "vit",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    name: str
    num_units: int
    loss: float
    bare_loss: float
    seconds: float
    problem: str = ""


def build_task(name: str) -> Task:
    plain = name.removeprefix("torchvision:")
    is_text = name.startswith("hf:") and name.removeprefix("hf:") not in IMAGE_ARCHITECTURES
    if is_text or (":" not in name and plain not in (*MODEL_NAMES, *SEGMENTATION_NAMES)):
        return named_task(name, batch_size=BATCH_SIZE)
    smallest = next((size for prefix, size in SMALLEST_IMAGE.items() if plain.startswith(prefix)), IMAGE_SIZE)
    size = max(IMAGE_SIZE, smallest)
    return named_task(name, batch_size=BATCH_SIZE, image_size=size, target_image_size=size)


def random_policy(units: Units, seed: int) -> Policy:
    """One precision for each unit at random, among those it can compute in; tied units share one.

    As in a search, code between the units that autocast cannot run is FP32.
    """
    rng = random.Random(seed)
    fp32_code = [name for name, refused in units.composites.items() if "autocast" in refused]
    modules: dict[str, Precision] = dict.fromkeys((name for name in fp32_code if name), "fp32")
    for unit in units:
        tied = next((modules[name] for name in unit.tied if name in modules), None)
        modules[unit.name] = tied or rng.choice(unit.choices)
        modules |= dict.fromkeys(unit.tied, modules[unit.name])  # layers that hold its weight and are never called, too
    return Policy(default="fp32" if "" in fp32_code else "autocast", dtype="fp16", modules=modules)


@contextmanager
def kept_outputs(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Keep the tensors that the model returns."""
    found: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, args, output: found.extend(tensors_of(output)))
    try:
        yield found
    finally:
        handle.remove()


def evaluate(model: nn.Module, task: Task, batch: Any) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and the model's outputs on a held-out batch."""
    assert task.evaluate is not None
    with torch.no_grad(), kept_outputs(model.eval()) as outputs:
        loss, _ = task.evaluate(model, batch)
    return float(loss), outputs


def try_model(name: str, *, seed: int = 0) -> Result:
    """Run one model through everything; `problem` says what went wrong."""
    start = time.perf_counter()
    task = build_task(name)
    torch.manual_seed(seed)
    model = task.model().train()
    batch, held_out = next(iter(task.train_batches())), next(iter(task.eval_batches()))
    units = find_units(model, lambda m: task.loss(m, batch))
    used = gets_gradients(model, task, batch)
    settle_statistics(model, task, batch)
    bare_loss, bare = evaluate(model, task, held_out)
    statistics = {key: buffer.clone() for key, buffer in model.named_buffers()}
    policy = random_policy(units, seed)
    apply_policy(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = build_grad_scaler(policy, device="cpu")
    scaler.scale(task.loss(model.train(), batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    missing = [n for n, p in model.named_parameters() if n in used and p.grad is None]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    loss, _ = evaluate(model, task, held_out)
    problem = ""
    if missing:
        problem = f"no gradient: {', '.join(missing[:3])}"
    elif any(not torch.equal(value, state[key]) for key, value in model.state_dict().items()):
        problem = "the evaluation changed the state"
    remove_policy(model)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            buffer.copy_(statistics[key])
    after = evaluate(model, task, held_out)[1]
    if len(after) != len(bare) or not all(torch.equal(a, b) for a, b in zip(after, bare, strict=True)):
        problem = "outputs after removal differ"
    return Result(name, len(units), loss, bare_loss, time.perf_counter() - start, problem)


def settle_statistics(model: nn.Module, task: Task, batch: Any) -> None:
    """Give norms the statistics of the batch: with those of the start a deep model may evaluate to 1e12 in FP32."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        task.loss(model.train(), batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def gets_gradients(model: nn.Module, task: Task, batch: Any) -> set[str]:
    """Return the parameters that the bare model trains; it is left as it was."""
    statistics = {key: buffer.clone() for key, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        task.loss(model, batch).backward()
    used = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            buffer.copy_(statistics[key])
    return used


def families() -> dict[str, list[str]]:
    """Return the names that are tried, by family; one whose package is missing has none."""
    known = {"torchvision": sorted(MODEL_NAMES, key=num_parameters), "segmentation": list(SEGMENTATION_NAMES)}
    known["timm"] = timm_names()
    has_transformers = importlib.util.find_spec("transformers") is not None
    names = [f"hf:{name}" for name in (*TEXT_ARCHITECTURES, *IMAGE_ARCHITECTURES)]
    return known | {"transformers": names if has_transformers else []}


def timm_names() -> list[str]:
    if importlib.util.find_spec("timm") is None:
        return []
    import timm

    return [f"timm:{name}" for name in timm.list_models("test_*")]


def num_parameters(name: str) -> int:
    """Return torchvision's own count for 1,000 classes."""
    return int(next(iter(models.get_model_weights(name))).meta["num_params"])


def report(name: str) -> str:
    """Try a model and print its line; return passed, FAILED or left out."""
    if name in MODEL_NAMES and num_parameters(name) > MAX_PARAMETERS:
        print(f"{name:36s} left out: {num_parameters(name) / 1e6:.0f} million parameters")
        return "left out"
    try:
        result = try_model(name)
    except Exception as error:  # the table names whatever goes wrong
        print(f"{name:36s} FAILED: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return "FAILED"
    finite = "" if result.loss == result.loss else "; loss not finite under this policy"
    verdict = f"FAILED: {result.problem}" if result.problem else f"passed{finite}"
    figures = f"{result.num_units:5d} {result.loss:7.3f} {result.bare_loss:7.3f} {result.seconds:6.1f}"
    print(f"{name:36s} {figures}  {verdict}", flush=True)
    return "FAILED" if result.problem else "passed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")  # torchvision's and transformers' own, about initialisation
    num_failed = 0
    print(f"{'model':36s} {'units':>5s} {'loss':>7s} {'fp32':>7s} {'s':>6s}")
    for family, members in ({"named": names} if names else families()).items():
        with emulate(), torch.random.fork_rng():
            counts = Counter(report(name) for name in members)
        num_failed += counts["FAILED"]
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        print(f"-- {family}: {told or 'its package is not installed'}", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
