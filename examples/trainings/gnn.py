"""A graph network on a sparse adjacency matrix: which of four groups a node belongs to, from its noisy neighbours.

autoprec search --task examples/trainings/gnn.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import autoprec

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A normalised adjacency matrix (n, n), sparse; features (n, f); groups (n)."""


class GraphConvolution(nn.Module):
    """Sums over neighbours. Sparse products have no half kernel on a CPU: the search keeps such a unit in FP32."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)
        self.gather = Gather()

    def forward(self, adjacency: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return self.gather(adjacency, self.linear(nodes))


class Gather(nn.Module):
    def forward(self, adjacency: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency.float(), nodes.float())


class GraphNetwork(nn.Module):
    def __init__(self, width: int, num_features: int, num_groups: int) -> None:
        super().__init__()
        self.first, self.second = GraphConvolution(num_features, width), GraphConvolution(width, width)
        self.head = nn.Linear(width, num_groups)

    def forward(self, adjacency: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(adjacency, nodes))
        return self.head(F.relu(self.second(adjacency, hidden)))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    adjacency, nodes, groups = batch
    return F.cross_entropy(model(adjacency, nodes), groups)


def accuracy(model: nn.Module, batch: Batch) -> torch.Tensor:
    adjacency, nodes, groups = batch
    return (model(adjacency, nodes).argmax(1) == groups).float().mean()


def make_graph(num_nodes: int, num_features: int, num_groups: int) -> Batch:
    """Return a random graph whose edges lie mostly within a group, and features that say little on their own."""
    groups = torch.arange(num_nodes) % num_groups
    same = groups[:, None] == groups[None]
    edges = torch.rand(num_nodes, num_nodes) < torch.where(same, 0.2, 0.02)
    edges = edges | edges.T | torch.eye(num_nodes, dtype=torch.bool)
    adjacency = edges / edges.sum(1, keepdim=True)
    features = F.one_hot(groups % num_features, num_features) * 0.5 + torch.randn(num_nodes, num_features)
    return adjacency.to_sparse(), features, groups


def task(width: int = 32, num_nodes: int = 128, num_graphs: int = 16, num_groups: int = 4) -> autoprec.Task:
    graphs = [make_graph(num_nodes, 8, num_groups) for _ in range(num_graphs)]
    held_out = max(1, num_graphs // 4)
    return autoprec.Task(
        name="gnn",
        model=lambda: GraphNetwork(width, 8, num_groups),
        train_batches=graphs[held_out:],
        eval_batches=graphs[:held_out],
        loss=loss,
        metric=accuracy,
        optimizer_settings={"lr": 1e-2},
    )
