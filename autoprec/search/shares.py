"""How the chance to err is shared out among the arms of a study, so that it holds for all of them together."""

from __future__ import annotations

from collections.abc import Iterable

from optuna.study import Study

from autoprec.search.judging import Verdict
from autoprec.search.proof import Proof

__all__ = ["Shares"]

TURN = "autoprec:verification_turn"


class Shares:
    """Hands each arm the chance to be proved wrongly, in the order in which the arms were first planned.

    An arm may spend `Proof.arm_share` of what is left of the look's error. One that is proved gives its part back, so
    that the next one has as much; one that failed, or came too near the end of FP16, was never tested and has spent
    nothing. The first arm that is worse than the margin and still proved had its part of an error from which no such
    arm gave anything back: the parts add up to the look's error at most, however many arms there are (the fallback
    procedure of Wiens and Dmitrienko, for a list that grows).

    Args:
        proof: the plan, with the error of a look.
        study: keeps the order, so that a resumed search, another preference or more trials hand out the same parts;
            None keeps it here alone.
    """

    def __init__(self, proof: Proof, study: Study | None = None) -> None:
        self._proof, self._study = proof, study
        self._turn: list[str] = [] if study is None else list(study.user_attrs.get(TURN, []))
        self._verdicts: dict[str, Verdict] = {}

    def plan(self, keys: Iterable[str]) -> None:
        """Put the policies that have no place yet behind those that have one."""
        new = [key for key in keys if key not in self._turn]
        self._turn += new
        if new and self._study is not None:
            self._study.set_user_attr(TURN, self._turn)

    def in_turn(self, keys: Iterable[str]) -> list[str]:
        """Return the policies in the order in which they have to be judged; those that were not planned come last."""
        return sorted(keys, key=lambda key: self._turn.index(key) if key in self._turn else len(self._turn))

    def level(self, key: str) -> float:
        """Return the chance with which this policy may be proved wrongly at one look.

        One that was not planned cannot be recommended: its verdict is for information, and stands for itself.
        """
        left = self._proof.alpha_per_look
        if key not in self._turn:
            return left
        for earlier in self._turn[: self._turn.index(key)]:
            if self._has_spent(earlier):
                left *= 1 - self._proof.arm_share
        return left * self._proof.arm_share

    def settle(self, key: str, verdict: Verdict) -> None:
        """Note what a policy was found to be."""
        self._verdicts[key] = verdict

    def _has_spent(self, key: str) -> bool:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return True
        was_tested = verdict.kind != "refuted" or verdict.difference is not None
        return verdict.kind != "proved" and was_tested
