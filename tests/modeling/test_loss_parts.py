"""Every head has the same loss and gradient whether Trainer takes a batch at once or in parts, of unequal size too."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from modeling_itnet import (
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
)

ROWS, LENGTH = 5, 7


def rows(**columns: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{name: values[row] for name, values in columns.items()} for row in range(ROWS)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(len(shape)))


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(ROWS, *shape, generator=torch.Generator().manual_seed(9))


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, high, (ROWS, *shape), generator=torch.Generator().manual_seed(7))


PIXELS, TOKENS, CLASSES = normal(3, 16, 16), integers(40, LENGTH), torch.arange(ROWS) % 3
SOME_TOKENS = torch.where(torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4, TOKENS, -100)
QUERIES = torch.tensor([[1] * 4, [1, 0, 0, 0], [1, 1, 0, 0], [1] * 4, [1, 1, 1, 0]])
# id -> class, modality, settings, rows.
HEADS = {
    "classes": (ITNetForImageClassification, "image", {}, {"pixel_values": PIXELS, "labels": CLASSES}),
    "regression": (
        ITNetForImageClassification,
        "image",
        {"num_labels": 1},
        {"pixel_values": PIXELS, "labels": normal()},
    ),
    "several-labels": (
        ITNetForSequenceClassification,
        "text",
        {},
        {"input_ids": TOKENS, "labels": (uniform(3) > 0.5).float()},
    ),
    "masked-lm": (ITNetForMaskedLM, "text", {}, {"input_ids": TOKENS, "labels": SOME_TOKENS}),
    "tokens": (ITNetForTokenClassification, "text", {}, {"input_ids": TOKENS, "labels": SOME_TOKENS.clamp(max=2)}),
    "spans": (
        ITNetForQuestionAnswering,
        "text",
        {},
        {"input_ids": TOKENS, "start_positions": CLASSES, "end_positions": CLASSES + 2},
    ),
    "points": (
        ITNetForPointCloudClassification,
        "point_cloud",
        {"local_neighbors": 3},
        {"points": normal(LENGTH, 3), "labels": CLASSES},
    ),
    "graphs": (
        ITNetForGraphClassification,
        "graph",
        {"num_node_types": 40},
        {
            "node_types": TOKENS,
            "positions": normal(LENGTH, 8),
            "neighbors": integers(LENGTH, LENGTH, 2),
            "labels": CLASSES,
        },
    ),
    "soft-answers": (
        ITNetForVisualQuestionAnswering,
        "multimodal",
        {},
        {"pixel_values": PIXELS, "input_ids": TOKENS, "labels": uniform(3)},
    ),
    "one-answer": (
        ITNetForVisualQuestionAnswering,
        "multimodal",
        {},
        {"pixel_values": PIXELS, "input_ids": TOKENS, "labels": CLASSES},
    ),
    "two-images": (
        ITNetForImagesAndTextClassification,
        "multimodal",
        {},
        {"pixel_values": normal(2, 3, 16, 16), "input_ids": TOKENS, "labels": CLASSES},
    ),
    "signals": (
        ITNetForSignalRegression,
        "signal",
        {"signal_feature_size": 2},
        {
            "signal_values": normal(LENGTH, 2),
            "positions": uniform(LENGTH, 2),
            "query_positions": uniform(4, 2),
            "query_mask": QUERIES,
            "labels": normal(4, 3),
        },
    ),
}
EQUAL_PARTS = ("spans", "signals")  # Trainer cannot count their samples: parts of one size only


def first_step(model, data, batch: int, parts: int, folder) -> tuple[float, float]:
    """Loss and norm of the gradient of the first optimizer step."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=parts,
        max_grad_norm=1e9,
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    entry = trainer.state.log_history[0]
    return entry["loss"], float(entry["grad_norm"])


@pytest.mark.parametrize("name", HEADS)
def test_parts_of_a_batch(tiny_config, shake, tmp_path, name):
    head, modality, settings, columns = HEADS[name]
    data = rows(**columns)
    whole, part = ROWS, 3  # 3 + 2
    if name in EQUAL_PARTS:
        data, whole, part = data[:4], 4, 2
    torch.manual_seed(0)
    model = shake(head(tiny_config(modality, integration_mode="exact", **settings)))
    expected = first_step(model, data, whole, 1, tmp_path)
    assert expected[0] > 0.1 and expected[1] > 0.1
    assert first_step(model, data, part, 2, tmp_path) == pytest.approx(expected, rel=1e-5)


def test_shares_add_up(tiny_config, shake):
    """Parts of a batch, one of them without any label, add up to the mean over what is not -100; so do the parts of
    the proposal loss."""
    torch.manual_seed(0)
    model = shake(ITNetForMaskedLM(tiny_config("text", integration_mode="monte_carlo"))).eval()
    labels = SOME_TOKENS.clone()
    labels[3:] = -100
    asked = labels != -100
    logits, parts = model(input_ids=TOKENS).logits, (slice(0, 1), slice(1, 3), slice(3, 5))
    expected = F.cross_entropy(logits[asked], labels[asked])
    losses = [model(input_ids=TOKENS[p], labels=labels[p], num_items_in_batch=asked.sum()).loss for p in parts]
    assert losses[2] == 0
    torch.testing.assert_close(sum(losses), expected)
    torch.testing.assert_close(model(input_ids=TOKENS, labels=labels).loss, expected)
    for part in parts:
        values = []
        for weight in (0.0, 1.0):
            model.train().config.proposal_loss_weight = weight
            torch.manual_seed(1)
            given = {"input_ids": TOKENS[part], "labels": labels[part], "num_items_in_batch": asked.sum()}
            values.append(model(**given))
        share = asked[part].sum() / asked.sum()
        torch.testing.assert_close(values[1].loss - values[0].loss, share * values[1].proposal_loss)
