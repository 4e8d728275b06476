"""Every head learns 32 examples by heart: images of the repository, and shapes, graphs, texts and fields made here."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import BertTokenizer

from modeling_itnet import (
    ITNetConfig,
    ITNetForCausalLM,
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
PICTURES = ROOT / "examples" / "data" / "fashion_mnist_small" / "test.parquet"
COUNT = 32
# One narrow layer without dropout, and a kernel that matters from the start.
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "kernel_hidden_size": 16, "rank": 8}
SIZE |= {"num_fourier_features": 8, "kernel_init_scale": 1.0, "integration_mode": "exact"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}

COLOURS = {"red": (220, 20, 30), "green": (30, 180, 40), "blue": (20, 40, 210), "yellow": (230, 220, 30)}
SHAPES = ("circle", "square", "triangle")
WORDS = ["is", "a", "the", "what", "colour", "shape", "has", "of", "in", "picture", "left", "right", "only", "one"]
WORDS += [*COLOURS, *SHAPES, "not", "every", "some", "film", "good", "bad", "fine", "dull", "plot", "actor", "?", "."]


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


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = BertTokenizer(str(path), model_max_length=64)
    return ITNetProcessor(ITNetImageProcessor(size={"height": 32, "width": 32}), tokenizer)


def phrase(random, length: int) -> str:
    return " ".join(random.choice(WORDS, length))


def draw(shape: str, colour: str, place: tuple[int, int]) -> Image.Image:
    """A shape of 20 x 20 pixels on grey, 64 x 64."""
    picture = Image.new("RGB", (64, 64), (128, 128, 128))
    x, y = place
    corners = {"square": [(x, y), (x + 20, y), (x + 20, y + 20), (x, y + 20)]}
    corners["triangle"] = [(x, y + 20), (x + 10, y), (x + 20, y + 20)]
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse((x, y, x + 20, y + 20), fill=COLOURS[colour])
    else:
        pen.polygon(corners[shape], fill=COLOURS[colour])
    return picture


def test_images():
    rows = pq.read_table(PICTURES).slice(0, COUNT).to_pylist()
    images = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    inputs = dict(ITNetImageProcessor(size={"height": 32, "width": 32})(images, return_tensors="pt"))
    inputs["labels"] = torch.tensor([row["label"] for row in rows])
    settings = {**SIZE, **NO_DROPOUT, "image_size": 32, "patch_size": 8, "num_labels": 10}
    torch.manual_seed(0)
    model = ITNetForImageClassification(ITNetConfig(modality="image", **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_point_clouds(random):
    """Boxes and ellipsoids with random axes: which axis is the longest, and which of the two solids?"""
    clouds, labels = [], []
    for number in range(COUNT):
        directions = random.normal(size=(24, 3))
        order = 2 if number % 2 else np.inf  # |x|_2 = 1 is a sphere, |x|_inf = 1 a cube
        surface = directions / np.linalg.norm(directions, ord=order, axis=1, keepdims=True)
        axes = random.uniform(0.3, 0.6, 3)
        longest = random.integers(3)
        axes[longest] = 1.0
        clouds.append((surface * axes).astype(np.float32))
        labels.append(3 * (number % 2) + longest)
    inputs = dict(ITNetPointCloudProcessor(num_points=24)(clouds, return_tensors="pt"))
    inputs["labels"] = torch.tensor(labels)
    settings = {**SIZE, **NO_DROPOUT, "local_neighbors": 4, "fourier_scale": 1.0}
    torch.manual_seed(0)
    model = ITNetForPointCloudClassification(ITNetConfig(modality="point_cloud", num_labels=6, **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_graphs(random):
    """Rings and paths of random atoms."""
    graphs = []
    for number in range(COUNT):
        count = int(random.integers(6, 14))
        ends = np.arange(count - 1 + number % 2)
        edges = np.stack([ends, (ends + 1) % count])
        both = np.concatenate([edges, edges[::-1]], axis=1)
        graphs.append({"edge_index": both, "node_types": random.integers(0, 7, count), "y": number % 2})
    inputs = dict(ITNetGraphProcessor()(graphs, return_tensors="pt"))
    config = ITNetConfig(modality="graph", num_node_types=7, fourier_scale=1.0, **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    assert learn(ITNetForGraphClassification(config), inputs, classes(inputs)) >= 0.99


def test_visual_question_answering(processor, random):
    answers = [*COLOURS, *SHAPES]
    images, questions, labels = [], [], []
    for number in range(COUNT):
        shape, colour = random.choice(SHAPES), random.choice(list(COLOURS))
        images.append(draw(shape, colour, tuple(random.integers(0, 44, 2))))
        questions.append(["what colour has the shape ?", "what shape is in the picture ?"][number % 2])
        labels.append(answers.index([colour, shape][number % 2]))
    inputs = dict(processor(images, questions, return_tensors="pt"))
    inputs["labels"] = torch.tensor(labels)
    settings = {**SIZE, **NO_DROPOUT, "image_size": 32, "measure": "balanced", "num_labels": len(answers)}
    torch.manual_seed(0)
    model = ITNetForVisualQuestionAnswering(ITNetConfig(modality="multimodal", patch_size=16, **settings))
    assert learn(model, inputs, classes(inputs)) >= 0.99


def test_images_and_text(processor, random):
    """Is a shape of the named colour in the left picture?"""
    images, texts, labels = [], [], []
    for number in range(COUNT):
        left, right = random.choice(list(COLOURS), 2, replace=False)
        images.append([draw(random.choice(SHAPES), colour, (20, 20)) for colour in (left, right)])
        texts.append(f"the {left if number % 2 else right} shape is in the left picture .")
        labels.append(number % 2)
    inputs = dict(processor(images, texts, return_tensors="pt"))
    inputs["labels"] = torch.tensor(labels)
    config = ITNetConfig(modality="multimodal", image_size=32, patch_size=16, measure="balanced", **SIZE, **NO_DROPOUT)
    torch.manual_seed(0)
    assert learn(ITNetForImagesAndTextClassification(config), inputs, classes(inputs)) >= 0.99


def sentences(processor):
    random = np.random.default_rng(0)
    texts = [phrase(random, int(random.integers(4, 20))) for _ in range(COUNT)]
    inputs = processor.tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    return dict(inputs), torch.from_numpy(random.integers(0, 2, COUNT))


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
    model = ITNetForMaskedLM(ITNetConfig(modality="text", vocab_size=len(processor.tokenizer), **SIZE, **NO_DROPOUT))
    assert learn(model, inputs, lambda output: output.logits[:, 3].argmax(-1) == labels[:, 3]) >= 0.99


@pytest.mark.parametrize("mode", ["exact", "near_far", "low_rank"])
def test_causal_language_model(processor, mode):
    """Each token from those before it; a random first token tells the sentences apart."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 37, (COUNT, 8)))
    ids[:, 0] = torch.arange(5, 5 + COUNT)
    config = ITNetConfig(
        modality="text",
        is_causal=True,
        vocab_size=5 + COUNT,
        near_size=3,
        factor_form="matrix",
        max_position_embeddings=8,
        **{**SIZE, **NO_DROPOUT, "integration_mode": mode},
    )
    torch.manual_seed(0)

    def correct(output):
        return output.logits[:, :-1].argmax(-1) == ids[:, 1:]

    assert learn(ITNetForCausalLM(config), {"input_ids": ids, "labels": ids}, correct, steps=300) >= 0.99


def test_signals(random):
    """-Laplace(p) = f on the unit square, p = 0 around it: the solution at 8 of 64 points, to 10 % of its norm."""
    line = 2 * np.eye(8) - np.eye(8, k=1) - np.eye(8, k=-1)
    laplace = 81 * (np.kron(line, np.eye(8)) + np.kron(np.eye(8), line))  # nodes i / 9
    forces = random.normal(size=(COUNT, 64))
    solutions = torch.tensor(np.linalg.solve(laplace, forces.T).T, dtype=torch.float32)
    values = torch.tensor(forces, dtype=torch.float32)
    grid = torch.cartesian_prod(*[torch.arange(1, 9) / 9] * 2)
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
    random = np.random.default_rng(0)
    pairs = [[phrase(random, 5), phrase(random, int(random.integers(8, 14)))] for _ in range(COUNT)]
    return dict(processor.tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt"))


def test_question_answering(processor):
    """The answer begins with the longest word of the second text that the first does not hold."""
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
