"""A small real network whose policies can all be measured: four products, three norms, trained on images of digits.

    python benchmarks/small_network.py          # measures every policy and writes data/small_network.json

A product in FP16 is the same as under autocast, a LayerNorm is not: 2^4 x 3^3 = 432 policies, and the arms. The wide
layer's outliers, squared, exceed FP16, as those of large transformers do: the norm behind it must not be in half.
Accuracy and loss are emulated (16 steps of a network 96 wide); memory is computed and throughput predicted for an A100
at batch 8192 and a width of 1024, where products are bound by arithmetic: 96 wide, FP32 is the fastest.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import torch
from torch import nn

from autoprec.policy import Policy
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.runner import run_trial

DATA = Path(__file__).parent / "data" / "small_network.json"
WIDTH, TARGET_WIDTH = 96, 1024
OUTLIERS = 1000.0
"""Factor on the wide layer's weights: outputs of some hundreds, squared beyond 65504."""
SETTINGS = TrialSettings(seed=0, warmup_steps=4, measured_steps=12, batchnorm_batches=0)


class SmallNetwork(nn.Module):
    """A residual block of products and norms with squared ReLU, and a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Linear(64, width), nn.LayerNorm(width)
        self.wide, self.norm2 = nn.Linear(width, 4 * width), nn.LayerNorm(4 * width)
        self.narrow, self.norm3 = nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        with torch.no_grad():
            self.wide.weight.mul_(OUTLIERS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.stem(images.flatten(1)))
        x = x + self.narrow(self.norm2(torch.relu(self.wide(x)) ** 2))
        return self.head(self.norm3(x))


def task() -> Task:
    """Return the training task: 8x8 images of digits, 1,400 to train and 397 held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1400], order[1400:]

    def batches(chosen: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(images[part], labels[part]) for part in chosen.split(64)]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).float().mean()

    target = TargetShape(
        make_batch=lambda: (torch.zeros(8192, 8, 8), torch.zeros(8192, dtype=torch.long)),
        batch_size=8192,
        description=f"8192 x 8 x 8, {TARGET_WIDTH} wide",
        model=lambda: SmallNetwork(TARGET_WIDTH),
    )
    return Task(
        name="small network",
        model=SmallNetwork,
        train_batches=batches(train),
        eval_batches=batches(held_out),
        loss=loss,
        metric=accuracy,
        target=target,
    )


def plan() -> SearchPlan:
    return prepare_search(task(), trial=SETTINGS, settings=SearchSettings(space="default", dtype="fp16"))


def every_policy(of: SearchPlan) -> dict[str, Policy]:
    """Return each policy that differs in effect, scaler and optimizer at their defaults, and the arms."""
    parameters = of.parameters
    free = parameters.free_decisions
    found = {parameters.key(arm.policy): arm.policy for arm in of.arms}
    for choices in itertools.product(*(decision.choices for decision in free)):
        chosen = {decision.name: choice for decision, choice in zip(free, choices, strict=True)}
        policy = parameters.policy(parameters.values(lambda decision, chosen=chosen: chosen[decision.name]))
        found.setdefault(parameters.key(policy), policy)
    return found


def main() -> None:
    torch.set_num_threads(1)
    of, started = plan(), time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    policies = every_policy(of)
    for number, (key, policy) in enumerate(policies.items(), start=1):
        outcomes[key] = run_trial(of.task, policy, SETTINGS)
        if number % 50 == 0:
            print(f"{number} of {len(policies)} policies, {time.perf_counter() - started:.0f} s", flush=True)
    DATA.parent.mkdir(exist_ok=True)
    rows = (f"{json.dumps(key)}: {json.dumps(row(outcome))}" for key, outcome in outcomes.items())
    DATA.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    kinds = {kind: sum(o.kind == kind for o in outcomes.values()) for kind in {o.kind for o in outcomes.values()}}
    print(f"{len(outcomes)} policies measured in {time.perf_counter() - started:.0f} s: {kinds}")


def row(outcome: Outcome) -> dict[str, object]:
    """Keep what a search reads of an outcome."""
    kept = {"kind", "peak_memory_bytes", "throughput_samples_per_second", "accuracy", "eval_loss", "first_non_finite"}
    return outcome.model_dump(mode="json", include={*kept, "num_steps_taken", "num_steps_skipped"}, exclude_none=True)


if __name__ == "__main__":
    main()
