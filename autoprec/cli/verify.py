"""`autoprec verify POLICY`: prove a policy against FP32 on this device, and hold it to what its file promises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.output import INCONCLUSIVE, INTERRUPTED, WORSE, check_folder, check_format, open_console, print_json
from autoprec.cli.signals import interruptible
from autoprec.cli.task_options import TaskOptions, option, takes_task

if TYPE_CHECKING:
    from autoprec.search.policy_proof import PolicyProof

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("verify", help="Prove a policy, found or written by hand, against FP32 on this device.")(_verify)


@takes_task
def _verify(
    task: TaskOptions,
    policy: Annotated[Path, typer.Argument(help="A policy.json.")],
    margin: Annotated[
        float | None,
        option("How much worse than FP32 the metric may be; the file's, else a tenth of what FP32 gains.", "--margin"),
    ] = None,
    max_seeds: Annotated[int, option("Seeds that the proof may use.", "--max-seeds")] = 8,
    num_steps: Annotated[int, option("Steps of the shortest runs.", "--num-steps")] = 40,
    proof_steps: Annotated[
        int | None, option("Steps up to which runs are doubled while FP32 learns too little; 320.", "--proof-steps")
    ] = None,
    proof_time: Annotated[
        float | None, option("Seconds within which runs may be made longer; 900.", "--proof-time")
    ] = None,
    autocast: Annotated[bool, option("Run plain autocast beside the policy.", "--autocast/--no-autocast")] = True,
    tolerance: Annotated[
        float, option("How far memory and speed may fall behind what the file promises.", "--tolerance")
    ] = 0.05,
    update: Annotated[bool, option("Write this proof into the file as its evidence.", "--update")] = False,
    trial_timeout: Annotated[float, option("Seconds after which a run is ended.", "--trial-timeout")] = 900,
    storage: Annotated[str | None, option("Optuna database URL; a file in the folder.", "--storage")] = None,
    output: Annotated[Path | None, option("Folder for the runs.", "-o", "--output")] = None,
    format: Annotated[str, option("text or json.", "--format")] = "text",
) -> None:
    check_format(format)
    check_folder(output)
    settings = {
        "margin": margin,
        "max_seeds": max_seeds,
        "num_steps": num_steps,
        "proof_steps": proof_steps,
        "proof_time": proof_time,
        "with_autocast": autocast,
        "tolerance": tolerance,
        "trial_timeout": trial_timeout,
        "storage": storage,
        "output": output,
    }
    try:
        with interruptible():
            proof = _prove(policy, task, settings, to_stderr=format == "json")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if update:
        proof.updated_policy().save(policy)
    _report(proof, format=format, written=str(policy) if update else None)
    raise typer.Exit(0 if proof.is_proved else WORSE if proof.is_worse else INCONCLUSIVE)


def _prove(path: Path, task: TaskOptions, settings: dict[str, Any], *, to_stderr: bool) -> PolicyProof:
    from autoprec.cli.progress import ProofProgress
    from autoprec.policy import load_policy
    from autoprec.search.measuring import open_measure
    from autoprec.search.metric import metric_of
    from autoprec.search.policy_proof import verify_policy
    from autoprec.trials.pool import default_num_workers

    found = load_policy(path)
    trial = task.trial_settings()
    trained = task.build_task(found.training)
    workers = default_num_workers(trained, trial.device)
    with (
        ProofProgress(open_console(to_stderr=to_stderr, for_progress=True), metric_of(trained)) as progress,
        open_measure(trained, timeout_seconds=settings.pop("trial_timeout"), num_workers=workers) as measure,
    ):
        where: dict[str, Any] = {"device": trial.device, "gpu": trial.gpu, "seed": trial.seed}
        return verify_policy(found, trained, events=progress, measure=measure, **where, **settings)


def _report(proof: PolicyProof, *, format: str, written: str | None) -> None:
    from autoprec.cli.progress import print_margin
    from autoprec.report.escaping import escaped
    from autoprec.report.tables import comparison_table, gate_lines

    if format == "json":
        document = {
            "verdict": proof.verdict.kind,
            "proved": proof.is_proved,
            "sentence": proof.sentence,
            "policy": proof.name,
            "target": proof.target,
            "metric": proof.verification.metric.name,
            "num_steps": proof.verification.num_steps,
            "margin": proof.verification.margin,
            "provable_margin": proof.verification.provable_margin,
            "noise": proof.verification.noise,
            "arms": {name: arm.model_dump(mode="json", exclude_none=True) for name, arm in proof.arms.items()},
            "promises": [
                {
                    "what": comparison.what,
                    "promised": comparison.promised.model_dump(mode="json", exclude_none=True),
                    "found": comparison.found.model_dump(mode="json", exclude_none=True),
                    "allowed": comparison.allowed,
                    "behind": comparison.behind,
                }
                for comparison in proof.gate.comparisons
            ],
            "notes": list(proof.gate.notes),
        }
        print_json(document)
        return
    console = open_console()
    metric, title = proof.verification.metric.name, f"{proof.task_name} on {proof.target}"
    console.print(comparison_table(proof.arms, metric=metric, title=title))
    print_margin(console, proof.verification)
    for line in gate_lines(proof.gate):
        console.print(escaped(line), soft_wrap=True)
    console.print(escaped(proof.sentence), soft_wrap=True)
    if written is not None:
        console.print(escaped(f"written: {written}"), soft_wrap=True)
