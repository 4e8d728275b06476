"""Data of a user's own: folders of images, CSV, JSON, text and npz files, and what is said when they do not fit."""

import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor
from modeling_itnet.training.recipes import RECIPES, ROOT

SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "integration_mode=exact"]
STEPS = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--learning_rate", "1e-2"]
MODEL = ["--config_overrides", *SMALL]
PICTURES = ["--augmentation", "none", "--config_overrides", *SMALL, "image_size=16", "patch_size=8"]
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def draw(folder, *classes, count=4):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (20, 12 + number), COLOURS[name]).save(folder / name / f"{number}.png")


class TestImages:
    def test_folder_with_splits(self, run_script, tmp_path):
        """A class without a test image keeps the others' numbers."""
        draw(tmp_path / "pictures" / "train", *COLOURS)
        draw(tmp_path / "pictures" / "test", "green", "red")
        steps = ["--max_steps", "40", "--per_device_train_batch_size", "12", "--learning_rate", "1e-2"]
        results = run_script("run_image_classification", "--dataset", str(tmp_path / "pictures"), *steps, *PICTURES)
        assert results["metrics"]["accuracy"] == 1.0
        model = ITNetForImageClassification.from_pretrained(tmp_path / "output")
        assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}

    def test_folder_of_classes(self, run_script, tmp_path):
        """Sorted by class as they come, the held-out rows would all be red."""
        draw(tmp_path / "pictures", *COLOURS, count=8)
        arguments = ["--dataset", str(tmp_path / "pictures"), "--holdout", "0.25"]
        results = run_script("run_image_classification", *arguments, *STEPS, *PICTURES)
        assert results["dataset"] == "pictures" and results["evaluated_on"] == "last 25% of train"
        card = (tmp_path / "output" / "README.md").read_text(encoding="utf-8")
        assert "pictures, last 25% of train" in card

    def test_without_a_test_split(self, run_script, tmp_path):
        draw(tmp_path / "pictures" / "train", "red", "blue")
        with pytest.raises(ValueError, match=r"no split 'test' in .*: there are \['train'\].*--holdout"):
            run_script("run_image_classification", "--dataset", str(tmp_path / "pictures"), *STEPS, *PICTURES)

    def test_paths_in_a_table(self, run_script, tmp_path):
        draw(tmp_path / "files", "red", "blue")
        files = sorted((tmp_path / "files").rglob("*.png"))
        table = pd.DataFrame({"file": map(str, files), "colour": [path.parent.name for path in files]})
        table.to_csv(tmp_path / "table.csv", index=False)
        columns = ["--image_column", "file", "--label_column", "colour", "--holdout", "0.5"]
        arguments = ["--dataset", str(tmp_path / "table.csv"), *columns, *STEPS, *PICTURES]
        assert run_script("run_image_classification", *arguments)["dataset"] == "table.csv"

    def test_an_unknown_column(self, run_script, tiny_data):
        data = ["--dataset", str(tiny_data["run_image_classification"]), "--label_column", "kind"]
        with pytest.raises(ValueError, match="`label_column`: the data have no column 'kind'; they have image, label"):
            run_script("run_image_classification", *data, *STEPS, *PICTURES)


