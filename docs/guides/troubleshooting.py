"""
Troubleshooting, by error message
=================================

Errors name the argument, its value and what was expected. Each of those below is raised here by the code above it, so
that the text is what you see; then comes what to do.
"""

# %%
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetForSequenceClassification

torch.manual_seed(0)


def message(function, *arguments, **options) -> None:
    """Prints what goes wrong."""
    try:
        function(*arguments, **options)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("this should have been an error")


# %%
# A setting that does not exist
# -----------------------------
#
# Unknown names are errors, and the nearest known one is suggested.
message(ITNetConfig, kernel_hiden_size=16)

# %%
# Settings that do not fit together
# ---------------------------------
message(ITNetConfig, hidden_size=100)

# %%
# ``integration_mode`` ("auto") … name a mode
# -------------------------------------------
#
# ``auto`` chooses for every sample by its number of real positions. A graph of ``torch.compile(fullgraph=True)``,
# ``torch.export`` or ONNX cannot look at values. Set ``integration_mode="exact"``, or another, in the configuration.
config = ITNetConfig.from_preset("itnet-tiny", modality="text", vocab_size=100, num_labels=2, exact_max_positions=8)
model = ITNetForSequenceClassification(config).eval()
padded = {"input_ids": torch.ones(2, 12, dtype=torch.long), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
message(torch.export.export, model, (), padded, strict=False)

# %%
# ``backend`` ("triton") cannot run
# ---------------------------------
#
# The message says why. ``backend="tiled"`` runs everywhere, and ``"auto"`` takes Triton only where it runs.
model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", backend="triton", integration_mode="exact"))
message(model, torch.randn(1, 3, 32, 32))

# %%
# A mask that is not 0 and 1
# --------------------------
#
# Additive masks (0 and -inf) and weights are refused; ``measure`` takes weights.
message(ITNetForSequenceClassification(config), torch.ones(1, 3, dtype=torch.long), torch.tensor([[1.0, 0.5, 1.0]]))

# %%
# An image that does not fit
# --------------------------
#
# Height and width are multiples of the patch size; the processor resizes. Grey images need ``num_channels=1``.
model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny"))
message(model, torch.randn(1, 3, 30, 32))
message(model, torch.randn(1, 1, 32, 32))

# %%
# Inputs of another modality
# --------------------------
message(model, input_ids=torch.ones(1, 3, dtype=torch.long))

# %%
# A kernel tool refuses a low-rank model
# --------------------------------------
#
# It looks at the kernel κ, which a low-rank model does not have: use an exact one, such as the one that ``make demo``
# saves.
from modeling_itnet import diagnose_kernels

low_rank = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", integration_mode="low_rank"))
message(diagnose_kernels, low_rank, {"pixel_values": torch.randn(2, 3, 32, 32)})

# %%
# Symptoms without a message
# --------------------------
#
# .. list-table::
#    :header-rows: 1
#
#    * - symptom
#      - what to do
#    * - exact training is slow
#      - fewer positions (larger patches), ``kernel_hidden_size=16`` or 8, or another mode:
#        :doc:`/generated/guides/choose_a_mode`
#    * - the loss does not fall on points or meshes
#      - bring coordinates to about unit size and choose ``fourier_scale`` near the number of waves that matter:
#        :doc:`/generated/guides/own_meshes`
#    * - several processes on one CPU are much slower than one
#      - torch starts a full set of threads in each: set ``OMP_NUM_THREADS=1``
#    * - ``itnet`` is not found
#      - activate the environment: ``source .venv/bin/activate``
