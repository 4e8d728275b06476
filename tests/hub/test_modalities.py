"""A modality from outside the package: two files, and a row in the table."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoFeatureExtractor, AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING

from configuration_itnet import MODALITIES, find_task
from modeling_itnet import Head, ITNetConfig, ITNetImageProcessor, ITNetModel, Modality, register_modality
from modeling_itnet.hub import create_checkpoint, flatten, model_card
from modeling_itnet.hub.auto import register_auto_classes
from modeling_itnet.modalities import load

ISOLATED = Path(__file__).with_name("isolated.py")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_fourier_features": 3,
    "kernel_hidden_size": 12,
    "hidden_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
# Levels of water at times of the day, which lie on a circle.
CODE = """
import numpy as np
import torch
from torch import nn
from transformers.feature_extraction_utils import BatchFeature, FeatureExtractionMixin

from modeling_itnet import Domain, Signal
from itnet_kernels.measure import uniform_measure
from modeling_itnet.heads.common import ITNetPooledClassifier
from .circle import on_circle


class TideEncoder(nn.Module):
    required = ("levels",)
    optional = ("hours",)
    main_input_name = "levels"

    def __init__(self, config, position_size):
        super().__init__()
        self.lift = nn.Linear(1, config.hidden_size)
        self.season = nn.Parameter(torch.empty(config.hidden_size))

    def reset_own_parameters(self, config):
        nn.init.constant_(self.season, 0.5)

    def input_embeddings(self):
        return self.lift

    def forward(self, fourier, levels, hours=None):
        features = self.lift(levels.unsqueeze(-1)) + self.season
        hours = torch.arange(levels.shape[1], device=levels.device) if hours is None else hours
        return Signal(features, Domain(on_circle(hours), uniform_measure(features), fourier.frequencies))