class TestText:
    def reviews(self, folder, **columns):
        folder.mkdir()
        rows = {"text": ["a fine film", "a dull film"] * 6, "label": ["good", "bad"] * 6, **columns}
        pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
        pd.DataFrame(rows).iloc[:4].to_csv(folder / "test.csv", index=False)
        return ["--dataset", str(folder)]

    def test_names_as_labels(self, run_script, tmp_path):
        arguments = self.reviews(tmp_path / "reviews")
        steps = ["--max_steps", "60", "--per_device_train_batch_size", "12", "--learning_rate", "1e-2"]
        results = run_script("run_glue", *arguments, *steps, *MODEL)
        assert results["metrics"]["accuracy"] == 1.0
        assert results["dataset"] == "reviews" and results["evaluated_on"] == "test"
        config = json.loads((tmp_path / "output" / "config.json").read_text(encoding="utf-8"))
        assert config["id2label"] == {"0": "bad", "1": "good"}

    def test_card_names_the_data_and_promises_no_code(self, run_script, tmp_path):
        """Also where a task of GLUE lends its metric."""
        arguments = self.reviews(tmp_path / "reviews", sentence=["fine", "dull"] * 6)
        run_script("run_glue", *arguments, "--task", "sst2", "--eval_split", "test", *STEPS, *MODEL)
        card = (tmp_path / "output" / "README.md").read_text(encoding="utf-8")
        assert "reviews, test" in card and "sst2, " not in card
        assert (
            "custom_code" not in card and "trust_remote_code=True)" not in card
        )  # no code is promised: there is none
        assert not list((tmp_path / "output").glob("*.py"))

    def test_pairs_and_numbers(self, run_script, tmp_path):
        rows = [{"first": "a b c", "second": "b c d", "likeness": number / 7} for number in range(8)]
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / "pairs.jsonl").write_text(lines, encoding="utf-8")
        columns = ["--text_columns", "first", "second", "--label_column", "likeness", "--holdout", "0.5"]
        results = run_script("run_glue", "--dataset", str(tmp_path / "pairs.jsonl"), *columns, *STEPS, *MODEL)
        assert set(results["metrics"]) == {"loss", "spearmanr", "pearsonr"} and results["dataset"] == "pairs"

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"text": ["a", None] * 6}, "column `text` must hold texts, but row 1 has None"),
            ({"label": ["good", None] * 6}, "column `label` has no label in row 1"),
            ({"label": [-1, 1] * 6}, "column `label` must hold numbers of classes from 0 on, but has -1"),
        ],
    )
    def test_what_does_not_fit(self, run_script, tmp_path, columns, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_script("run_glue", *self.reviews(tmp_path / "reviews", **columns), *STEPS, *MODEL)

    def test_no_text(self, run_script, tmp_path):
        arguments = self.reviews(tmp_path / "reviews")
        with pytest.raises(ValueError, match="the data have no body; they have text, label"):
            run_script("run_glue", *arguments, "--text_columns", "body", *STEPS, *MODEL)

    def test_a_class_that_training_lacks(self, run_script, tmp_path):
        arguments = self.reviews(tmp_path / "reviews")
        pd.DataFrame({"text": ["so so"], "label": ["middling"]}).to_csv(tmp_path / "reviews" / "test.csv", index=False)
        with pytest.raises(ValueError, match=r"evaluation rows has classes \['middling'\]"):
            run_script("run_glue", *arguments, *STEPS, *MODEL)


class TestSignals:
    def fields(self, folder, *, own_positions=False, queries=None, count=6):
        random = np.random.default_rng(0)
        folder.mkdir()
        for split in ("train", "test"):
            positions = 300 + 50 * random.random(((count,) if own_positions else ()) + (9, 2))
            arrays = {"x": random.normal(size=(count, 9, 3)), "positions": positions, "measure": random.random(9)}
            arrays["y"] = random.normal(size=(count, queries or 9, 2))
            if queries:
                arrays["query_positions"] = 300 + 50 * random.random((queries, 2))
            np.savez(folder / f"{split}.npz", **arrays)
        return ["--problem", "own", "--dataset", str(folder)]

    @pytest.mark.parametrize("own_positions", [False, True], ids=["shared", "own"])
    @pytest.mark.parametrize("queries", [None, 5])
    def test_meshes(self, run_script, tmp_path, own_positions, queries):
        arguments = self.fields(tmp_path / "fields", own_positions=own_positions, queries=queries)
        results = run_script("run_operator_learning", *arguments, *STEPS, *MODEL)
        assert results["dataset"] == "fields" and 0 < results["metrics"]["relative_l2"] < 10
        config = ITNetConfig.from_pretrained(tmp_path / "output")
        assert (config.position_dim, config.signal_feature_size, config.num_labels) == (2, 3, 2)

    def test_coordinates_come_to_unit_size(self, load_script, tmp_path):
        script = load_script("run_operator_learning")
        self.fields(tmp_path / "fields", own_positions=True)
        data = script.OperatorDataArguments(dataset=str(tmp_path / "fields"), problem="own")
        train, _ = script.load(data)
        with np.load(tmp_path / "fields" / "train.npz") as arrays:
            raw = torch.from_numpy(arrays["positions"].astype(np.float32))
        low, high = raw.flatten(0, 1).amin(0), raw.flatten(0, 1).amax(0)
        found = torch.stack([row["positions"] for row in train])
        torch.testing.assert_close(found, (raw - low) / (high - low).max())
        assert found.min() == 0 and found.max() == 1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"positions": None}, "needs an array `positions`, but has x, measure, y"),
            ({"positions": np.zeros((8, 2))}, "array `positions` [8, 2] of .* must be [9, 2] or [6, 9, 2]"),
            ({"y": np.zeros((6, 7))}, "array `y` [6, 7] of .* must be [6, 9, components], as `x`"),
            ({"x": np.full((6, 9), np.nan)}, "array `x` of .* holds values that are not finite"),
        ],
    )
    def test_what_does_not_fit(self, load_script, tmp_path, change, message):
        script = load_script("run_operator_learning")
        self.fields(tmp_path / "fields")
        with np.load(tmp_path / "fields" / "train.npz") as arrays:
            values = {name: change.get(name, arrays[name]) for name in arrays.files}
        np.savez(tmp_path / "fields" / "train.npz", **{k: v for k, v in values.items() if v is not None})
        with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
            script.read_own(tmp_path / "fields" / "train.npz", None)

    def test_peers_say_what_to_install(self, run_script, load_script, tiny_data, monkeypatch):
        monkeypatch.setitem(sys.modules, "neuralop", None)
        monkeypatch.delitem(sys.modules, "common.peers.neural_operators", raising=False)
        data = ["--dataset", str(tiny_data["run_operator_learning"]), "--model_type", "fno"]
        with pytest.raises(ValueError, match=r"`model_type` \('fno'\) needs the neuraloperator library: pip install"):
            run_script("run_operator_learning", *data, *STEPS, *MODEL)


