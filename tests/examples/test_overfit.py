"""Every head learns 32 real examples by heart. Needs the data sets beside the repository; skips without them."""

import io
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from modeling_itnet import (
    ITNetConfig,
    ITNetForImagesAndTextClassification,
    ITNetForQuestionAnswering,
    ITNetForTokenClassification,
    ITNetImageProcessor,
    ITNetProcessor,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
COUNT = 32
# One narrow layer without dropout, and a kernel that matters from the start.
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "kernel_hidden_size": 16, "rank": 8}
SIZE |= {"num_fourier_features": 8, "kernel_init_scale": 1.0, "integration_mode": "exact"}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets in {DATA}")


@pytest.fixture(scope="module")
def small_tasks():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import small_tasks
    finally:
        sys.path.remove(str(ROOT / "examples"))
    return small_tasks


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
def processor(small_tasks):
    tokenizer = small_tasks.BertTokenizer(str(DATA / "wordpiece" / "vocab.txt"), model_max_length=64)
    return ITNetProcessor(ITNetImageProcessor(size={"height": 32, "width": 32}), tokenizer)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("modelnet10", {"num_points": 24, "local_neighbors": 4}), ("mutag", {}), ("easy_vqa", {"image_size": 32})],
)
def test_small_tasks(small_tasks, name, settings):
    task = small_tasks.TASKS[name](
        DATA, COUNT, **{**SIZE, **settings}, **({"num_folds": 10**9} if name == "mutag" else {})
    )
    rows = task.train + (task.test if name == "mutag" else [])
    assert len(rows) == COUNT
    torch.manual_seed(0)
    inputs = task.collate(rows, False)
    assert learn(task.make_model(), inputs, classes(inputs)) >= 0.99


def test_images_and_text(small_tasks, processor):
    """NLVR: the left and the right half of the picture are the two images."""
    rows = small_tasks.read(DATA / "nlvr" / "train.parquet", 6 * COUNT)[::6]  # one of six permutations
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


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}


def questions(small_tasks, processor):
    rows = small_tasks.read(DATA / "glue" / "qnli" / "validation.parquet")
    rows = [row for row in rows if row["label"] == 0 and len(row["sentence"]) < 120][:COUNT]
    inputs = processor.tokenizer([row["question"] for row in rows], [row["sentence"] for row in rows], padding=True)
    return {name: torch.tensor(value) for name, value in inputs.items()}


def test_question_answering(small_tasks, processor):
    """QNLI has no spans: the answer is the longest word of the sentence that the question does not hold."""
    inputs = questions(small_tasks, processor)
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


def test_token_classification(small_tasks, processor):
    """Which tokens of a sentence also occur in the question?"""
    inputs = questions(small_tasks, processor)
    ids, kinds, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    in_question = ((ids.unsqueeze(2) == ids.unsqueeze(1)) & ((kinds == 0) & (mask == 1)).unsqueeze(1)).any(2)
    labels = in_question.long().where((kinds == 1) & (mask == 1), -100)
    config = ITNetConfig(modality="text", num_labels=2, **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    asked = labels != -100
    inputs["labels"] = labels
    model = ITNetForTokenClassification(config)
    assert learn(model, inputs, lambda output: (output.logits.argmax(-1) == labels)[asked]) >= 0.99
