"""
Your own point clouds
=====================

A cloud is an array ``[n, 3]``; clouds of a batch may differ in size. This guide tells four shapes apart that are drawn
at random, each stretched and sampled anew.
"""

# %%
# Data
# ----
#
# ``modeling_itnet.processing.read_points`` reads the vertices of .off and .ply files.
import matplotlib.pyplot as plt
import numpy as np
import torch

from modeling_itnet import ITNetConfig, ITNetForPointCloudClassification, ITNetPointCloudProcessor

rng = np.random.default_rng(0)
torch.manual_seed(0)
NAMES = ("ball", "box", "ring", "cone")


def cloud(kind: str) -> np.ndarray:
    """Some 40 to 80 points on the surface of a shape, [n, 3]."""
    n = int(rng.integers(40, 81))
    angle, height = rng.uniform(0, 2 * np.pi, n), rng.uniform(-1, 1, n)
    if kind == "ball":
        radius = np.sqrt(1 - height**2)
    elif kind == "box":
        points = rng.uniform(-1, 1, (n, 3))
        points[np.arange(n), rng.integers(0, 3, n)] = rng.choice([-1, 1], n)
        return points * rng.uniform(0.5, 1.0, 3)
    elif kind == "ring":
        around = rng.uniform(0, 2 * np.pi, n)
        radius, height = 1 + 0.4 * np.cos(around), 0.4 * np.sin(around)
    else:
        radius = (1 - height) / 2
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1) * rng.uniform(0.7, 1.3, 3)


labels = rng.integers(0, 4, 500)
clouds = [cloud(NAMES[label]) for label in labels]

# %%
# Processor and model
# -------------------
#
# The processor moves each cloud to mean 0 and radius 1, draws ``num_points`` of the larger ones and pads the smaller
# ones; with ``augment=True`` it also turns, scales and jitters them. Positions are the points themselves, so that
# clouds need no grid and no order.
processor = ITNetPointCloudProcessor(num_points=48)
batch = processor(clouds, return_tensors="pt")
print({name: list(tensor.shape) for name, tensor in batch.items()})

config = ITNetConfig.from_preset(
    "itnet-tiny",
    modality="point_cloud",
    num_hidden_layers=2,
    kernel_hidden_size=16,
    local_neighbors=8,
    fourier_scale=1.0,
    initializer_range=0.1,  # five times the paper's, for so small a model and so short a training
    kernel_init_scale=0.1,
    integration_mode="exact",
    id2label=dict(enumerate(NAMES)),
)
model = ITNetForPointCloudClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=4 * 20)
target = torch.tensor(labels)
train, test = torch.arange(400), torch.arange(400, 500)

for epoch in range(4):
    for rows in train[torch.randperm(400)].split(20):
        inputs = {name: tensor[rows] for name, tensor in batch.items()}
        loss = model(**inputs, labels=target[rows]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        guesses = model(**{name: tensor[test] for name, tensor in batch.items()}).logits.argmax(-1)
    model.train()
    print(f"epoch {epoch + 1}: {(guesses == target[test]).float().mean():.0%} of 100 other clouds right")

# %%
# What it sees
# ------------
#
# How much the points of a cloud count for one of them, by the norm of the kernel less its mean.
from modeling_itnet.analysis.kernels import kernel_norms

model.eval()
figure = plt.figure(figsize=(9, 3))
for place, kind in enumerate(("ball", "ring", "cone")):
    index = int(np.flatnonzero(labels == NAMES.index(kind))[0])
    sample = {name: tensor[index : index + 1] for name, tensor in batch.items()}
    norms = kernel_norms(model, sample, layer=0, part="variation")[0].mean(0)[0]
    real = sample["attention_mask"][0].bool()
    points = sample["points"][0][real]
    axis = figure.add_subplot(1, 3, place + 1, projection="3d")
    axis.scatter(*points.T, c=norms[: len(points)], cmap="cividis", s=18)
    axis.scatter(*points[:1].T, s=90, facecolors="none", edgecolors="black")
    axis.set_title(f"{kind}: from the circle")
plt.show()

# %%
# The scale of coordinates
# ------------------------
#
# The kernel sees ``γ(x) = [sin 2πBx; cos 2πBx]`` with ``B ~ N(0, fourier_scale²)``. The processor brings clouds to
# unit size; ``fourier_scale=1`` then has about one wave across half of a cloud, enough for smooth shapes. Scenes whose
# size means something are not to be normalised one by one: divide all of them by the same length, and pass
# ``do_normalize=False``. ``num_fourier_features=0`` gives the kernel the coordinates as they are.
#
# ``integration_mode="near_far"`` takes clouds of 100,000 points (:doc:`/integration`), and
# ``examples/run_point_cloud.py`` trains on files (:doc:`/training`).