class TestOutputFolder:
    """Two runs in one output folder do not mix."""

    def lines(self, path, *words):
        path.write_text("\n".join(" ".join(np.roll(words, shift)) for shift in range(60)), encoding="utf-8")
        return ["--dataset", str(path), "--holdout", "0.5", "--max_seq_length", "16", "--vocab_size", "200"]

    def test_another_corpus(self, run_script, tmp_path):
        first = self.lines(tmp_path / "a.txt", "apple", "orange", "cherry", "banana")
        second = self.lines(tmp_path / "b.txt", "iron", "copper", "silver", "golden")
        vocabularies = []
        for arguments in (first, second, first):
            run_script("run_mlm", *arguments, *STEPS, *MODEL)
            saved = json.loads((tmp_path / "output" / "tokenizer.json").read_text(encoding="utf-8"))
            vocabularies.append(set(saved["model"]["vocab"]))
        assert "apple" in vocabularies[0] and "copper" not in vocabularies[0]
        assert "copper" in vocabularies[1] and "apple" not in vocabularies[1]
        assert vocabularies[2] == vocabularies[0]
        assert len(list((tmp_path / "output" / "tokens").glob("*.bin"))) == 4  # training and evaluation of each

    def test_another_run_is_not_resumed(self, run_script, tiny_data, tmp_path):
        script = "run_image_classification"
        keep = ["--save_strategy", "steps", "--save_steps", "1"]
        arguments = ["--dataset", str(tiny_data[script]), *STEPS, *keep, *PICTURES]
        run_script(script, *arguments)
        draw(tmp_path / "pictures", "red", "blue")
        other = ["--dataset", str(tmp_path / "pictures"), "--holdout", "0.5", *STEPS, *keep, *PICTURES]
        with pytest.raises(ValueError, match="holds a checkpoint of another run, with `dataset`"):
            run_script(script, *other)
        results = run_script(script, *other[:-1], "patch_size=8", "--overwrite_output_dir", "true")
        assert results["steps"] == 2 and results["train_loss"] > 0


