"""
Your own images
===============

Pictures go through a processor into a classifier, as with any vision model of Transformers. This guide trains one on a
few rows of Fashion-MNIST that come with the repository, in seconds, and looks at a kernel that it has learned.
"""

# %%
# Data
# ----
#
# Any list of PIL images, arrays or tensors will do; here they come from a parquet file.

import matplotlib.pyplot as plt
import torch
from datasets import load_dataset

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor, optimizer_param_groups
from modeling_itnet.training.recipes import find_clone

torch.manual_seed(0)
folder = find_clone() / "examples" / "data" / "fashion_mnist_small"
rows = load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train").shuffle(seed=0)
names = rows.features["label"].names
pictures, classes = rows["image"][:2500], torch.tensor(rows["label"][:2500])
print(pictures[0].size, pictures[0].mode, names[classes[0]])

# %%
# Model and processor
# -------------------
#
# The configuration says how large images are, how they are cut into patches, and what the classes are called. With
# patches of 7 pixels, an image of 28 pixels is a domain of 16 positions in the unit square, and one for [CLS].
# ``from_model_config`` makes the processor that converts, resizes and normalises to what the model takes. These images
# are grey, so that there is one channel; with colours, leave ``num_channels`` and the mean and deviation out.
config = ITNetConfig.from_preset(
    "itnet-tiny",
    image_size=28,
    patch_size=7,
    num_channels=1,
    num_hidden_layers=2,
    kernel_hidden_size=16,
    fourier_scale=1.0,  # about one wave across the image: the grid is too coarse for the default of 10
    initializer_range=0.1,  # five times the paper's, for so small a model and so short a training
    kernel_init_scale=0.1,
    integration_mode="exact",
    id2label=dict(enumerate(names)),
)
processor = ITNetImageProcessor.from_model_config(config, image_mean=[0.286], image_std=[0.353])
model = ITNetForImageClassification(config)
pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
print(f"{list(pixels.shape)}, {model.num_parameters():,} parameters")

# %%
# Training
# --------
#
# A plain loop, to see all of it. Transformers' ``Trainer`` does the same; ``optimizer_param_groups`` decays weight
# matrices only, as the paper does.
optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=0.05), lr=3e-3)
train, test = slice(0, 2000), slice(2000, 2500)
losses = []
for _ in range(3):
    for batch in torch.randperm(2000).split(50):
        loss = model(pixel_values=pixels[train][batch], labels=classes[train][batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

model.eval()
with torch.no_grad():
    guesses = model(pixel_values=pixels[test]).logits.argmax(-1)
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {(guesses == classes[test]).float().mean():.0%} of 500 others right")

# %%
# What has it learned?
# --------------------
#
# A layer integrates ``K(x, y, u(x), u(y)) u(y)`` over the image. The norm of ``K``, less its mean over ``y``, says how
# much a patch ``y`` counts for the patch ``x`` that is marked: the same weights give other patches other neighbours.
from modeling_itnet.analysis.kernels import kernel_norms

image = pixels[test][guesses == classes[test]][:1]
norms = kernel_norms(model, {"pixel_values": image}, part="variation", layer=0)[0].mean(0)  # [17, 17], over heads
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8))
axes[0].imshow(image[0, 0], cmap="gray")
axes[0].set_title("image")
for axis, (row, column) in zip(axes[1:], ((0, 1), (1, 2), (3, 1)), strict=True):
    heat = axis.imshow(norms[1 + 4 * row + column, 1:].reshape(4, 4), cmap="cividis")  # position 0 is [CLS]
    axis.plot(column, row, "o", color="white", markeredgecolor="black")
    axis.set_title(f"from patch ({row}, {column})")
figure.colorbar(heat, ax=axes, shrink=0.8)
plt.show()

# %%
# Other sizes
# -----------
#
# Positions are coordinates, not entries of a table. The same weights take images of another size, as long as patches
# fit. That they run does not mean that they are as good there: nothing has been learned about patches of other things.
with torch.no_grad():
    print(model(pixel_values=torch.randn(1, 1, 56, 42)).logits.shape)

# %%
# From the command line
# ---------------------
#
# ``python examples/run_image_classification.py --dataset my_folder`` trains on pictures in ``train/<class>/*.png``, on
# parquet files or on a data set of the Hub; :doc:`/training` has the formats. ``make demo`` is this guide with all
# 8,000 rows, saved and loaded again.
