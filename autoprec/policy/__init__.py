"""A precision policy: a frozen value with a JSON form that is data and runs nothing. Imports no torch."""

from autoprec.policy.difference import PolicyDifference, compare_policies, known_precisions
from autoprec.policy.evidence import (
    PRECISIONS,
    ArmEvidence,
    Evidence,
    GradScalerSettings,
    Kind,
    LowPrecision,
    ModelInfo,
    ModuleInfo,
    Number,
    OptimizerImplementation,
    OptimizerSettings,
    Precision,
    Provenance,
    Recommendation,
    TrainingOptions,
    UnitEvidence,
    VerificationEvidence,
)
from autoprec.policy.files import remove_unfinished, write_atomically
from autoprec.policy.precedence import is_glob, lies_in, parents_of, resolve_precisions
from autoprec.policy.values import SCHEMA_VERSION, Policy, content_hash, load_policy

__all__ = [
    "PRECISIONS",
    "SCHEMA_VERSION",
    "ArmEvidence",
    "Evidence",
    "GradScalerSettings",
    "Kind",
    "LowPrecision",
    "ModelInfo",
    "ModuleInfo",
    "Number",
    "OptimizerImplementation",
    "OptimizerSettings",
    "Policy",
    "PolicyDifference",
    "Precision",
    "Provenance",
    "Recommendation",
    "TrainingOptions",
    "UnitEvidence",
    "VerificationEvidence",
    "compare_policies",
    "content_hash",
    "is_glob",
    "lies_in",
    "known_precisions",
    "load_policy",
    "parents_of",
    "resolve_precisions",
    "remove_unfinished",
    "write_atomically",
]