class TestCheckpoints:
    """--model_name_or_path: the checkpoint's size counts, and options change it or are refused."""

    @pytest.fixture
    def checkpoint(self, run_script, tiny_data, tmp_path):
        run_script(
            "run_image_classification", "--dataset", str(tiny_data["run_image_classification"]), *STEPS, *PICTURES
        )
        folder = (tmp_path / "output").rename(tmp_path / "checkpoint")
        processor = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        processor["image_mean"] = [0.1, 0.2, 0.3]
        (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
        return folder

    def arguments(self, tiny_data, checkpoint, *options):
        data = ["--dataset", str(tiny_data["run_image_classification"]), "--augmentation", "none", *STEPS]
        return ["configuration/recipes/cifar10-cpu.yaml", *data, "--model_name_or_path", str(checkpoint), *options]

    def test_size_and_options(self, run_script, tiny_data, checkpoint, tmp_path, monkeypatch):
        """The recipe's own settings (32 x 32 pixels, three layers) are those of another model."""
        monkeypatch.chdir(ROOT)
        options = ["--config_overrides", "hidden_dropout_prob=0.25"]
        results = run_script("run_image_classification", *self.arguments(tiny_data, checkpoint, *options))
        assert (results["layers"], results["width"], results["integration_mode"]) == (1, 16, "exact")
        config = ITNetForImageClassification.from_pretrained(tmp_path / "output").config
        assert (config.image_shape, config.hidden_dropout_prob) == ((16, 16), 0.25)
        processor = ITNetImageProcessor.from_pretrained(tmp_path / "output")
        assert processor.size["height"] == 16 and list(processor.image_mean) == [0.1, 0.2, 0.3]

    def test_a_mode_without_weights(self, run_script, tiny_data, checkpoint, monkeypatch):
        monkeypatch.chdir(ROOT)
        with pytest.raises(ValueError, match="low_rank"):
            run_script(
                "run_image_classification", *self.arguments(tiny_data, checkpoint, "--integration_mode", "low_rank")
            )

    def test_other_classes(self, run_script, tiny_data, checkpoint, tmp_path):
        draw(tmp_path / "pictures", *COLOURS)
        data = ["--dataset", str(tmp_path / "pictures"), "--holdout", "0.25", "--augmentation", "none", *STEPS]
        arguments = [*data, "--model_name_or_path", str(checkpoint), "--learning_rate", "0"]
        with pytest.raises(ValueError, match="--ignore_mismatched_sizes true starts those anew"):
            run_script("run_image_classification", *arguments)
        run_script("run_image_classification", *arguments, "--ignore_mismatched_sizes", "true")
        before, after = (
            ITNetForImageClassification.from_pretrained(tmp_path / name) for name in ("checkpoint", "output")
        )
        assert (before.config.num_labels, after.config.num_labels) == (2, 3)
        body = after.itnet.state_dict()
        for name, value in before.itnet.state_dict().items():
            torch.testing.assert_close(body[name], value, rtol=0, atol=0)

    def test_a_preset_beside_it(self, run_script, tiny_data, checkpoint, capsys, monkeypatch):
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit):
            run_script("run_image_classification", *self.arguments(tiny_data, checkpoint, "--preset", "itnet-small"))
        assert "`preset` ('itnet-small') is the size of a new model" in capsys.readouterr().err


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dataset", "x", "--sed", "1"], "no such option: --sed, did you mean '--seed'?"),
            (["--dataset", "x", "--config_overrides", "rnk=3"], "has no setting 'rnk', did you mean 'rank'?"),
            (["--dataset", "x", "--config_overrides", "measure=[3"], "('measure=[3') must have a value that is valid"),
            (["--dataset", "x", "--seed", "one"], "argument --seed: invalid int value: 'one'"),
            ([], "the following arguments are required: --dataset"),
            (["no-such.yaml"], "no recipe 'no-such.yaml'"),
        ],
    )
    def test_one_line(self, load_script, capsys, monkeypatch, arguments, message):
        module = load_script("common.arguments")
        monkeypatch.setattr(sys, "argv", ["run_it.py", *arguments])
        with pytest.raises(SystemExit) as stop:
            module.parse(module.ModelArguments, module.DataArguments, module.ExampleTrainingArguments)
        printed = capsys.readouterr().err.strip()
        assert stop.value.code == 2 and message in printed and "\n" not in printed

    def test_help_says_the_defaults(self, load_script, capsys, monkeypatch):
        module = load_script("common.arguments")
        monkeypatch.setattr(sys, "argv", ["run_it.py", "--help"])
        with pytest.raises(SystemExit) as stop:
            module.parse(module.ModelArguments, module.DataArguments, module.ExampleTrainingArguments)
        printed = " ".join(capsys.readouterr().out.split())
        assert not stop.value.code and "Of weight matrices only. (default: 0.05)" in printed


