"""Tables of numbers: scikit-learn's breast cancer data, which it carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoprec.errors import UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches, check_batch_size, split_indices

__all__ = ["NUM_COLUMNS", "tabular_batches"]

NUM_COLUMNS = 30
TABULAR_NAMES = ("breast_cancer",)

TabularBatch = tuple[torch.Tensor, torch.Tensor]


def tabular_batches(
    data: str = "breast_cancer", *, batch_size: int = 32, seed: int = 0
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches: 455 and 114 of the 569 tumours, split by the seed.

    A batch is (columns, labels): (n, 30) float32 with the training split's mean 0 and variance 1, (n,) int64, 0 for
    malignant and 1 for benign.

    Raises:
        UsageError: an unknown name, or a batch size below 1. TaskError: a batch larger than the training split.
    """
    if data not in TABULAR_NAMES:
        raise UsageError(f"data {data!r}; allowed: {', '.join(TABULAR_NAMES)}{did_you_mean(data, TABULAR_NAMES)}")
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    columns, labels = torch.from_numpy(found.data).float(), torch.from_numpy(found.target).long()
    kept, left = split_indices(len(labels), seed=seed)
    columns = (columns - columns[kept].mean(0)) / columns[kept].std(0)
    check_batch_size(batch_size, data=data, num_train=len(kept), num_held_out=len(left))
    return (
        EpochBatches(_Rows(columns[kept], labels[kept]), len(kept), batch_size, shuffle=True),
        EpochBatches(_Rows(columns[left], labels[left]), len(left), batch_size, shuffle=False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    columns: torch.Tensor
    labels: torch.Tensor

    def __call__(self, indices: torch.Tensor) -> TabularBatch:
        return self.columns[indices], self.labels[indices]
