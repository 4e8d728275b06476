"""
Choosing an integration mode
============================

Exact integration looks at every pair of positions with the full kernel, which is ``w = kernel_hidden_size`` times the
work of attention. The other modes trade this for something else. :doc:`/integration` defines them; this guide measures
them on a model and helps to choose.
"""

# %%
# In short
# --------
#
# * Up to some hundred positions: ``exact``, with a narrow kernel (``kernel_hidden_size=16``).
# * Long texts, large images, clouds and meshes: ``near_far``, the full kernel nearby and a low-rank one over all keys.
# * When speed decides: ``low_rank``. It is another operator, a relative of linear attention, and sees neither ``x -
#   y`` nor ``u(x) * u(y)``.
# * The full kernel at any distance, at some error: ``monte_carlo``.
# * Inputs of mixed length, most of them short: ``auto``, the default, which is exact up to 512 positions.
#
# What it costs
# -------------
#
# ``model_costs`` counts without running anything, as ``itnet info itnet-small -n 1024`` does.
import matplotlib.pyplot as plt
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification
from modeling_itnet.analysis.costs import model_costs

counts = [64, 256, 1024, 4096]
config = ITNetConfig.from_preset("itnet-small", modality="text", num_hidden_layers=1, kernel_hidden_size=16)
costs = model_costs(config, counts)
figure, axis = plt.subplots(figsize=(6, 3.2))
for name, style in zip(dict.fromkeys(cost.model for cost in costs), ("-o", "-s", "-^", "-v", "--"), strict=False):
    axis.loglog(counts, [cost.forward_flops for cost in costs if cost.model == name], style, label=name)
axis.set(xlabel="positions n", ylabel="FLOPs of a layer, forward", xticks=counts, xticklabels=counts)
axis.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %%
# FLOPs are not seconds: products of small matrices and passes over elements run at a lower rate than large products.
# :doc:`/integration` has measured times and memory of whole models beside SDPA; ``itnet bench`` measures here.
#
# Training in a mode
# ------------------
#
# The mode is a setting of the configuration, and a new model is trained in it.
for settings in (
    {"integration_mode": "exact", "kernel_hidden_size": 16},
    {"integration_mode": "near_far", "kernel_hidden_size": 16, "near_size": 9, "factor_form": "matrix"},
    {"integration_mode": "low_rank", "rank": 8},
    {"integration_mode": "monte_carlo", "num_samples": 32},
):
    model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", **settings))
    loss = model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss
    loss.backward()
    print(f"{model.config.integration_mode:12s} {model.num_parameters():8,} parameters, loss {loss:.2f}")

# %%
# From a trained exact model
# --------------------------
#
# An exact model can be converted, with some data to fit the new parts on. Here is the checkpoint on Fashion-MNIST that
# comes with the repository, its accuracy before and after. It has 17 positions only, so that nothing gets faster:
# this shows what gets lost.
from datasets import load_dataset
from transformers import AutoImageProcessor

from modeling_itnet.training.recipes import find_clone

examples = find_clone() / "examples"
checkpoint = examples / "checkpoints" / "itnet-tiny-fashion-mnist"
parquet = examples / "data" / "fashion_mnist_small" / "test.parquet"
rows = load_dataset("parquet", data_files=str(parquet), split="train")
processor = AutoImageProcessor.from_pretrained(checkpoint)
pixels = processor(images=rows["image"][:628], return_tensors="pt")["pixel_values"]
labels = torch.tensor(rows["label"][:628])


def accuracy(model) -> float:
    with torch.no_grad():
        return (model.eval()(pixel_values=pixels[128:]).logits.argmax(-1) == labels[128:]).float().mean().item()


calibration = [{"pixel_values": pixels[:128]}]
model = ITNetForImageClassification.from_pretrained(checkpoint)
print(f"exact: {accuracy(model):.1%}")
report = model.to_near_far(calibration, near_size=9, rank=4, steps=20, distillation_steps=10)
print(f"near and far: {accuracy(model):.1%}, {report}")

model = ITNetForImageClassification.from_pretrained(checkpoint)
report = model.to_low_rank(8, calibration, steps=20, distillation_steps=10)
print(f"low rank: {accuracy(model):.1%}, {report}")

# %%
# More steps and more data come closer; the defaults are ``itnet convert``'s: ``itnet convert MODEL OUT --to near_far
# --data FILES``. :doc:`/mode_accuracy` trains every mode on problems that tell them apart.
