"""Open the study of a search with plain Optuna and print what mattered.

    python examples/inspect_study.py runs/resnet50-0123456789

Nothing of autoprec is needed: the objectives and parameters carry their names, and the outcome of each trial is in its
user attributes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna
from optuna.importance import FanovaImportanceEvaluator, get_param_importances


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what mattered in a search.")
    parser.add_argument("folder", type=Path, help="output folder of a search, with its study.db")
    parser.add_argument("--top", type=int, default=5, help="parameters to show for each objective")
    arguments = parser.parse_args()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = f"sqlite:///{arguments.folder / 'study.db'}"
    for name in optuna.get_all_study_names(storage):
        show_study(optuna.load_study(study_name=name, storage=storage), top=arguments.top)


def show_study(study: optuna.Study, *, top: int) -> None:
    """Print the trials on the front, and for each objective the parameters that decided it."""
    finished = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    print(f"study {study.study_name}: {len(finished)} finished trials")
    for trial in study.best_trials:
        label = trial.user_attrs.get("arm") or f"trial {trial.number}"
        numbers = ", ".join(f"{n} {v:.6g}" for n, v in zip(study.metric_names or [], trial.values, strict=True))
        half = sum(
            value in ("fp16", "bf16", "half") for key, value in trial.params.items() if key.startswith("precision/")
        )
        print(f"  front: {label}: {numbers}; {half} decisions in half, outcome {trial.user_attrs['outcome']['kind']}")
    for index, name in enumerate(study.metric_names or []):
        if len({trial.values[index] for trial in finished}) < 2:
            print(f"  {name}: the same in every trial")
            continue
        importances = get_param_importances(
            study,
            evaluator=FanovaImportanceEvaluator(n_trees=16, max_depth=16, seed=0),
            target=lambda trial, index=index: trial.values[index],
        )
        shown = ", ".join(f"{key} {value:.2f}" for key, value in list(importances.items())[:top])
        print(f"  {name} depended most on: {shown}")


if __name__ == "__main__":
    main()
