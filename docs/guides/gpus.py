"""
GPU and several GPUs
====================

The code below runs where you are: on a GPU if there is one, and on a CPU otherwise. The text says what changes.

.. note::

   No GPU has run the Triton kernels of this package yet. Their results are checked in Triton's interpreter, and their
   machine code is compiled offline; every GPU speed in :doc:`/kernels` is a prediction. ``make bench-gpu`` checks and
   times them on a machine that has one. ``backend="tiled"`` is plain PyTorch and runs everywhere.
"""

# %%
# One device
# ----------
#
# Install the build of PyTorch for your GPU first (:doc:`/install`), then ``triton``, which CUDA builds bring along.
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = ITNetConfig.from_preset("itnet-tiny", integration_mode="exact", num_labels=10)
model = ITNetForImageClassification(config).to(device)
images, labels = torch.randn(8, 3, 32, 32, device=device), torch.randint(0, 10, (8,), device=device)
print(model(images, labels=labels).loss.item(), device)

# %%
# Which backend
# -------------
#
# ``backend="auto"`` takes ``triton`` for tensors on a GPU, where its kernels can run, and ``tiled`` otherwise; a
# warning says when a GPU has to do without. A backend that is asked for by name runs or raises an error that says why.
#
# * ``exact`` runs in Triton; the near field of ``near_far`` runs in ``tiled`` on every device.
# * Heads of up to 128 features and kernels of up to 256 hidden units; float32, float16 and bfloat16.
# * A kernel MLP of three layers, and float64, run in ``tiled``.
try:
    ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", backend="triton"))(torch.randn(1, 3, 32, 32))
except ValueError as error:
    print(error)

# %%
# Half precision
# --------------
#
# On a GPU, autocast to bfloat16; sums over pairs are accumulated in float32. On a CPU bfloat16 is slow, and this line
# leaves it alone.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
for _ in range(3):
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        loss = model(images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss:.2f}")

# %%
# ``torch.compile(model, fullgraph=True)`` takes every head; name an integration mode, as a graph cannot choose one for
# every sample. Gradient checkpointing (``model.gradient_checkpointing_enable()``) trades time for memory; the operator
# itself keeps nothing per pair either way.
model.gradient_checkpointing_enable()
model.train()(images, labels=labels).loss.backward()
print(f"{sum(parameter.grad is not None for parameter in model.parameters())} gradients")

# %%
# Several GPUs
# ------------
#
# ``Trainer`` and Accelerate need nothing of their own. The same script runs on one device and on many:
#
# .. code-block:: bash
#
#     accelerate launch --config_file examples/accelerate/h200_8_ddp.yaml script.py
#     torchrun --nproc_per_node 8 examples/run_image_classification.py configuration/recipes/imagenet-base.yaml
#
# ``examples/accelerate`` has configurations for 1, 8 and 2 × 8 GPUs, with DDP and FSDP2, and the reason for each
# choice. They have been read by Accelerate and not run on such a machine. DDP and FSDP2 on two CPU processes give the
# parameters of one, to 1e-5; tensor parallelism (``tp_plan="auto"``) the same logits (:doc:`/hf_compat`).
from accelerate import Accelerator

accelerator = Accelerator()
model = ITNetForImageClassification(config)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
with accelerator.accumulate(model):
    loss = model(images.to(accelerator.device), labels=labels.to(accelerator.device)).loss
    accelerator.backward(loss)
    optimizer.step()
print(f"{accelerator.num_processes} process on {accelerator.device}")

# %%
# Which of them to take: every preset fits one GPU with Adam in float32 (``itnet-large``: 457 million parameters, 7.3
# GB), so that DDP, which copies the model to every GPU, is the first choice. FSDP2 shards it, where memory is short.
