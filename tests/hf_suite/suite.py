"""Transformers' own model tests on our classes. `run.py` puts this file among them; see docs/hf_compat.md.

Every family is one modality with the bare model and its heads. What we skip by name is skipped here, with the reason.
"""

import copy
import importlib.util
import sys
import unittest
from unittest import mock

import torch
from transformers import PreTrainedConfig
from transformers.distributed import tensor_parallel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

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

# What tests of 5.16 expect, and later versions have renamed or dropped.
if not hasattr(tensor_parallel, "_get_parameter_tp_plan"):
    tensor_parallel._get_parameter_tp_plan = tensor_parallel._get_parameter_plan
if not hasattr(PreTrainedConfig, "has_no_defaults_at_init"):
    PreTrainedConfig.has_no_defaults_at_init = False
if importlib.util.find_spec("httpx") is None:  # the Hub client has moved on to httpx2
    sys.modules["httpx"] = importlib.import_module("httpx2")
# The tests know by these tables which models have no loss, and which are classifiers.
MODEL_MAPPING_NAMES["itnet"] = "ITNetModel"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["itnet"] = "ITNetForSequenceClassification"
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["itnet"] = "ITNetForImageClassification"

from .generation.test_utils import GenerationTesterMixin  # noqa: E402
from .test_configuration_common import ConfigTester  # noqa: E402
from .test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor  # noqa: E402

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "num_fourier_features": 4,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 16,
    "image_size": 16,
    "patch_size": 8,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
    "embedding_dropout_prob": 0.1,
    "drop_path_rate": 0.1,
}


class Tester:
    """What the mixin asks of a model's tester."""

    batch_size, seq_length, is_training = 5, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = (
        TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )

    def __init__(self, config: dict, inputs, seq_length: int):
        self.config, self.inputs, self.seq_length = config, inputs, seq_length

    def get_config(self):
        return ITNetConfig(**{**TINY, **self.config})

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.inputs(self)


def skip(names: str, reason: str):
    """A class decorator: skips the tests of these names."""

    def decorate(cls):
        for name in names.split():
            setattr(cls, name, unittest.skip(reason)(lambda self: None))
        return cls

    return decorate


@skip(
    "test_onnx_export_static test_onnx_export_dynamic",
    "Transformers' exporter does not know our sum over pairs; modeling_itnet.hub.onnx_export does",
)
class Family(ModelTesterMixin):
    has_attentions = False
    test_resize_embeddings = False
    config, labels, positions = {}, {}, Tester.seq_length
    has_text = False

    def setUp(self):
        self.model_tester = Tester({**self.config, **self.labels}, type(self).inputs, self.positions)
        self.config_tester = ConfigTester(
            self, config_class=ITNetConfig, has_text_modality=self.has_text, **{**TINY, **self.config}
        )

    def test_config(self):
        self.config_tester.run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        """The tables of Transformers do not know our names, and so give no labels."""
        inputs = copy.deepcopy(inputs_dict)
        if model_class is ITNetForImagesAndTextClassification:
            inputs["pixel_values"] = inputs["pixel_values"].unsqueeze(1).repeat(1, 2, 1, 1, 1)
        if not return_labels or model_class is ITNetModel:
            return inputs
        tester, zeros = self.model_tester, torch.zeros
        if model_class is ITNetForQuestionAnswering:
            answers = zeros(tester.batch_size, dtype=torch.long)
            return {**inputs, "start_positions": answers, "end_positions": answers.clone()}
        if model_class in (ITNetForCausalLM, ITNetForMaskedLM, ITNetForTokenClassification):
            return {**inputs, "labels": zeros(tester.batch_size, tester.seq_length, dtype=torch.long)}
        if model_class is ITNetForSignalRegression:
            return {**inputs, "labels": zeros(tester.batch_size, tester.seq_length, 2)}
        return {**inputs, "labels": zeros(tester.batch_size, dtype=torch.long)}


NO_TEXT = "the input is not a text: there are no token embeddings, ids or masks of tokens"


@skip("test_inputs_embeds test_inputs_embeds_matches_input_ids test_model_get_set_embeddings", NO_TEXT)
class ImageTest(Family, unittest.TestCase):
    all_model_classes = (ITNetModel, ITNetForImageClassification)
    positions = 5

    def inputs(tester):
        return {"pixel_values": floats_tensor([tester.batch_size, 3, 16, 16])}


class TextTest(Family, unittest.TestCase):
    all_model_classes = (
        ITNetModel,
        ITNetForMaskedLM,
        ITNetForSequenceClassification,
        ITNetForTokenClassification,
        ITNetForQuestionAnswering,
    )
    config = {"modality": "text"}
    test_resize_embeddings = True
    has_text = True

    def inputs(tester):
        shape = [tester.batch_size, tester.seq_length]
        return {"input_ids": ids_tensor(shape, 98) + 1, "attention_mask": torch.ones(shape, dtype=torch.long)}


