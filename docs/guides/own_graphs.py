"""
Your own graphs
===============

A graph is a mapping with ``edge_index``, a ``Data`` or ``Batch`` of PyTorch Geometric, or a NetworkX graph. Positions
are eigenvectors of its Laplacian, and edges open a gate of the kernel. The task here: does a graph have hubs, to which
most of the others are joined, or are as many edges spread evenly?
"""

# %%
# Data
# ----
#
# Nodes have one of ten types: how many edges they have. Real features are called ``x``; without either, all are alike.
import matplotlib.pyplot as plt
import networkx
import numpy as np
import torch

from modeling_itnet import ITNetConfig, ITNetForGraphClassification, ITNetGraphProcessor

rng = np.random.default_rng(0)
torch.manual_seed(0)


def random_graph(has_hubs: bool) -> networkx.Graph:
    """12 to 18 nodes and twice as many edges; with hubs, one end of every other edge is one of two nodes."""
    nodes = int(rng.integers(12, 19))
    graph = networkx.empty_graph(nodes)
    while graph.number_of_edges() < 2 * nodes:
        start, end = (int(node) for node in rng.choice(nodes, 2, replace=False))
        if has_hubs and rng.random() < 0.5 and start > 1:
            end = start % 2
        graph.add_edge(start, end)
    for node, degree in graph.degree:
        graph.nodes[node]["node_types"] = min(degree, 9)
    return graph


labels = rng.integers(0, 2, 400)
graphs = [random_graph(bool(label)) for label in labels]
figure, axes = plt.subplots(1, 4, figsize=(9, 2.4))
for axis, graph, label in zip(axes, graphs, labels, strict=False):
    networkx.draw(graph, networkx.spring_layout(graph, seed=0), axis, node_size=25, width=0.6)
    axis.set_title(("even", "hubs")[label], fontsize=9)
plt.show()

# %%
# The processor makes positions, neighbours and a mask. Labels may be given with the graphs (``y``), or beside them.
processor = ITNetGraphProcessor()
batch = processor(graphs, return_tensors="pt")
print({name: list(tensor.shape) for name, tensor in batch.items()})

# %%
# A mapping with features of the nodes looks like this:
ring = {"edge_index": np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), "x": rng.standard_normal((4, 5)), "y": 1}
path = {"edge_index": np.array([[0, 1], [1, 2]]), "x": rng.standard_normal((3, 5)), "y": 0}
print({name: list(tensor.shape) for name, tensor in processor([ring, path], return_tensors="pt").items()})

# %%
# Training
# --------
config = ITNetConfig.from_preset(
    "itnet-tiny",
    modality="graph",
    num_node_types=10,  # or node_feature_size=5, for features such as those of the ring above
    num_hidden_layers=1,
    kernel_hidden_size=16,
    fourier_scale=1.0,
    pooling="max",  # one node may decide
    integration_mode="exact",
    num_labels=2,
)
model = ITNetForGraphClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=8 * 12)
target = torch.tensor(labels)
train, test = torch.arange(300), torch.arange(300, 400)

for _ in range(8):
    for rows in train[torch.randperm(300)].split(25):
        loss = model(**{name: tensor[rows] for name, tensor in batch.items()}, labels=target[rows]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
model.eval()
with torch.no_grad():
    guesses = model(**{name: tensor[test] for name, tensor in batch.items()}).logits.argmax(-1)
print(f"loss {loss:.2f}; {(guesses == target[test]).float().mean():.0%} of 100 other graphs right")

# %%
# The order of the nodes
# ----------------------
#
# The same graph with its nodes in another order gives the same output. Eigenvectors have a sign that nothing decides;
# the processor fixes it by a rule that does not look at the order (:doc:`/decisions`). Where an eigenvalue is
# multiple, as in graphs with symmetries, no rule can, and outputs may differ.
graph = graphs[0]
mixed = networkx.relabel_nodes(graph, dict(zip(graph, rng.permutation(len(graph)).tolist(), strict=True)))
both = processor([graph, mixed], return_tensors="pt")
with torch.no_grad():
    print(model(**both).logits)

# %%
# ``examples/run_graph_classification.py`` trains on parquet files that are cut into folds (:doc:`/training`). Against
# MUTAG's best peers nothing is gained so far: :doc:`/results`.
