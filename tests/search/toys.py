"""A tiny task and a measurement that computes its outcome from the policy alone: whole searches take seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from autoprec.policy import Number, Policy, parents_of, resolve_precisions
from autoprec.search.pipeline import SearchResult
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.tasks.protocol import Task
from autoprec.trials.outcome import Outcome, TrialSettings


class TinyNet(nn.Module):
    """Two equal blocks of convolution, normalisation and activation, a LayerNorm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[_Block() for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x).mean(dim=(2, 3))))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.bn(self.conv(x)))


class Chain(nn.Module):
    """Linear layers of growing width, a LayerNorm behind each: more policies than a search ever sees."""

    def __init__(self, num_layers: int = 10) -> None:
        super().__init__()
        widths = range(4, 4 + num_layers)
        self.layers = nn.ModuleList([nn.Linear(width, width + 1) for width in widths])
        self.norms = nn.ModuleList([nn.LayerNorm(width + 1) for width in widths])
        self.head = nn.Linear(4 + num_layers, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean(dim=(2, 3))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return self.head(x)


def tiny_task(**changes: object) -> Task:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 4, 4, 4, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(2)]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def share_correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).float().mean()

    settings = {"name": "tiny", "model": TinyNet, "train_batches": batches, "eval_batches": batches, "loss": loss}
    return Task(**{**settings, "metric": share_correct, "metric_name": "score", **changes})


class FakeMeasure:
    """Outcomes by rule: each unit in half saves memory and time; accuracy is FP32's plus `effect(policy)` and noise.

    `calls` counts the runs by policy; `fail` turns a policy into another kind of outcome; `stop_at` raises
    KeyboardInterrupt at that call.
    """

    def __init__(
        self,
        *,
        effect: Callable[[Policy], float] = lambda policy: 0.0,
        noise: float = 0.0,
        fail: Callable[[Policy], str | None] = lambda policy: None,
        stop_at: int | None = None,
        savings: bool = True,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self._effect, self._noise, self._fail, self._stop_at, self._savings = effect, noise, fail, stop_at, savings

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        text = policy.to_json()
        if self._stop_at is not None and len(self.order) + 1 == self._stop_at:
            raise KeyboardInterrupt
        self.order.append((text, settings.seed))
        self.calls[f"{settings.seed}:{settings.anneal}:{text}"] += 1
        kind = self._fail(policy)
        if kind is not None:
            return Outcome(kind=kind, message="as asked")
        saved = saved_share(policy) if self._savings else 0.0
        rng = np.random.default_rng([settings.seed, sum(text.encode()), settings.perturbation > 0])
        accuracy = 0.9 + self._effect(policy) + self._noise * float(rng.standard_normal())
        loss = 1.0 - self._effect(policy) + self._noise * float(rng.standard_normal())
        return Outcome(
            kind="ok",
            peak_memory_bytes=Number(value=1e9 * (1 - saved), kind="computed"),
            throughput_samples_per_second=Number(value=1e3 / (1 - saved), kind="predicted"),
            accuracy=Number(value=accuracy, kind="emulated"),
            eval_loss=Number(value=loss, kind="emulated"),
            start_accuracy=Number(value=0.1, kind="measured") if settings.measure_start else None,
            start_eval_loss=Number(value=4.0, kind="measured") if settings.measure_start else None,
            num_steps_taken=28,
            wall_seconds=0.01,
            step_seconds_here=0.001,
        )


class TwoAtOnce(FakeMeasure):
    """Runs two trials at once; the first of a pair takes longer, so that the second finishes before it."""

    num_parallel = 2

    def __init__(self, *, stop_at: int | None = None) -> None:
        super().__init__(noise=0.001)
        self._stop_in = stop_at
        self._turn = 0
        self.is_stopped = False

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        self._turn += 1
        turn = self._turn
        if turn == self._stop_in:
            raise KeyboardInterrupt
        time.sleep(0.02 if turn % 2 else 0.0)
        return super().__call__(policy, settings)

    def stop(self) -> None:
        self.is_stopped = True


def ran(result: SearchResult) -> list[tuple[str, str]]:
    return [(record.arm, record.key) for record in result.records if not record.is_cached]


def saved_share(policy: Policy) -> float:
    """0 in FP32, 0.4 under autocast, up to 0.1 more for the units that are in half outright."""
    if policy.default == "fp32":
        return 0.0
    found, _ = resolve_precisions(policy, UNITS)
    own = [found[name] for name in UNITS if name in LEAVES and found[name] != policy.default]
    low = sum(precision in ("fp16", "bf16") for precision in own)
    high = sum(precision == "fp32" for precision in own)
    return 0.4 + 0.0125 * low - 0.05 * high


LEAVES = [name for net in (TinyNet(), Chain()) for name, part in net.named_modules() if not list(part.children())]
UNITS = parents_of(LEAVES)


def tiny_plan(
    folder: object = None, *, task: Task | None = None, seed: int = 0, gpu: str = "a100-80", **settings: object
) -> SearchPlan:
    """Prepare a search of the tiny task; in FP16, where scaler and overflows are, unless `dtype` says otherwise."""
    wanted = SearchSettings(**{"output": folder, "dtype": "fp16", **settings})
    return prepare_search(task or tiny_task(), trial=TrialSettings(seed=seed, gpu=gpu), settings=wanted)
