"""Loading: shards, devices, other label sets, and clear errors for files that are not what they should be."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from modeling_itnet import ITNetForImageClassification, ITNetForMaskedLM, ITNetModel
from modeling_itnet.hub import create_checkpoint

# Of a model that was loaded again: its weights lie elsewhere in memory, which changes how products are summed.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
NAME = "image-classification"


@pytest.fixture
def saved(tmp_path, make_model, make_inputs):
    """A folder with a saved classifier, its inputs and its logits."""
    model, inputs = make_model(NAME), make_inputs(NAME)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        return tmp_path / "model", inputs, model(**inputs).logits


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits.cpu()


class TestWays:
    def test_shards(self, tmp_path, make_model, make_inputs):
        model, inputs = make_model(NAME), make_inputs(NAME)
        model.save_pretrained(tmp_path, max_shard_size="10KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert len(set(index["weight_map"].values())) > 2
        again = AutoModelForImageClassification.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(again, inputs), logits(model, inputs), **ROUNDING)
        next(tmp_path.glob("*-00002-of-*")).unlink()
        with pytest.raises(OSError, match="00002-of"):
            AutoModelForImageClassification.from_pretrained(tmp_path)

    def test_device_map(self, saved):
        folder, inputs, expected = saved
        model = AutoModelForImageClassification.from_pretrained(folder, device_map="auto")
        assert model.device.type in ("cpu", "cuda")
        torch.testing.assert_close(logits(model, {k: v.to(model.device) for k, v in inputs.items()}), expected)

    def test_layers_on_the_disk(self, saved, tmp_path):
        """Accelerate fetches what does not fit: parts of the model stay in files."""
        folder, inputs, expected = saved
        places = {"itnet.fourier": "cpu", "itnet.encoder": "cpu", "itnet.layers.0": "cpu", "itnet.layers.1": "disk"}
        places |= {"itnet.layernorm": "disk", "classifier": "cpu"}
        model = AutoModelForImageClassification.from_pretrained(
            folder, device_map=places, offload_folder=tmp_path / "offloaded"
        )
        assert model.itnet.layers[1].operator.kernel.w2.device.type == "meta"
        torch.testing.assert_close(logits(model, inputs), expected, **ROUNDING)

    def test_weights_are_made_once(self, saved, monkeypatch):
        """Low-memory loading: a model is built without weights, and what the file holds is not initialised first."""
        folder, *_ = saved
        touched = []
        monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *args, **kwargs: touched.append(tensor) or tensor)
        AutoModelForImageClassification.from_pretrained(folder)
        assert not [tensor for tensor in touched if tensor.device.type != "meta"]

    def test_generation_settings(self, tmp_path, make_model, make_inputs):
        """They are saved beside the weights, in one precision or another."""
        model, ids = make_model("causal-lm"), make_inputs("causal-lm")["input_ids"]
        model.generation_config.max_new_tokens = 5
        model.generation_config.num_beams = 2
        model.save_pretrained(tmp_path, max_shard_size="10KB")
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        mask = torch.ones_like(ids)
        expected = model.generate(ids, attention_mask=mask)
        assert expected.shape == (3, 12)
        assert torch.equal(again.generate(ids, attention_mask=mask), expected)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert half.generate(ids, attention_mask=mask).shape == (3, 12)

    def test_another_label_set(self, saved):
        folder, inputs, _ = saved
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            ITNetForImageClassification.from_pretrained(folder, num_labels=7)
        model = ITNetForImageClassification.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
        assert logits(model, inputs).shape == (3, 7)
        stored = load_file(folder / "model.safetensors")
        for name, value in model.state_dict().items():
            if not name.startswith("classifier"):
                assert torch.equal(value, stored[name]), name


class TestEarlyCheckpoints:
    """Classifiers once held their linear map as a part, `classifier.linear`."""

    @pytest.fixture
    def early(self, saved):
        folder, inputs, expected = saved
        path = folder / "model.safetensors"
        weights = load_file(path)
        for name in ("weight", "bias"):
            weights[f"classifier.linear.{name}"] = weights.pop(f"classifier.{name}")
        save_file(weights, path, metadata={"format": "pt"})
        return folder, inputs, expected, weights

    def test_loading(self, early, tmp_path):
        folder, inputs, expected, _ = early
        model, info = ITNetForImageClassification.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(logits(model, inputs), expected, **ROUNDING)
        model.save_pretrained(tmp_path / "again")
        again = AutoModelForImageClassification.from_pretrained(tmp_path / "again")
        assert torch.equal(logits(again, inputs), expected)

    def test_loading_into_a_model(self, early, make_model):
        """As Trainer does when it resumes."""
        _, inputs, expected, weights = early
        model = make_model(NAME)
        torch.nn.init.zeros_(model.classifier.weight)
        model.load_state_dict(weights)
        torch.testing.assert_close(logits(model, inputs), expected, **ROUNDING)


class TestBrokenFiles:
    def test_truncated_weights(self, saved):
        folder, *_ = saved
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(SafetensorError, match=r"model\.safetensors cannot be read, it is truncated"):
            ITNetModel.from_pretrained(folder)

    def test_corrupted_header(self, saved):
        folder, *_ = saved
        path = folder / "model.safetensors"
        path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
        with pytest.raises(SafetensorError, match=r"model\.safetensors cannot be read.*(?i:header)"):
            ITNetModel.from_pretrained(folder)

    def test_one_shard_of_several(self, tmp_path, make_model):
        make_model(NAME).save_pretrained(tmp_path, max_shard_size="10KB")
        path = next(tmp_path.glob("*-00002-of-*"))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(SafetensorError, match=rf"^[^,]*{path.name} cannot be read"):
            ITNetModel.from_pretrained(tmp_path)

    @pytest.mark.parametrize("content", [None, "{}"])
    def test_no_configuration(self, saved, content):
        folder, *_ = saved
        (folder / "config.json").unlink()
        if content is not None:
            (folder / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(OSError, match=r"has no `config\.json`, or an empty one"):
            ITNetForImageClassification.from_pretrained(folder)

    def test_config_of_another_model(self, saved, tmp_path):
        folder, *_ = saved
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**values, "model_type": "bert"}), encoding="utf-8")
        with pytest.raises(ValueError, match="model of type 'bert', not 'itnet'"):
            ITNetModel.from_pretrained(folder)

    def test_config_that_contradicts_itself(self, saved):
        folder, *_ = saved
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**values, "hidden_size": 17}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"`hidden_size` \(17\) must be a multiple of"):
            AutoConfig.from_pretrained(folder)

    def test_config_of_another_size(self, saved):
        folder, *_ = saved
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**values, "kernel_hidden_size": 10}), encoding="utf-8")
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForImageClassification.from_pretrained(folder)

    def test_config_that_is_no_json(self, saved):
        folder, *_ = saved
        (folder / "config.json").write_text("{", encoding="utf-8")
        with pytest.raises(OSError, match=r"config\.json"):
            AutoConfig.from_pretrained(folder)

    def test_wrong_auto_map(self, saved, monkeypatch):
        """Without the package's registration, a folder whose code is not there says which file is missing."""
        folder, *_ = saved
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        mapped = {**values, "model_type": "itnet-elsewhere", "auto_map": {"AutoConfig": "nowhere.ITNetConfig"}}
        (folder / "config.json").write_text(json.dumps(mapped), encoding="utf-8")
        with pytest.raises(OSError, match=r"nowhere\.py"):
            AutoConfig.from_pretrained(folder, trust_remote_code=True)

    def test_tokenizer_with_more_tokens_than_the_model(self, tmp_path):
        create_checkpoint("itnet-tiny", tmp_path, task="masked-lm", num_hidden_layers=1)
        tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), ITNetForMaskedLM.from_pretrained(tmp_path)
        tokenizer.add_tokens(["integral"])
        inputs = tokenizer("an integral", return_tensors="pt")
        with pytest.raises(ValueError, match=r"`input_ids` hold 261, but `vocab_size` is 261"):
            model(**inputs)
        model.resize_token_embeddings(len(tokenizer))
        assert model(**inputs).logits.isfinite().all()


class TestNoPickle:
    def test_pickled_weights_are_not_loaded(self, saved):
        """A folder with a pickle beside, or in place of, the safetensors file: the pickle is never opened."""
        folder, inputs, expected = saved

        class Bomb:
            def __reduce__(self):
                return (pytest.fail, ("a pickle was loaded",))

        torch.save({"bomb": Bomb()}, folder / "pytorch_model.bin")
        torch.testing.assert_close(
            logits(ITNetForImageClassification.from_pretrained(folder), inputs), expected, **ROUNDING
        )
        with pytest.raises(ValueError, match=r"`use_safetensors` \(False\) must be True"):
            ITNetForImageClassification.from_pretrained(folder, use_safetensors=False)
        (folder / "model.safetensors").unlink()
        with pytest.raises(OSError, match="safetensors"):
            ITNetForImageClassification.from_pretrained(folder)

    def test_saving_writes_safetensors_only(self, saved):
        folder, *_ = saved
        assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
