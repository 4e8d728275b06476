"""Every head learns 32 real examples by heart. Needs the data sets beside the repository; skips without them."""

import io
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import BertTokenizer

from modeling_itnet import (
    ITNetConfig,
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForImagesAndTextClassification,
    ITNetForMaskedLM,
    ITNetForPointCloudClassification,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForTokenClassification,
    ITNetForVisualQuestionAnswering,
    ITNetGraphProcessor,
    ITNetImageProcessor,
    ITNetPointCloudProcessor,
    ITNetProcessor,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
COUNT = 32
# One narrow layer without dropout, and a kernel that matters from the start.
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "kernel_hidden_size": 16, "rank": 8}
SIZE |= {"num_fourier_features": 8, "kernel_init_scale": 1.0, "integration_mode": "exact"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets in {DATA}")


def read(*names: str, count: int | None = None) -> list[dict]:
    """The first rows of a parquet file."""
    return pq.read_table(DATA.joinpath(*names)).slice(0, count).to_pylist()


def learn(model, inputs, correct, steps=150, learning_rate=1e-2):
    """Trains on one batch until ``correct(output)``, a boolean tensor, holds for 99 %; returns the share."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        output = model(**inputs)
        share = correct(output).float().mean().item()
        if share >= 0.99:
            break
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return correct(model(**inputs)).float().mean().item()


def classes(inputs):
    return lambda output: output.logits.argmax(-1) == inputs["labels"]


@pytest.fixture(scope="module")
def processor():
    tokenizer = BertTokenizer(str(DATA / "wordpiece" / "vocab.txt"), model_max_length=64)
    return ITNetProcessor(ITNetImageProcessor(size={"height": 32, "width": 32}), tokenizer)


def test_images():
    rows = read("cifar10", "test.parquet", count=COUNT)
    images = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    inputs = dict(ITNetImageProcessor(size={"height": 32, "width": 32})(images, return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["label"] for row in rows])
    settings = {**SIZE, **NO_DROPOUT, "image_size": 32, "patch_size": 8, "num_labels": 10}
    torch.manual_seed(0)
    model = ITNetForImageClassification(ITNetConfig(modality="image", **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_point_clouds():
    rows = read("modelnet10", "train.parquet", count=COUNT)
    clouds = [np.array(row["points"], dtype=np.float32) for row in rows]
    inputs = dict(ITNetPointCloudProcessor(num_points=24)(clouds, return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["label"] for row in rows])
    settings = {**SIZE, **NO_DROPOUT, "local_neighbors": 4, "fourier_scale": 1.0}
    torch.manual_seed(0)
    model = ITNetForPointCloudClassification(ITNetConfig(modality="point_cloud", num_labels=10, **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_graphs():
    rows = read("graphs", "mutag.parquet")
    random.Random(0).shuffle(rows)
    graphs = [{"edge_index": r["edge_index"], "node_types": r["node_label"], "y": r["y"]} for r in rows[:COUNT]]
    inputs = dict(ITNetGraphProcessor()(graphs, return_tensors="pt"))
    config = ITNetConfig(modality="graph", num_node_types=7, fourier_scale=1.0, **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    assert learn(ITNetForGraphClassification(config), inputs, classes(inputs)) >= 0.99


def test_visual_question_answering(processor):
    rows = read("easy_vqa", "train.parquet")
    rows = [row for row in rows if not row["question"].startswith(("is ", "does ", "do "))]
    random.Random(0).shuffle(rows)  # they are sorted by image
    images = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows[:COUNT]]
    inputs = dict(processor(images, [row["question"] for row in rows[:COUNT]], return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["answer"] for row in rows[:COUNT]])
    settings = {**SIZE, **NO_DROPOUT, "image_size": 32, "measure": "balanced", "num_labels": 13}
    torch.manual_seed(0)
    model = ITNetForVisualQuestionAnswering(ITNetConfig(modality="multimodal", patch_size=16, **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_images_and_text(processor):
    """NLVR: the left and the right half of the picture are the two images."""
    rows = read("nlvr", "train.parquet", count=6 * COUNT)[::6]  # one of six permutations
    images = []
    for row in rows:
        picture = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        half = picture.width // 2
        images.append([picture.crop((0, 0, half, picture.height)), picture.crop((half, 0, 2 * half, picture.height))])
    inputs = dict(processor(images, [row["sentence"] for row in rows], return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["label"] for row in rows])
    assert len(set(inputs["labels"].tolist())) == 2
    config = ITNetConfig(modality="multimodal", image_size=32, patch_size=16, measure="balanced", **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    assert learn(ITNetForImagesAndTextClassification(config), inputs, classes(inputs)) >= 0.99


def sentences(processor):
    rows = read("glue", "sst2", "validation.parquet", count=COUNT)
    inputs = processor.tokenizer([row["sentence"] for row in rows], padding=True, truncation=True, max_length=24)
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    return inputs, torch.tensor([row["label"] for row in rows])


def test_sequence_classification(processor):
    inputs, labels = sentences(processor)
    inputs["labels"] = labels
    torch.manual_seed(0)
    model = ITNetForSequenceClassification(ITNetConfig(modality="text", num_labels=2, **SIZE, **NO_DROPOUT))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_masked_language_model(processor):
    """The third token of each sentence is hidden."""
    inputs = {name: ids[:, :8].contiguous() for name, ids in sentences(processor)[0].items()}
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 3] = inputs["input_ids"][:, 3]
    inputs["input_ids"][:, 3] = processor.tokenizer.mask_token_id
    inputs["labels"] = labels
    torch.manual_seed(0)
    model = ITNetForMaskedLM(ITNetConfig(modality="text", **SIZE, **NO_DROPOUT))
    assert learn(model, inputs, lambda output: output.logits[:, 3].argmax(-1) == labels[:, 3]) >= 0.99


def test_signals():
    """Darcy flow on every second point of the grid: the solution at 8 of the points, to 10 % of its norm."""
    arrays = np.load(DATA / "pde" / "darcy_test_16.npz")
    grid = torch.cartesian_prod(*[(torch.arange(8) + 0.25) / 8] * 2)
    values, solutions = (torch.tensor(arrays[name][:COUNT, ::2, ::2]).float().flatten(1) for name in "xy")
    asked = torch.arange(4, 64, 8)
    labels = solutions[:, asked, None] / solutions.std()
    inputs = {"signal_values": values.unsqueeze(-1), "positions": grid, "query_positions": grid[asked]}
    config = {**SIZE, **NO_DROPOUT, "integration_mode": "low_rank", "fourier_scale": 1.0}
    torch.manual_seed(0)
    model = ITNetForSignalRegression(
        ITNetConfig(modality="signal", position_dim=2, signal_feature_size=1, num_labels=1, **config)
    )

    def correct(output):
        return (output.predictions - labels).square().mean((1, 2)).sqrt() < 0.1 * labels.square().mean((1, 2)).sqrt()

    assert learn(model, {**inputs, "labels": labels}, correct, steps=600) >= 0.99


def questions(processor):
    rows = read("glue", "qnli", "validation.parquet")
    rows = [row for row in rows if row["label"] == 0 and len(row["sentence"]) < 120][:COUNT]
    inputs = processor.tokenizer([row["question"] for row in rows], [row["sentence"] for row in rows], padding=True)
    return {name: torch.tensor(value) for name, value in inputs.items()}


def test_question_answering(processor):
    """QNLI has no spans: the answer is the longest word of the sentence that the question does not hold."""
    inputs = questions(processor)
    starts = []
    for ids, kinds in zip(inputs["input_ids"].tolist(), inputs["token_type_ids"].tolist(), strict=True):
        second = [i for i, kind in enumerate(kinds) if kind == 1 and ids[i] not in ids[: kinds.index(1)]]
        starts.append(max(second, key=lambda i, ids=ids: len(processor.tokenizer.decode([ids[i]]))))
    start = torch.tensor(starts)
    end = torch.minimum(start + 1, inputs["attention_mask"].sum(1) - 1)
    config = ITNetConfig(modality="text", **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)

    def correct(output):
        return (output.start_logits.argmax(-1) == start) & (output.end_logits.argmax(-1) == end)

    inputs |= {"start_positions": start, "end_positions": end}
    assert learn(ITNetForQuestionAnswering(config), inputs, correct) >= 0.99


def test_token_classification(processor):
    """Which tokens of a sentence also occur in the question?"""
    inputs = questions(processor)
    ids, kinds, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    in_question = ((ids.unsqueeze(2) == ids.unsqueeze(1)) & ((kinds == 0) & (mask == 1)).unsqueeze(1)).any(2)
    labels = in_question.long().where((kinds == 1) & (mask == 1), -100)
    config = ITNetConfig(modality="text", num_labels=2, **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    asked = labels != -100
    inputs["labels"] = labels
    model = ITNetForTokenClassification(config)
    assert learn(model, inputs, lambda output: (output.logits.argmax(-1) == labels)[asked]) >= 0.99