class TestFindData:
    def test_what_can_be_got(self, load_script, tmp_path, monkeypatch, capsys):
        data = load_script("common.data")
        monkeypatch.setattr(data, "ROOT", tmp_path)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            ValueError, match=r"no data in data/cifar10: get them with `python examples/data/download.py"
        ):
            data.find_data("data/cifar10")
        with pytest.raises(ValueError, match="no data in data/vqa2: the recipe says"):
            data.find_data("data/vqa2")
        assert data.find_data("nyu-mll/glue") is None and data.find_data("a/b+c/d") is None
        for name in ("./nothing", "/no/such/folder", "reviews.csv", "a/b/c"):
            with pytest.raises(ValueError, match="is no file or folder"):
                data.find_data(name)
        assert data.find_data("data/fashion_mnist") == tmp_path / "examples/data/fashion_mnist_small"
        assert "is used instead" in capsys.readouterr().err
        (tmp_path / "data" / "fashion_mnist").mkdir(parents=True)
        assert data.find_data("data/fashion_mnist").samefile(tmp_path / "data" / "fashion_mnist")

    def test_bundled_data_are_there(self, load_script):
        data = load_script("common.data")
        for folder in data.BUNDLED.values():
            assert (data.ROOT / folder / "train.parquet").is_file() and (data.ROOT / folder / "test.parquet").is_file()


class TestTextCheckpoints:
    """A model that starts from trained token embeddings reads with their vocabulary."""

    @pytest.mark.parametrize(
        ("first", "second", "recipe"),
        [("run_mlm", "run_glue", "sst2-cpu"), ("run_vqa", "run_vqa", "easy_vqa-cpu")],
        ids=["text", "image and text"],
    )
    def test_vocabulary(self, run_script, tiny_data, tmp_path, first, second, recipe):
        options = ["--config_overrides", *SMALL, *(["image_size=16", "patch_size=8"] if first == "run_vqa" else [])]
        split = ["--eval_split", "test"]
        run_script(first, "--dataset", str(tiny_data[first]), "--max_seq_length", "64", *split, *STEPS, *options)
        folder = (tmp_path / "output").rename(tmp_path / "checkpoint")
        start = ["--model_name_or_path", str(folder), "--dataset", str(tiny_data[second]), *STEPS]
        results = run_script(second, str(RECIPES / f"{recipe}.yaml"), *start, "--max_steps", "1")
        assert (results["layers"], results["width"], results["integration_mode"]) == (1, 16, "exact")
        assert not list((tmp_path / "output").glob("tokenizer-*"))  # none was trained
        before, after = (
            json.loads((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
            for name in ("checkpoint", "output")
        )
        assert before == after