class ITNetForTideClassification(ITNetPooledClassifier):
    modality = "tides"

    def forward(self, levels=None, hours=None, labels=None, **kwargs):
        outputs = self.itnet(levels=levels, hours=hours, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return self.output(outputs, {"logits": logits}, labels, **kwargs)


class TideProcessor(FeatureExtractionMixin):
    model_input_names = ["levels"]

    @classmethod
    def from_model_config(cls, config):
        return cls()

    def __call__(self, levels, return_tensors=None):
        return BatchFeature({"levels": np.asarray(levels, dtype=np.float32)}, tensor_type=return_tensors)
"""
CIRCLE = '''
import math

import torch


def on_circle(hours):
    """Hours of the day -> points of the unit circle [n, 2]."""
    angles = hours * (2 * math.pi / 24)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)
'''


@pytest.fixture
def tides(tmp_path, monkeypatch):
    """The module of a modality "tides", in a package of its own, while it is registered."""
    (tmp_path / "outside" / "tides").mkdir(parents=True)
    for name, text in (("__init__", ""), ("model", CODE), ("circle", CIRCLE)):
        (tmp_path / "outside" / "tides" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "outside")
    for name in ("tides", "tides.model", "tides.circle"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    flatten.read_module.cache_clear()
    tides = importlib.import_module("tides.model")
    register_modality(
        Modality(
            "tides",
            position_dim=2,
            encoder=tides.TideEncoder,
            heads=(Head(tides.ITNetForTideClassification, "AutoModelForSequenceClassification", "time-series"),),
            processor=tides.TideProcessor,
            title="levels of water",
            inputs="`levels`, hour by hour",
        )
    )
    yield tides
    del MODALITIES["tides"]
    # Transformers finds processors by the names of their classes; the next test has another class of this name.
    FEATURE_EXTRACTOR_MAPPING._extra_content.pop(tides.TideProcessor)
    register_auto_classes()


def test_trains_saves_loads_and_exports(tides, tmp_path):
    """A quarter of a day earlier or later: the levels are the same on average, so that positions decide."""
    torch.manual_seed(0)
    model = tides.ITNetForTideClassification(ITNetConfig(modality="tides", fourier_scale=0.3, num_labels=2, **SIZES))
    assert model.itnet.encoder.season.eq(0.5).all() and model.itnet.main_input_name == "levels"
    hours = torch.arange(24.0)
    shift = 6.0 * (torch.arange(32) % 2)
    levels = torch.sin((hours + shift.unsqueeze(1)) * (2 * torch.pi / 24)) + 0.1 * torch.randn(32, 24)
    labels = torch.arange(32) % 2
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(levels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    with torch.no_grad():
        expected = model.eval()(levels).logits
        features = model.itnet(levels=levels, hours=hours).last_hidden_state
    processor = tides.TideProcessor()
    model.save_pretrained(tmp_path / "saved", processor=processor)
    assert AutoConfig.from_pretrained(tmp_path / "saved").modality == "tides"
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert type(again) is tides.ITNetForTideClassification
    bare = AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert type(bare) is ITNetModel
    assert type(AutoFeatureExtractor.from_pretrained(tmp_path / "saved")) is tides.TideProcessor
    with torch.no_grad():
        torch.testing.assert_close(again(levels=levels).logits, expected)
        torch.testing.assert_close(bare(levels).last_hidden_state, features)
    requests = {}
    for name, exported, output, auto_class in (
        ("head", model, {"logits": expected}, "AutoModelForSequenceClassification"),
        ("bare", bare, {"last_hidden_state": features}, "AutoModel"),
    ):
        exported.save_pretrained(tmp_path / name, with_code=True, processor=processor)
        files = {path.stem for path in (tmp_path / name).glob("*.py")}
        assert {"tides_model", "tides_circle"} < files and not any("encoders" in file for file in files)
        save_file({"levels": levels}, tmp_path / f"{name}-in.safetensors")
        save_file(output, tmp_path / f"{name}-out.safetensors")
        requests[name] = {
            "auto_class": auto_class,
            "folder": str(tmp_path / name),
            "inputs": str(tmp_path / f"{name}-in.safetensors"),
            "outputs": str(tmp_path / f"{name}-out.safetensors"),
            "processors": ["AutoFeatureExtractor"],
            "resave": str(tmp_path / f"{name}-again"),
        }
    result = subprocess.run(
        [sys.executable, "-I", str(ISOLATED)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report.pop("blocked") == []
    for name in requests:
        assert all(report[name]["equal"].values()) and all(report[name]["equal again"].values()), name
        assert report[name]["processors"] == {"AutoFeatureExtractor": "TideProcessor"}


def test_cards_tasks_and_new_checkpoints_know_it(tides, tmp_path):
    head, row = find_task("tide-classification")
    assert (head, row) == find_task("time-series")
    assert (load(head.model), row.name) == (tides.ITNetForTideClassification, "tides")
    model = create_checkpoint("itnet-tiny", tmp_path / "new", task="tide-classification")
    assert type(model) is tides.ITNetForTideClassification
    assert json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))["modality"] == "tides"
    card = str(model_card("tides", model.config, type(model)))
    assert "levels of water" in card and "`levels`, hour by hour" in card and "pipeline_tag: time-series" in card
    # Other modalities keep theirs.
    image = create_checkpoint("itnet-tiny", tmp_path / "image", task="image-classification", image_size=16)
    processor = ITNetImageProcessor.from_pretrained(tmp_path / "image")
    with torch.no_grad():
        assert image(**processor(Image.new("RGB", (20, 20)), return_tensors="pt")).logits.shape == (1, 2)
    assert not (tmp_path / "image" / "tides_model.py").exists()


class TestMistakes:
    def test_other_values_for_a_name_of_the_table(self, tides):
        register_modality(MODALITIES["tides"])  # the same again is fine
        with pytest.raises(ValueError, match=r"`modality` \('tides'\) is in the table already, with other values"):
            register_modality(Modality("tides", encoder=tides.TideEncoder))

    def test_reference_that_cannot_be_imported(self):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            register_modality(Modality("tides", position_dim=2, encoder="no_such_module:Encoder"))
        assert "tides" not in MODALITIES

    def test_name_that_is_none(self):
        with pytest.raises(ValueError, match=r"`name` \('water levels'\) of a modality must be an identifier"):
            Modality("water levels")

    def test_rules_of_the_row(self, tides):
        with pytest.raises(ValueError, match=r"`position_dim` \(3\) must be 2 for `modality` \('tides'\)"):
            ITNetConfig(modality="tides", position_dim=3)
        with pytest.raises(ValueError, match=r"`is_causal` \(True\) needs ordered positions"):
            ITNetConfig(modality="tides", is_causal=True)
        with pytest.raises(
            ValueError, match=r"`modality` 'tides' takes \['levels', 'hours'\], but \['pixel_values'\]"
        ):
            ITNetModel(ITNetConfig(modality="tides", **SIZES))(pixel_values=torch.zeros(1, 3, 8, 8))

    def test_ends_of_edges_are_near(self, monkeypatch):
        """Without edges, the radius of balls must be given."""
        settings = {"modality": "roads", "integration_mode": "near_far", **SIZES}
        monkeypatch.setitem(MODALITIES, "roads", Modality("roads", position_dim=2, has_edges=True))
        assert ITNetConfig(**settings).near_radius is None
        with pytest.raises(ValueError, match=r"`near_radius` \(None\) must be given for `modality` \('roads'\)"):
            ITNetConfig(**settings, edge_gate=False)
