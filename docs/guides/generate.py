"""
A language model that writes
============================

This trains a small causal model on a bundled book, *Alice's Adventures in Wonderland* by Lewis Carroll, and lets it
write. It trains and generates as any causal language model of Transformers does: ``Trainer``, ``generate``, pipelines,
streaming and LoRA need nothing of their own.
"""

# %%
# Model and tokenizer
# -------------------
#
# ``create_checkpoint`` does what ``itnet create itnet-tiny alice --task causal-lm --text alice.txt`` does: a folder
# with random weights, a tokenizer that is trained on the text, a card and code.
import tempfile

import torch
from transformers import AutoTokenizer

from modeling_itnet.hub import create_checkpoint
from modeling_itnet.training.recipes import find_clone

torch.manual_seed(0)
book = find_clone() / "examples" / "data" / "alice.txt"
folder = tempfile.mkdtemp()
model = create_checkpoint("itnet-tiny", folder, task="causal-lm", texts=[book], vocab_size=1000)
tokenizer = AutoTokenizer.from_pretrained(folder)
config = model.config
print(f"{model.num_parameters():,} parameters, {config.integration_mode}, windows of {config.near_size} tokens")

# %%
# The default of a language model is ``near_far``: the full kernel on the last tokens, and a far field whose state
# has a fixed size, so that a token costs the same after ten others and after ten thousand.
#
# Training
# --------
#
# The head shifts the labels itself.
tokens = torch.tensor(tokenizer.encode(book.read_text(encoding="utf-8"), verbose=False))
steps, length = 100, 64
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1)
for step in range(steps):
    batch = torch.stack([tokens[start : start + length] for start in torch.randint(len(tokens) - length, (8,))])
    loss = model.train()(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 25 == 0 or step == steps - 1:
        print(f"step {step}: {loss:.2f} nats per token")

# %%
# Writing
# -------
#
# After seconds of training it knows some words and no sentences. ``python examples/generate_text.py`` trains for about
# a minute; :doc:`/language` has what larger models reach on more text, beside GPT-2, Llama and Mamba of the same size.
model.eval()
prompt = tokenizer("Alice was", return_tensors="pt")
written = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=40)
print(tokenizer.decode(written[0]))

# %%
# Beams, several texts at once with padding on the left, and assisted decoding work as always; they are exact in every
# integration mode.
batch = tokenizer(["Alice", "The Queen of Hearts"], padding=True, return_tensors="pt")
for text in tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8, num_beams=3), skip_special_tokens=True):
    print(text)

# %%
# The cache
# ---------
#
# ``generate`` keeps what was read in an ``ITNetCache``. Texts may be read in pieces, and tokens taken back.
from modeling_itnet import ITNetCache

cache = ITNetCache(config)
ids = tokens[None, :50]
with torch.no_grad():
    whole = model(ids).logits
    model(ids[:, :20], past_key_values=cache)
    model(ids[:, 30:33], past_key_values=cache)  # three tokens that do not belong there
    cache.crop(-3)  # and are taken back
    rest = model(ids[:, 20:], past_key_values=cache).logits
print(f"in pieces and whole: {(rest - whole[:, 20:]).abs().max():.1e}; the cache holds {cache.nbytes:,} bytes")

# %%
# :doc:`/generation` says what a cache keeps in each mode and what is exact, packs several documents into one row, and
# exports one step of decoding as a graph. ``itnet generate FOLDER "Alice was"`` writes on a terminal.
