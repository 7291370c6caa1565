"""Networks of PyTorch Geometric over one random graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.made import Table
from benchmarks.architectures.network import Network

NETWORKS = Table()
names, network = NETWORKS.names, NETWORKS.network
FEATURES, HIDDEN, CLASSES, LAYERS, DEGREE, NODES = 32, 32, 5, 6, 6, 64


def graph(size: int) -> dict[str, Tensor]:
    """A graph with so many times some nodes."""
    nodes = size * NODES
    return {"x": torch.randn(nodes, FEATURES), "edge_index": torch.randint(nodes, (2, DEGREE * nodes))}


class Layers(nn.Module):
    """Convolutions of a kind, one after the other."""

    def __init__(self, make: Callable[[int, int], nn.Module], is_residual: bool = False) -> None:
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (LAYERS - 1)]
        self.layers = nn.ModuleList(make(width, HIDDEN) for width in widths)
        self.last, self.is_residual = nn.Linear(HIDDEN, CLASSES), is_residual

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x, edge_index).relu(), 0.2)
        return nn.functional.cross_entropy(self.last(x), torch.randint(CLASSES, x.shape[:1]))


def _whole(name: str, **options: Any) -> None:
    def build() -> Network:
        import torch_geometric.nn as geometric

        model = getattr(geometric, name)(FEATURES, HIDDEN, LAYERS, CLASSES, **options)
        return Network(model.train(), graph)

    NETWORKS.update({name: build})


def _layers(name: str, **options: Any) -> None:
    def build() -> Network:
        import torch_geometric.nn as geometric

        return Network(Layers(lambda inputs, outputs: getattr(geometric, name)(inputs, outputs, **options)), graph)

    NETWORKS.update({name: build})


for _name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
    _more = {"aggregators": ["mean", "max", "std"], "scalers": ["identity"], "deg": torch.tensor([0, 10, 20])}
    _whole(_name, dropout=0.2, **(_more if _name == "PNA" else {}))
_layers("ChebConv", K=3)
_layers("GraphConv")
_layers("GATv2Conv", concat=False, heads=2)
_layers("TransformerConv", concat=False, heads=2)
_layers("TAGConv")
_layers("ARMAConv", num_stacks=2)
_layers("SGConv", K=2)
_layers("LEConv")
_layers("ClusterGCNConv")
_layers("FiLMConv")
_layers("SuperGATConv", concat=False, heads=2)
_layers("GENConv")
_layers("ResGatedGraphConv")
_layers("FeaStConv", heads=2)
_layers("GeneralConv")
_layers("MFConv")


@NETWORKS.build
def GatedGraphConv() -> Network:  # noqa: N802 - the name of the class
    import torch_geometric.nn as geometric

    return Network(Layers(lambda _, outputs: geometric.GatedGraphConv(outputs, num_layers=2)), graph)


@NETWORKS.build
def SchNet() -> Network:  # noqa: N802
    import torch_geometric.nn as geometric

    model = geometric.SchNet(hidden_channels=32, num_filters=32, num_interactions=3, cutoff=4.0)
    return Network(model.train(), molecules)


def molecules(size: int) -> dict[str, Tensor]:
    """Small molecules, atoms at random places."""
    atoms = 12
    return {
        "z": torch.randint(1, 9, (size * atoms,)),
        "pos": 3 * torch.randn(size * atoms, 3),
        "batch": torch.arange(size).repeat_interleave(atoms),
    }
