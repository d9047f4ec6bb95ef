"""Print what the proof claims: false recommendations, planted harm, refusal, claimed ratios, verdicts of `verify`.

python benchmarks/proof.py [aa] [planted] [refusal] [ratios] [verify] [--only FIRST:LAST]

Cheap networks on scikit-learn's digits, trained for real; FP16 is emulated, memory computed and throughput predicted,
save in `aa`, which measures the wall-clock time of its steps here. `--only` runs a part of the studies of each.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from autoprec import verify_policy
from autoprec.policy import Number, Policy, load_policy, resolve_precisions
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.plan import SearchSettings, prepare_search
from autoprec.search.runner import Measure
from autoprec.search.verification import Proof
from autoprec.tasks import TargetShape, Task
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.outcome import Outcome
from autoprec.trials.target import estimate_figures

FP32 = Policy(default="fp32")
GPU = "v100"
"""Without BF16 units, so that plain autocast in BF16 is no way out."""
WIDTH = 24
BATCH = 32
TARGET_BATCH = 4096
LONG_FACTOR = 10
NUM_LONG_SEEDS = 1


# --- data and networks ---------------------------------------------------------------------------------------------


def digits(seed: int = 0) -> tuple[list[torch.Tensor], list[Any]]:
    """Return 1,437 training images of 64 pixels with their labels, and one held-out batch of 360."""
    data = load_digits()
    pixels = torch.tensor(data.data, dtype=torch.float32).div(16).sub(0.3).div(0.375)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:360], order[360:]
    return [pixels[train], labels[train]], [(pixels[held_out], labels[held_out])]


def batches_of(train: list[torch.Tensor]) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        for indices in torch.randperm(len(train[1])).split(BATCH):
            if len(indices) == BATCH:
                yield train[0][indices], train[1][indices]

    return batches


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


class LoudLinear(nn.Linear):
    """Gives outputs of about 1e5, which the norm behind it brings back: FP16 ends at 65504."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        with torch.no_grad():
            self.weight.mul_(2e5)


class _Faint(torch.autograd.Function):
    """The identity, whose gradient passes through values too small for FP16 even under the largest loss scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e-7 * 1e-7 * 1e7 * 1e7


class FaintLinear(nn.Linear):
    """A bottleneck whose gradients vanish in FP16: it and all before it are left as they were at the start."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Faint.apply(super().forward(x))
        return y


class PoisonedLinear(nn.Linear):
    """A layer, a cube and a batch norm in one unit: rare outliers overflow in FP16 and stay in the running statistics.

    About one batch in ten holds such an outlier; the loss stays finite.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.register_buffer("running_mean", torch.zeros(width_out))
        self.register_buffer("running_var", torch.ones(width_out))
        with torch.no_grad():
            self.weight.mul_(OUTLIERS[width_in])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return F.batch_norm(y * y * y, self.running_mean, self.running_var, training=self.training)


OUTLIERS = {64: 22.0, WIDTH: 29.0}


class Block(nn.Module):
    """A layer, its norm and an activation; what harms FP16 stands in the layer's place."""

    def __init__(self, width_in: int, width_out: int, kind: str) -> None:
        super().__init__()
        width = 4 if kind == "vanish" else width_out
        made = {"plain": nn.Linear, "overflow": LoudLinear, "vanish": FaintLinear, "poison": PoisonedLinear}[kind]
        self.unit = made(width_in, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, width_out) if kind == "vanish" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.wide(self.norm(self.unit(x))))


