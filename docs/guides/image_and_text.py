"""
Image and text together
=======================

Patches of an image and words of a question lie on one domain: the image in the unit square, the text on a line above
it. One kernel sees both. The questions here are about pictures with a coloured square: which colour, or which side?
"""

# %%
# Data
# ----
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

from modeling_itnet import ITNetConfig, ITNetForVisualQuestionAnswering, ITNetProcessor
from modeling_itnet.hub import make_tokenizer

rng = np.random.default_rng(0)
torch.manual_seed(0)
COLOURS = {"red": (220, 50, 40), "green": (40, 170, 70), "blue": (50, 90, 220), "yellow": (240, 210, 60)}
ANSWERS = (*COLOURS, "left", "right")


def question_about_a_picture() -> tuple[Image.Image, str, int]:
    """A picture with a square somewhere, a question about it, and the number of the answer."""
    colour, place, top, start, size = rng.integers((0, 0, 2, 1, 9), (4, 2, 18, 5, 12))
    pixels = np.full((32, 32, 3), 245, dtype=np.uint8)
    pixels[top : top + size, 16 * place + start : 16 * place + start + size] = COLOURS[ANSWERS[colour]]
    question, answer = (("which colour is it?", colour), ("on which side is it?", 4 + place))[rng.integers(2)]
    return Image.fromarray(pixels), question, int(answer)


rows = [question_about_a_picture() for _ in range(700)]
pictures, questions, answers = zip(*rows, strict=True)
figure, axes = plt.subplots(1, 3, figsize=(7, 2.6))
for axis, picture, question, answer in zip(axes, pictures, questions, answers, strict=False):
    axis.imshow(picture)
    axis.set_title(f"{question}\n{ANSWERS[answer]}", fontsize=8)
    axis.axis("off")
plt.show()

# %%
# Processor and model
# -------------------
#
# The processor joins that of images and a tokenizer, here one that is trained on the questions.
with tempfile.TemporaryDirectory() as folder:
    corpus = Path(folder) / "questions.txt"
    corpus.write_text("\n".join(questions), encoding="utf-8")
    tokenizer = make_tokenizer([corpus], vocab_size=300, max_length=32)
config = ITNetConfig.from_preset(
    "itnet-tiny",
    modality="multimodal",
    vocab_size=len(tokenizer),
    pad_token_id=tokenizer.pad_token_id,
    image_size=32,
    patch_size=16,
    num_hidden_layers=1,
    initializer_range=0.1,  # five times the paper's, for so small a model and so short a training
    kernel_init_scale=0.1,
    kernel_hidden_size=16,
    fourier_scale=1.0,
    integration_mode="exact",
    id2label=dict(enumerate(ANSWERS)),
    problem_type="single_label_classification",  # one answer is right
)
processor = ITNetProcessor.from_model_config(config, tokenizer)
batch = processor(images=list(pictures), text=list(questions), return_tensors="pt")
print({name: list(tensor.shape) for name, tensor in batch.items()})

# %%
# Training
# --------
#
# Where a question has several answers, as the ten of VQA v2, labels are shares of the answers (``vqa_soft_targets``).
model = ITNetForVisualQuestionAnswering(config)
target = torch.tensor(answers)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=10 * 19)
train, test = torch.arange(600), torch.arange(600, 700)
for epoch in range(10):
    for rows in train[torch.randperm(600)].split(32):
        loss = model(**{name: tensor[rows] for name, tensor in batch.items()}, labels=target[rows]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if epoch % 3 == 0:
        with torch.no_grad():
            logits = model(**{name: tensor[test] for name, tensor in batch.items()}).logits
        right = (logits.argmax(-1) == target[test]).float().mean()
        print(f"epoch {epoch + 1}: loss {loss:.2f}, {right:.0%} of 100 others right")

# %%
# A model that does not read the question cannot know whether to name a colour or a side, and is right half of the time
# at best; one that does not look at the picture, three times out of eight.
#
# Further
# -------
#
# ``ITNetForImagesAndTextClassification`` takes two images and a sentence (NLVR2). ``from_image_and_text_checkpoints``
# starts from a trained image model and a trained text model. ``measure="balanced"`` gives image and text the same mass
# however many patches and words they have. ``pipeline("itnet-visual-question-answering", folder)(image, question)``
# answers questions, and ``examples/run_vqa.py`` and ``examples/run_nlvr.py`` train on files (:doc:`/training`).
