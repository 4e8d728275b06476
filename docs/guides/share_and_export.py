"""
Sharing and exporting
=====================

A trained model goes to the Hub with its code, so that others need only torch and transformers, or into an ONNX file
for runtimes without Python.
"""

# %%
# Save, with or without code
# --------------------------
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForImageClassification, pipeline

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
config = ITNetConfig.from_preset("itnet-tiny", num_labels=10, num_hidden_layers=2, integration_mode="exact")
model = ITNetForImageClassification(config).eval()
processor = ITNetImageProcessor.from_model_config(config)

model.save_pretrained(folder / "plain", processor=processor)
model.save_pretrained(folder / "with_code", processor=processor, with_code=True)
for name in ("plain", "with_code"):
    print(name, sorted(path.name for path in (folder / name).iterdir())[:8], "...")

# %%
# Where this package is installed, importing it registers the Auto classes, and both folders load. Without it, the
# second one loads by ``trust_remote_code=True``. Its code is generated from the package, for the model's own modality
# and mode.
images = torch.rand(2, 3, 32, 32)
again = AutoModelForImageClassification.from_pretrained(folder / "with_code")
with torch.no_grad():
    print(f"the same logits: {torch.equal(again(images).logits, model(images).logits)}")

# %%
# ``model.push_to_hub("you/itnet")`` uploads with code. ``itnet export CHECKPOINT FOLDER`` makes such a folder of a
# run's output. Either writes a model card; fill in what the data were.
#
# Pipelines
# ---------
from PIL import Image

classify = pipeline("image-classification", str(folder / "plain"))
print(classify(Image.new("RGB", (40, 30), "tomato"), top_k=2))

# %%
# A few weights only
# ------------------
#
# ``lora_config`` says which parts of an ITNet LoRA adapts; adapters are saved by themselves.
from peft import get_peft_model

from modeling_itnet.training.lora import lora_config

adapted = get_peft_model(ITNetForImageClassification(config), lora_config(model, r=4))
adapted.print_trainable_parameters()

# %%
# ONNX
# ----
#
# ``pip install onnx onnxscript``. Inputs and outputs keep their names, and the number of samples is free. The sum over
# pairs is written out densely, so that this is for inputs of some hundred positions; low-rank models have no such
# part.
from modeling_itnet.hub.onnx_export import export_onnx

path = export_onnx(model, {"pixel_values": images}, folder / "model.onnx")
print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")

# %%
import onnxruntime

session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
batch = torch.rand(5, 3, 32, 32)
(logits,) = session.run(["logits"], {"pixel_values": batch.numpy()})
with torch.no_grad():
    print(f"ONNX Runtime and torch: {(torch.from_numpy(logits) - model(batch).logits).abs().max():.1e}")

# %%
# ``torch.export`` and ``torch.compile`` take every head; :doc:`/hf_compat` says what works and which test shows it.
# One step of decoding of a language model, with its state as arguments and results, is in :doc:`/generation`.