class NearFarTest(TextTest):
    """Another mode of integration: with windows of their own, and with parameters of two kinds of kernels."""

    config = {"modality": "text", "integration_mode": "near_far", "near_size": 3, "rank": 2, "factor_form": "matrix"}


class CausalTest(GenerationTesterMixin, TextTest):
    """Models that see the past alone, and generate."""

    all_model_classes = (
        ITNetModel,
        ITNetForCausalLM,
        ITNetForSequenceClassification,
        ITNetForTokenClassification,
        ITNetForQuestionAnswering,
    )
    causal = {"modality": "text", "is_causal": True, "bos_token_id": 1}
    config = {**causal, "integration_mode": "exact"}

    # The suite leaves these to models with attention weights or recurrent layers; ours must pass them as well.

    def test_left_padding_compatibility(self):
        with mock.patch.object(self, "has_attentions", True):
            super().test_left_padding_compatibility()

    def test_eager_padding_matches_padding_free_with_position_ids(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        inputs["attention_mask"][0, :3] = inputs["attention_mask"][1, :1] = 0
        with (
            mock.patch.object(self, "has_attentions", True),
            mock.patch.object(ITNetForCausalLM, "_supports_attention_backend", True),
            mock.patch.object(self.model_tester, "prepare_config_and_inputs_for_common", lambda: (config, inputs)),
        ):
            super().test_eager_padding_matches_padding_free_with_position_ids()

    def test_recurrent_layers_mask_padding_on_continued_forward(self):
        with mock.patch.object(ITNetConfig, "layer_types", ["linear_attention"] * 2, create=True):
            super().test_recurrent_layers_mask_padding_on_continued_forward()


class CausalNearFarTest(CausalTest):
    factors = {"rank": 2, "factor_form": "matrix", "factor_decay": True, "output_gate": True}
    config = {**CausalTest.causal, **factors, "integration_mode": "near_far", "near_size": 3}


class CausalLowRankTest(CausalTest):
    config = {**CausalTest.causal, "integration_mode": "low_rank", "rank": 2}


class CausalMatrixTest(CausalTest):
    config = {**CausalTest.causal, **CausalNearFarTest.factors, "integration_mode": "low_rank"}


class CausalMonteCarloTest(CausalTest):
    config = {**CausalTest.causal, "integration_mode": "monte_carlo", "num_samples": 3}


class MultimodalTest(Family, unittest.TestCase):
    all_model_classes = (ITNetModel, ITNetForVisualQuestionAnswering, ITNetForImagesAndTextClassification)
    config = {"modality": "multimodal"}
    labels = {"id2label": {0: "no", 1: "yes"}}  # or the VQA head makes 3,129
    positions = 12
    test_resize_embeddings = True
    has_text = True

    def inputs(tester):
        return {
            "pixel_values": floats_tensor([tester.batch_size, 3, 16, 16]),
            "input_ids": ids_tensor([tester.batch_size, 7], 98) + 1,
            "attention_mask": torch.ones(tester.batch_size, 7, dtype=torch.long),
        }


@skip("test_inputs_embeds test_inputs_embeds_matches_input_ids test_model_get_set_embeddings", NO_TEXT)
class PointCloudTest(Family, unittest.TestCase):
    all_model_classes = (ITNetModel, ITNetForPointCloudClassification)
    config = {"modality": "point_cloud", "local_neighbors": 3}

    def inputs(tester):
        return {"points": floats_tensor([tester.batch_size, tester.seq_length, 3])}


@skip("test_inputs_embeds test_inputs_embeds_matches_input_ids test_model_get_set_embeddings", NO_TEXT)
class GraphTest(Family, unittest.TestCase):
    all_model_classes = (ITNetModel, ITNetForGraphClassification)
    config = {"modality": "graph", "node_feature_size": 2}

    def inputs(tester):
        shape = [tester.batch_size, tester.seq_length]
        return {
            "node_features": floats_tensor([*shape, 2]),
            "positions": floats_tensor([*shape, 8]),
            "neighbors": ids_tensor([*shape, 3], tester.seq_length),
        }


@skip("test_inputs_embeds test_inputs_embeds_matches_input_ids test_model_get_set_embeddings", NO_TEXT)
class SignalTest(Family, unittest.TestCase):
    all_model_classes = (ITNetModel, ITNetForSignalRegression)
    config = {"modality": "signal", "position_dim": 2, "signal_feature_size": 3}

    def inputs(tester):
        shape = [tester.batch_size, tester.seq_length]
        return {"signal_values": floats_tensor([*shape, 3]), "positions": floats_tensor([*shape, 2])}
