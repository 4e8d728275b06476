"""One tiny model of every class, with inputs and labels, for the tests of this folder."""

from typing import NamedTuple

import pytest
import torch
from transformers.utils import logging

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
    ITNetModel,
)

VOCABULARY, BATCH, LENGTH = 40, 3, 7


class Case(NamedTuple):
    model_class: type
    modality: str
    auto_class: str
    overrides: dict = {}


CASES = {
    "image": Case(ITNetModel, "image", "AutoModel"),
    "image-classification": Case(ITNetForImageClassification, "image", "AutoModelForImageClassification"),
    "causal-lm": Case(ITNetForCausalLM, "text", "AutoModelForCausalLM", {"is_causal": True}),
    "masked-lm": Case(ITNetForMaskedLM, "text", "AutoModelForMaskedLM"),
    "sequence-classification": Case(ITNetForSequenceClassification, "text", "AutoModelForSequenceClassification"),
    "token-classification": Case(ITNetForTokenClassification, "text", "AutoModelForTokenClassification"),
    "question-answering": Case(ITNetForQuestionAnswering, "text", "AutoModelForQuestionAnswering"),
    "visual-question-answering": Case(
        ITNetForVisualQuestionAnswering, "multimodal", "AutoModelForVisualQuestionAnswering", {"measure": "balanced"}
    ),
    "images-and-text": Case(
        ITNetForImagesAndTextClassification, "multimodal", "AutoModelForSequenceClassification", {"measure": [3, 1]}
    ),
    "point-cloud": Case(
        ITNetForPointCloudClassification, "point_cloud", "AutoModelForSequenceClassification", {"local_neighbors": 3}
    ),
    "graph": Case(ITNetForGraphClassification, "graph", "AutoModelForSequenceClassification", {"num_node_types": 5}),
    "signal": Case(
        ITNetForSignalRegression,
        "signal",
        "AutoModelForTimeSeriesPrediction",
        {"signal_feature_size": 2, "position_dim": 2},
    ),
}


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return CASES


@pytest.fixture(scope="session")
def make_model(tiny_sizes):
    """make_model(name, **overrides): a model of CASES in evaluation mode, no parameter at its initial value."""

    def make(name, **overrides):
        case = CASES[name]
        torch.manual_seed(0)
        model = case.model_class(
            ITNetConfig(**{**tiny_sizes, "modality": case.modality, **case.overrides, **overrides})
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def make_inputs():
    """make_inputs(name, batch): forward arguments without labels."""

    def make(name, batch=BATCH, length=LENGTH, seed=2):
        generator = torch.Generator().manual_seed(seed)
        modality = CASES[name].modality
        text = {"input_ids": torch.randint(1, VOCABULARY, (batch, length), generator=generator)}
        images = (2,) if name == "images-and-text" else ()
        image = {"pixel_values": torch.randn(batch, *images, 3, 16, 16, generator=generator)}
        points = torch.randn(batch, length, 3, generator=generator)
        if modality == "text":
            return text
        if modality == "image":
            return image
        if modality == "multimodal":
            return {**image, **text}
        if modality == "point_cloud":
            return {"points": points}
        if modality == "graph":
            neighbors = torch.randint(-1, length, (batch, length, 3), generator=generator)
            types = torch.randint(5, (batch, length), generator=generator)
            positions = torch.randn(batch, length, 8, generator=generator)
            return {"node_types": types, "positions": positions, "neighbors": neighbors}
        return {"signal_values": points[..., :2].clone(), "positions": torch.rand(length, 2, generator=generator)}

    return make


@pytest.fixture(scope="session")
def make_labels():
    """make_labels(name, batch): what turns the inputs into a training step of a head."""

    def make(name, batch=BATCH, length=LENGTH, seed=3):
        generator = torch.Generator().manual_seed(seed)
        if name == "question-answering":
            return {"start_positions": torch.arange(batch) % length, "end_positions": torch.arange(batch) % length}
        if name in ("causal-lm", "masked-lm", "token-classification"):
            return {"labels": torch.randint(3, (batch, length), generator=generator)}
        if name == "signal":
            return {"labels": torch.randn(batch, length, 3, generator=generator)}
        return {"labels": torch.arange(batch) % 3}

    return make


@pytest.fixture(scope="session")
def predictions():
    """predictions(output): the tensors that a model is for."""
    names = ("logits", "start_logits", "end_logits", "predictions", "last_hidden_state")
    return lambda output: {name: output[name] for name in names if name in output}
