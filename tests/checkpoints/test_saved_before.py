"""Checkpoints that earlier code saved load, and compute what they computed then. make.py says how they were saved."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modeling_itnet

HERE = Path(__file__).resolve().parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/config.json"))
EARLY = "image-early"
PROCESSORS = {
    "image": "AutoImageProcessor",
    "multimodal": "AutoProcessor",
    "point_cloud": "AutoFeatureExtractor",
    "graph": "AutoFeatureExtractor",
}


@pytest.fixture(scope="module")
def make():
    """The script that saved them: it knows what the processors were called with."""
    sys.path.insert(0, str(HERE))
    import make

    yield make
    sys.path.remove(str(HERE))
    del sys.modules["make"]


def read_example(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """ "inputs", "labels" and "outputs", each by name."""
    parts = {"inputs": {}, "labels": {}, "outputs": {}}
    for key, value in load_file(folder / "example.safetensors").items():
        part, name = key.split(".", 1)
        parts[part][name] = value
    return parts


def assert_same(actual: torch.Tensor, expected: torch.Tensor, config) -> None:
    """Equal up to rounding in float32: the longest sums of a layer have n d_h terms, and errors add up over sums."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    terms = 32 * config.hidden_size  # no example has more positions than 32
    tolerance = torch.finfo(torch.float32).eps * terms * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_every_modality_and_mode_is_there():
    configs = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in FOLDERS]
    modalities = {"image", "text", "multimodal", "point_cloud", "graph", "signal"}
    assert {config["modality"] for config in configs} == modalities
    assert {config["integration_mode"] for config in configs} == {"exact", "low_rank", "monte_carlo", "auto"}
    heads = {config["architectures"][0] for config in configs}
    assert len(heads) == 11 and all(hasattr(modeling_itnet, head) for head in heads)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
class TestModels:
    @pytest.fixture
    def loaded(self, folder):
        """The model and what Transformers says of its loading."""
        config = modeling_itnet.ITNetConfig.from_pretrained(folder)
        model_class = getattr(modeling_itnet, config.architectures[0])
        return model_class.from_pretrained(folder, output_loading_info=True)

    def test_every_weight_arrives(self, folder, loaded):
        model, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        values = model.state_dict()
        for name, stored in load_file(folder / "model.safetensors").items():
            if folder.name == EARLY:
                name = name.replace("classifier.linear.", "classifier.")
            assert torch.equal(values[name], stored), name

    def test_outputs(self, folder, loaded):
        model, _ = loaded
        example = read_example(folder)
        with torch.no_grad():
            outputs = model(**example["inputs"], **example["labels"])
        assert example["outputs"].keys() == {name for name, value in outputs.items() if torch.is_tensor(value)}
        for name, expected in example["outputs"].items():
            assert_same(outputs[name], expected, model.config)

    def test_saved_again(self, folder, loaded, tmp_path):
        model, _ = loaded
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        before, after = model.state_dict(), again.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_processors(folder, make):
    modality = make.CASES[folder.name][1]
    inputs = read_example(folder)["inputs"]
    if modality not in PROCESSORS:  # texts bring any tokenizer, signals are tensors
        assert not list(folder.glob("*processor_config.json"))
        return
    processor = getattr(transformers, PROCESSORS[modality]).from_pretrained(folder)
    made = processor(**make.raw_inputs(folder.name), return_tensors="pt")
    assert made.keys() == inputs.keys()
    for name, expected in inputs.items():
        torch.testing.assert_close(made[name], expected, rtol=0, atol=1e-5)


def test_folder_with_code(tmp_path):
    """The code of then, in a fresh interpreter that cannot import the packages of today."""
    folder = tmp_path / "model"
    shutil.unpack_archive(HERE / "with-code.zip", folder)
    example = read_example(folder)
    save_file(example["inputs"], tmp_path / "inputs.safetensors")
    save_file({"logits": example["outputs"]["logits"]}, tmp_path / "outputs.safetensors")
    case = {
        "folder": str(folder),
        "auto_class": "AutoModelForImageClassification",
        "inputs": str(tmp_path / "inputs.safetensors"),
        "outputs": str(tmp_path / "outputs.safetensors"),
        "processors": ["AutoImageProcessor"],
    }
    isolated = HERE.parent / "hub" / "isolated.py"
    result = subprocess.run(
        [sys.executable, "-I", str(isolated)],
        input=json.dumps({"then": case}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])["then"]
    assert report["module"].startswith("transformers_modules.")
    assert report["equal"] == {"logits": True}
    assert report["processors"] == {"AutoImageProcessor": "ITNetImageProcessor"}


def test_folder_with_code_and_the_package_of_today(tmp_path):
    """The package takes the folder over: its own classes, the weights of then."""
    folder = tmp_path / "model"
    shutil.unpack_archive(HERE / "with-code.zip", folder)
    example = read_example(folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert type(model) is modeling_itnet.ITNetForImageClassification
    with torch.no_grad():
        assert_same(model(**example["inputs"]).logits, example["outputs"]["logits"], model.config)
