"""
Your own text
=============

Any tokenizer of Transformers will do. Here one is trained on the book that comes with the repository, and a classifier
learns to tell what is said in *Alice's Adventures in Wonderland* from what is told, without seeing the quotation
marks.
"""

# %%
# Data
# ----
#
# Paragraphs of the book are cut into what stands between quotation marks and what does not.
import re

import torch

from modeling_itnet import ITNetConfig, ITNetForSequenceClassification, optimizer_param_groups
from modeling_itnet.hub import make_tokenizer
from modeling_itnet.training.recipes import find_clone

torch.manual_seed(0)
path = find_clone() / "examples" / "data" / "alice.txt"
book = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
said = re.findall(r"‘([^‘’]{20,120})[,.!?]’", book)
told = re.findall(r"’ ([^‘’]{20,120})[,.] ‘", book)
count = min(len(said), len(told))
texts = [text.lower().strip(" ,.!?") for text in said[:count] + told[:count]]
labels = torch.tensor([1] * count + [0] * count)
print(f"{count} of each; said: {texts[0]!r}; told: {texts[-1]!r}")

# %%
# Tokenizer and model
# -------------------
#
# ``make_tokenizer`` trains byte pairs on files; ``AutoTokenizer.from_pretrained`` loads an existing one instead. A
# text of ``n`` tokens is a domain of ``n`` positions on a line.
tokenizer = make_tokenizer([path], vocab_size=800, max_length=128)
config = ITNetConfig.from_preset(
    "itnet-tiny",
    modality="text",
    vocab_size=len(tokenizer),
    pad_token_id=tokenizer.pad_token_id,
    max_position_embeddings=128,
    num_hidden_layers=2,
    kernel_hidden_size=16,
    integration_mode="exact",
    id2label={0: "told", 1: "said"},
)
model = ITNetForSequenceClassification(config)
batch = tokenizer(texts, padding=True, return_tensors="pt")  # input_ids, attention_mask [2 count, n]
print(batch["input_ids"].shape, tokenizer.tokenize(texts[0])[:8])

# %%
# Training
# --------
order = torch.randperm(2 * count)
train, test = order[: int(1.6 * count)], order[int(1.6 * count) :]
optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=0.1), lr=2e-3)
for epoch in range(3):
    for rows in train[torch.randperm(len(train))].split(32):
        ids, mask = batch["input_ids"][rows], batch["attention_mask"][rows]
        longest = int(mask.sum(1).max())  # no need to compute with what is padding in all of them
        loss = model(ids[:, :longest], attention_mask=mask[:, :longest], labels=labels[rows]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(batch["input_ids"][test], attention_mask=batch["attention_mask"][test]).logits
    model.train()
    print(f"epoch {epoch + 1}: {(logits.argmax(-1) == labels[test]).float().mean():.0%} of {len(test)} others right")

# %%
# Half of them would be right by chance.
#
# Padding
# -------
#
# Padding has measure zero: neither padding nor the other texts of a batch change an output.
model.eval()
alone = tokenizer("what do you know about this business", return_tensors="pt")
padded = tokenizer(["what do you know about this business", texts[0]], padding=True, return_tensors="pt")
with torch.no_grad():
    difference = model(**alone).logits[0] - model(**padded).logits[0]
    print(dict(zip(config.id2label.values(), model(**alone).logits.softmax(-1)[0].tolist(), strict=True)))
print(f"with and without padding: {difference.abs().max():.1e}")

# %%
# Other tasks
# -----------
#
# ``ITNetForTokenClassification``, ``ITNetForQuestionAnswering`` and ``ITNetForMaskedLM`` take the same inputs, and
# ``ITNetForCausalLM`` writes: :doc:`/generated/guides/generate`. ``itnet create itnet-tiny my-model --modality text
# --text corpus.txt`` makes a folder with model and tokenizer; ``examples/run_glue.py`` and ``examples/run_mlm.py``
# train on files (:doc:`/training`). A model that was first trained on plain text classifies better: :doc:`/results`
# has both.
