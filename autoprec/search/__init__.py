"""The search: an Optuna study over a model's units, the proof of its finalists, and the recommendation."""

from autoprec.search.pipeline import SearchResult, run_search, search_policy
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.search.policy_proof import PolicyProof, verify_policy
from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.prior import CostPrior, PolicyPrior

__all__ = [
    "search_policy",
    "verify_policy",
    "PolicyProof",
    "prepare_search",
    "run_search",
    "SearchSettings",
    "SearchPlan",
    "SearchResult",
    "PolicySampler",
    "PolicyPrior",
    "CostPrior",
]