class Network(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        widths = [64, *[WIDTH] * len(kinds)]
        self.blocks = nn.Sequential(*[Block(widths[i], widths[i + 1], kind) for i, kind in enumerate(kinds)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(x))
        return y


def digits_task(name: str, kinds: list[str], *, lr: float = 0.1) -> Task:
    train, held_out = digits()
    return Task(
        name=name,
        model=lambda: Network(kinds),
        train_batches=batches_of(train),
        eval_batches=held_out,
        loss=cross_entropy,
        metric=share_correct,
        optimizer=torch.optim.SGD,
        optimizer_settings={"lr": lr, "momentum": 0.9},
        target=TargetShape(
            make_batch=lambda: (torch.zeros(TARGET_BATCH, 64), torch.zeros(TARGET_BATCH, dtype=torch.long)),
            batch_size=TARGET_BATCH,
        ),
        settings={"kinds": kinds},
    )


# --- running -------------------------------------------------------------------------------------------------------


def inline(task: Task) -> Measure:
    return lambda policy, settings: run_trial(task, policy, settings)


def search(task: Task, folder: Path, *, seed: int, measure: Measure | None = None, **settings: Any) -> SearchResult:
    shutil.rmtree(folder, ignore_errors=True)
    plan = prepare_search(
        task,
        trial=TrialSettings(seed=seed, device="cpu", gpu=GPU),
        settings=SearchSettings(**{"n_trials": 12, "output": folder, **settings}),
    )
    return run_search(plan, measure or inline(task))


def precision_of(model: nn.Module, policy: Policy, name: str) -> str:
    parents = {n: (n.rpartition(".")[0] if n else None) for n, _ in model.named_modules()}
    return resolve_precisions(policy, parents)[0][name]


# --- A/A -----------------------------------------------------------------------------------------------------------


def aa(studies: range, folder: Path) -> None:
    """Searches over a task where precision changes nothing: every policy is run as FP32, and its steps are timed."""
    task = digits_task("same", ["plain"] * 3)

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        rng = np.random.default_rng([sum(policy.to_json().encode()), settings.seed])
        size = settings.perturbation if policy == FP32 else 2.0**-11 * float(rng.uniform(0.5, 1))
        outcome = run_trial(task, FP32, settings.model_copy(update={"perturbation": size}))
        jitter = 1 + 2.0**-11 * float(rng.uniform(-1, 1))
        assert outcome.step_seconds_here is not None
        return outcome.model_copy(
            update={
                "peak_memory_bytes": Number(value=1e9 * jitter, kind="measured"),
                "throughput_samples_per_second": Number(value=BATCH / outcome.step_seconds_here, kind="measured"),
            }
        )

    kinds: list[str] = []
    for study in studies:
        prefer = ("balanced", "fastest")[study % 2]
        result = search(task, folder, seed=study, measure=measure, prefer=prefer, n_trials=8)
        kinds.append(result.choice.kind)
        print(f"  study {study}: {result.choice.sentence[:110]}", flush=True)
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    print(f"A/A: {kinds.count('policy')} of {len(kinds)} searches recommend a found policy; {counts}")


# --- planted truths ------------------------------------------------------------------------------------------------

PLANTED = ("overflow", "vanish", "poison")
NUM_BLOCKS = 3


def planted_task(study: int) -> tuple[Task, str]:
    """Return a task with one culprit in a random place, and the name of its unit."""
    rng = np.random.default_rng(study)
    kind, place = PLANTED[study % len(PLANTED)], int(rng.integers(NUM_BLOCKS))
    kinds = ["plain"] * NUM_BLOCKS
    kinds[place] = kind
    return digits_task(f"{kind}-{place}", kinds), f"blocks.{place}.unit"


def planted(studies: range, folder: Path) -> None:
    """Searches over networks with one unit that FP16 harms; the winner is trained ten times longer beside FP32."""
    kinds: list[str] = []
    worst, num_safe, num_found, num_named = 0.0, 0, 0, 0
    differences: list[tuple[float, float]] = []
    for study in studies:
        task, unit = planted_task(study)
        result = search(task, folder, seed=study, n_trials=10)
        policy = load_policy(folder / "policy.json")
        drop = long_drop(task, policy, seed=study) if policy.low_precisions else 0.0
        precision = precision_of(task.model(), policy, unit)
        found = result.choice.kind == "policy"
        worst, num_safe = max(worst, drop), num_safe + (drop <= result.verification.proof.margin)
        num_found, num_named = num_found + found, num_named + (found and precision == "fp32")
        kinds.append(result.choice.kind)
        if policy.low_precisions:
            differences.append(claimed_differences(policy, planted_task(study)[0], seed=study + 1))
        print(
            f"  study {study}: {task.name}: {result.choice.name}; accuracy lost over {LONG_FACTOR}x: {drop:+.4f}; "
            f"{unit} {precision}",
            flush=True,
        )
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    print(f"planted: {num_safe} of {len(studies)} recommendations are within the margin after {LONG_FACTOR}x the steps")
    print(f"planted: largest loss of accuracy {worst:+.4f}; {counts}")
    print(f"planted: the culprit is in FP32 in {num_named} of {num_found} found policies")
    print_differences(differences)


def long_drop(task: Task, policy: Policy, *, seed: int) -> float:
    """Return FP32's accuracy minus the policy's after ten times the steps of the proof, on an unused seed."""
    plan = replace(Proof(), num_steps=Proof().num_steps * LONG_FACTOR, first_seed=50_000)
    drops = []
    for index in range(NUM_LONG_SEEDS):
        settings = plan.settings(TrialSettings(seed=seed, device="cpu", gpu=GPU), index)
        fp32, own = (run_trial(task, p, settings).accuracy for p in (FP32, policy))
        assert fp32 is not None
        drops.append(fp32.value - (0.0 if own is None else own.value))  # a run that diverged has lost all
    return statistics.fmean(drops)


# --- refusal -------------------------------------------------------------------------------------------------------


def refusal(studies: range, folder: Path) -> None:
    """Searches with a margin far below the noise: they must end inconclusive and recommend nothing."""
    num_refused = 0
    for study in studies:
        task = digits_task("noisy", ["plain"] * 3, lr=0.5)
        result = search(task, folder, seed=study, n_trials=6, proof=Proof(margin=0.002))
        written = load_policy(folder / "policy.json")
        recommendation = written.recommendation
        refused = (
            not result.is_conclusive
            and written.default == "fp32"
            and recommendation is not None
            and recommendation.choice == "inconclusive"
        )
        num_refused += refused
        print(f"  study {study}: {result.choice.sentence[:200]}", flush=True)
    print(f"refusal: {num_refused} of {len(studies)} searches are inconclusive (exit 3) and recommend nothing")


# --- claimed ratios ------------------------------------------------------------------------------------------------


def ratios(studies: range, folder: Path) -> None:
    """The memory and throughput that recommendations claim, against a fresh estimate of the policy that was written."""
    differences = []
    for study in studies:
        search(planted_task(study)[0], folder, seed=study, n_trials=10)
        policy = load_policy(folder / "policy.json")
        if policy.low_precisions:
            differences.append(claimed_differences(policy, planted_task(study)[0], seed=study + 1))
    print_differences(differences)


def claimed_differences(policy: Policy, task: Task, *, seed: int) -> tuple[float, float]:
    """Return by how much memory and throughput over FP32's differ from what the file says, in points."""
    assert policy.evidence is not None
    arm = policy.evidence.arms[policy.evidence.arm]
    assert arm.memory_ratio is not None
    assert arm.throughput_ratio is not None
    settings = TrialSettings(seed=seed, device="cpu", gpu=GPU)
    own, fp32 = (estimate_figures(task, p, settings) for p in (policy, FP32))
    memory = own.peak_memory_bytes.value / fp32.peak_memory_bytes.value
    speed = own.throughput_samples_per_second.value / fp32.throughput_samples_per_second.value
    return 100 * abs(memory - arm.memory_ratio.value), 100 * abs(speed - arm.throughput_ratio.value)


def print_differences(differences: list[tuple[float, float]]) -> None:
    memory, speed = (max((pair[i] for pair in differences), default=0.0) for i in (0, 1))
    print(
        f"ratios: {len(differences)} recommendations of a low precision; from a fresh estimate they differ by at most "
        f"{memory:.2f} points of memory (computed) and {speed:.2f} of throughput (predicted)"
    )


# --- verify --------------------------------------------------------------------------------------------------------


def verify(studies: range, folder: Path) -> None:
    """A policy written by hand that is worse by twice the margin, and one that is equal, each on its own seeds."""
    task = digits_task("faint", ["plain", "vanish", "plain"])
    worse = Policy(default="fp32", modules={"blocks.1.unit": "fp16"})
    equal = Policy(default="fp32", modules={"blocks.2.unit": "fp16", "head": "fp16"})
    harm = true_harm(task, worse)
    print(f"  the worse policy loses {harm:.4f} of accuracy (mean over 40 other seeds); the margin is half of that")
    num_failed, num_refuted, num_passed = 0, 0, 0
    for study in studies:
        shutil.rmtree(folder, ignore_errors=True)
        found = [
            verify_policy(
                policy,
                task,
                device="cpu",
                gpu=GPU,
                seed=1_000 * study,
                margin=harm / 2,
                with_autocast=False,
                output=folder,
                measure=inline(task),
            )
            for policy in (worse, equal)
        ]
        num_failed += not found[0].is_proved
        num_refuted += found[0].is_worse
        num_passed += found[1].is_proved
        print(f"  seed {study}: worse: {found[0].verdict.kind}; equal: {found[1].verdict.kind}", flush=True)
    print(
        f"verify: the worse policy fails in {num_failed} of {len(studies)} ({num_refuted} refuted, the rest open), "
        f"the equal one passes in {num_passed}"
    )


def true_harm(task: Task, policy: Policy) -> float:
    plan = replace(Proof(), first_seed=900_000)
    trial = TrialSettings(device="cpu", gpu=GPU)
    differences = []
    for index in range(40):
        settings = plan.settings(trial, index)
        fp32, own = (run_trial(task, p, settings) for p in (FP32, policy))
        assert fp32.accuracy is not None
        assert own.accuracy is not None, own.message
        differences.append(fp32.accuracy.value - own.accuracy.value)
    return statistics.fmean(differences)


# --- command line --------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[range, Path], Any], int]] = {
    "aa": (aa, 100),
    "planted": (planted, 50),
    "refusal": (refusal, 5),
    "ratios": (ratios, 30),
    "verify": (verify, 20),
}


def main(arguments: list[str]) -> None:
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else None
    names = [a for a in arguments if a in PARTS] or list(PARTS)
    torch.set_num_threads(1)
    gc.freeze()  # each run collects what it left; what was there before need not be looked through
    warnings.simplefilter("ignore")

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
    def without_sync(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    for name in names:
        run, count = PARTS[name]
        first, last = (int(x) for x in only.split(":")) if only else (0, count)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run(range(first, last), Path(folder) / "run")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
