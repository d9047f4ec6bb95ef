"""How many harmless units a profile pins to FP32: the networks with one planted harm of benchmarks/proof.py.

    python benchmarks/pins.py [--studies 50]

Only profiles are taken, nothing is searched. A unit is pinned to FP32 for a predicted danger; one for which half
brings nothing is left to autocast, which restricts nothing of worth and is counted apart. The profile need not know the
culprit: what it misses, trials and the proof find.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter

from proof_studies.planted import _task as planted_task
from proof_studies.running import trial_settings

from autoprec.profiling.run import take_profile
from autoprec.search.plan import SearchSettings, prepare_search
from autoprec.search.profile_prior import learn_from_profile


def pinned_units(study: int) -> Counter[str]:
    """Profile one planted network; count its harmless units and the culprit by what became of them."""
    task, culprit = planted_task(study)
    trial = trial_settings(study)
    plan = prepare_search(task, trial=trial, settings=SearchSettings())
    profile = take_profile(task, list(dict.fromkeys(plan.unit_calls)), trial)
    gap = plan.settings.limits.max_loss_gap
    pins = learn_from_profile(profile, plan.parameters, plan.unit_calls, max_loss_gap=gap).prior.pinned
    found: Counter[str] = Counter()
    for decision in plan.parameters.free_decisions:
        choice = pins.get(decision.parameter, "searched")
        for unit in decision.units:
            found[f"{'culprit' if unit == culprit else 'harmless'} {choice}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=50)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found: Counter[str] = Counter()
    for study in range(arguments.studies):
        found += pinned_units(study)
    harmless = {kind: count for kind, count in found.items() if kind.startswith("harmless")}
    share = found["harmless fp32"] / sum(harmless.values())
    print(f"{arguments.studies} planted networks: {found['harmless fp32']} of {sum(harmless.values())} harmless units")
    print(f"pinned to FP32 ({share:.1%}), {found['harmless autocast']} left to autocast where half brings nothing")
    print(f"culprits pinned to FP32 by the profile alone: {found['culprit fp32']} of {arguments.studies}")


if __name__ == "__main__":
    main()
