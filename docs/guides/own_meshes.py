"""
Functions on your own mesh
==========================

Values of a function at scattered points go in, values of another function at any other points come out. The model here
learns the antiderivative ``v(x) = ∫₀ˣ u(y) dy`` from samples of ``u`` at random points, and is then asked on meshes
that it has never seen, coarser and finer.
"""

# %%
# Data
# ----
#
# Functions are random sums of a few waves, so that their integrals are known. Every sample has points of its own.
# ``measure`` holds the length (area, volume) that a point stands for; without it all points count the same.
import math

import matplotlib.pyplot as plt
import torch

from modeling_itnet import ITNetConfig, ITNetForSignalRegression

torch.manual_seed(0)
QUERIES = 24


def samples(count: int, points: int) -> dict[str, torch.Tensor]:
    """Values [count, points, 1] at positions [count, points, 1], and integrals at query positions."""
    waves, size, phase = torch.arange(1, 4), torch.randn(count, 1, 3), 2 * math.pi * torch.rand(count, 1, 3)
    x, at = torch.rand(count, points, 1).sort(1).values, torch.rand(count, QUERIES, 1).sort(1).values

    def antiderivative(x):
        return (size / (2 * math.pi * waves) * torch.sin(2 * math.pi * waves * x + phase)).sum(-1, keepdim=True)

    middles = torch.cat([torch.zeros(count, 1, 1), (x[:, 1:] + x[:, :-1]) / 2, torch.ones(count, 1, 1)], 1)
    return {
        "signal_values": (size * torch.cos(2 * math.pi * waves * x + phase)).sum(-1, keepdim=True),
        "positions": x,
        "measure": middles.diff(dim=1).squeeze(-1),  # the cell of every point: sums to 1
        "query_positions": at,
        "labels": antiderivative(at) - antiderivative(torch.zeros_like(at)),
    }


# %%
# Model and training
# ------------------
#
# ``fourier_scale`` is about the number of waves that matter across the domain. Bring coordinates to unit size first:
# divide by the extent of the whole data set, the same for all samples. Metres or pixels as they come work in
# principle, but 1,000 units with a scale of 10 are noise to the kernel.
config = ITNetConfig.from_preset(
    "itnet-tiny",
    modality="signal",
    position_dim=1,
    signal_feature_size=1,
    num_labels=1,
    num_hidden_layers=2,
    kernel_hidden_size=16,
    num_fourier_features=16,
    fourier_scale=1.0,
    integration_mode="exact",
)
model = ITNetForSignalRegression(config)
steps = 110
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
for step in range(steps):
    loss = model(**samples(24, 40)).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 30 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss:.3f}")

# %%
# Other meshes
# ------------
#
# The operator is an integral, of which a mesh is a quadrature: the same weights run on other numbers of points, and a
# finer mesh should come no worse than the one of training. The error is relative, in the L2 norm.
model.eval()
with torch.no_grad():
    for points in (20, 40, 160):
        batch = samples(100, points)
        wrong = (model(**batch).predictions - batch["labels"]).norm() / batch["labels"].norm()
        print(f"{points:4d} points: relative error {wrong:.3f}")

one = samples(1, 40)
with torch.no_grad():
    predicted = model(**one).predictions[0, :, 0]
figure, axis = plt.subplots(figsize=(7, 3))
axis.plot(one["positions"][0, :, 0], one["signal_values"][0, :, 0], ".", color="grey", label="u at 40 points")
axis.plot(one["query_positions"][0, :, 0], one["labels"][0, :, 0], color="black", label="its integral")
axis.plot(one["query_positions"][0, :, 0], predicted, "o", color="tab:orange", label="predicted, at 24 others")
axis.legend()
plt.show()

# %%
# Your files
# ----------
#
# ``examples/run_operator_learning.py --problem own`` reads npz files with ``x``, ``y``, ``positions`` and, optionally,
# ``query_positions`` and ``measure`` (:doc:`/training`). Large meshes: ``integration_mode="near_far"`` with a
# ``near_radius`` (:doc:`/integration`). What small models reach beside FNO and GNO on Darcy flow and Burgers' equation
# is in :doc:`/results`.
