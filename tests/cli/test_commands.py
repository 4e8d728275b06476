"""The ``itnet`` commands: what they write loads and computes the same, and mistakes are one line."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoProcessor,
    AutoTokenizer,
)
from typer.testing import CliRunner

from configuration_itnet import MODALITIES, find_task
from modeling_itnet import ITNetConfig, ITNetForImageClassification, ITNetImageProcessor, ITNetModel
from modeling_itnet.analysis.costs import itnet_layer
from modeling_itnet.cli import app
from modeling_itnet.hub import make_tokenizer
from modeling_itnet.special_cases.verify import TheoremRow


def picture(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


class TestCreate:
    def test_weights_are_those_of_the_seed(self, run, tmp_path):
        run("create", "itnet-tiny", "a")
        run("create", "itnet-tiny", "b", "--seed", 0)
        run("create", "itnet-tiny", "c", "--seed", 1)
        weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
        assert weights[0] == weights[1] != weights[2]
        torch.manual_seed(0)
        expected = ITNetModel(ITNetConfig.from_preset("itnet-tiny"))
        for name, value in AutoModel.from_pretrained("a").state_dict().items():
            assert torch.equal(value, expected.state_dict()[name]), name
        assert type(AutoImageProcessor.from_pretrained("a")) is ITNetImageProcessor
        assert "The weights are random" in (tmp_path / "a" / "README.md").read_text(encoding="utf-8")

    def test_text(self, run, tmp_path):
        run("create", "itnet-tiny", "m", "--task", "masked-lm", "--mode", "low_rank", "--set", "rank=3")
        model, tokenizer = AutoModelForMaskedLM.from_pretrained("m"), AutoTokenizer.from_pretrained("m")
        assert model.config.integration_mode == "low_rank" and model.config.rank == 3
        assert model.config.vocab_size == len(tokenizer) == 261
        batch = tokenizer(["héllo 世界", "a"], ["x", "yz"], padding=True, return_tensors="pt")
        assert batch["input_ids"][1, -1] == tokenizer.pad_token_id == model.config.pad_token_id
        assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True) == "héllo 世界x"
        assert model(**batch).logits.shape == (*batch["input_ids"].shape, 261)

    def test_near_far(self, run):
        run("create", "itnet-tiny", "m", "--modality", "point_cloud", "--mode", "near_far", "--set", "near_radius=0.5")
        model = AutoModel.from_pretrained("m")
        assert (model.config.integration_mode, model.config.near_radius) == ("near_far", 0.5)
        operator = model.layers[0].operator
        assert operator.kernel is not None and operator.factors is not None

    @pytest.mark.parametrize(
        "modality, auto_class",
        [("multimodal", AutoProcessor), ("point_cloud", AutoFeatureExtractor), ("graph", AutoFeatureExtractor)],
    )
    def test_processors(self, run, modality, auto_class):
        run("create", "itnet-tiny", "m", "--modality", modality)
        assert type(auto_class.from_pretrained("m")).__name__.startswith("ITNet")
        assert AutoModel.from_pretrained("m").config.modality == modality

    def test_every_task(self):
        tasks = [head.task for row in MODALITIES.values() for head in row.heads]
        assert {"image-classification", "masked-lm", "images-and-text-classification"} < set(tasks)
        assert len(tasks) == 11

    def test_mistakes(self, run, fail, tmp_path):
        run("create", "itnet-tiny", "a")
        assert "holds a checkpoint already" in fail("create", "itnet-tiny", "a")
        assert "there are itnet-base" in fail("create", "itnet-huge", "b")
        assert "there are image-classification" in fail("create", "itnet-tiny", "b", "--task", "flying")
        assert "ITNetForMaskedLM needs `modality`" in fail(
            "create", "itnet-tiny", "b", "--task", "masked-lm", "--modality", "image"
        )
        assert "`wings` is no argument of ITNetConfig" in fail("create", "itnet-tiny", "b", "--set", "wings=2")
        assert "expected int, got str" in fail("create", "itnet-tiny", "b", "--set", "rank=two")
        assert "name=value" in fail("create", "itnet-tiny", "b", "--set", "rank")
        assert "`rank` (0) must be positive" in fail("create", "itnet-tiny", "b", "--set", "rank=0")
        assert "`modality` ('image') has no tokenizer" in fail("create", "itnet-tiny", "b", "--tokenizer", "a")
        assert "no such text file: nowhere.txt" in fail(
            "create", "itnet-tiny", "b", "--modality", "text", "--text", "nowhere.txt"
        )


def test_tokenizer_learns_from_texts(tmp_path):
    (tmp_path / "corpus.txt").write_text("the integral of the kernel over the domain\n" * 50, encoding="utf-8")
    trained = make_tokenizer([tmp_path / "corpus.txt"], 280, 32)
    plain = make_tokenizer([], 280, 32)
    text = "the kernel of the integral"
    assert len(trained) == 280 and len(trained(text)["input_ids"]) < len(plain(text)["input_ids"])
    assert plain.decode(plain(text)["input_ids"], skip_special_tokens=True) == text


def test_tokenizer_masks_as_training_does(tmp_path):
    """A mask in a text is the token that masking a word puts there, before and after saving."""
    (tmp_path / "corpus.txt").write_text("the kernel of the integral\n" * 50, encoding="utf-8")
    trained = make_tokenizer([tmp_path / "corpus.txt"], 300, 32)
    trained.save_pretrained(tmp_path / "t")
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path / "t")):
        ids = tokenizer("the kernel of")["input_ids"]
        assert len(ids) == 5  # [CLS] the kernel of [SEP]
        assert tokenizer("the [MASK] of")["input_ids"] == [*ids[:2], tokenizer.mask_token_id, *ids[3:]]
        pair = tokenizer("the kernel", "of the integral")
        assert pair["token_type_ids"] == [0, 0, 0, 0, *([1] * (len(pair["input_ids"]) - 4))]
    bytewise = make_tokenizer([], 300, 32)  # here a mask is one byte, and the space before it another
    ids = bytewise("the x of")["input_ids"]
    assert bytewise("the [MASK] of")["input_ids"] == [*ids[:5], bytewise.mask_token_id, *ids[6:]]


@pytest.mark.parametrize(
    "name, own",
    [
        ("fill-mask", "masked-lm"),
        ("text-generation", "causal-lm"),
        ("text-classification", "sequence-classification"),
        ("graph-ml", "graph-classification"),
        ("visual-question-answering", "visual-question-answering"),
    ],
)
def test_the_hubs_names_of_tasks(name, own):
    assert find_task(name) == find_task(own) and find_task(own)[0].task == own


def test_the_hubs_names_at_the_command_line(run):
    run("create", "itnet-tiny", "m", "--task", "fill-mask", "--set", "num_hidden_layers=1")
    assert type(AutoModelForMaskedLM.from_pretrained("m")).__name__ == "ITNetForMaskedLM"
    run("create", "itnet-tiny", "f", "--task", "image-feature-extraction", "--set", "num_hidden_layers=1")
    assert type(AutoModel.from_pretrained("f")) is ITNetModel
    text = run("create", "--help")
    assert all(name in text for name in ("masked-lm", "image-classification", "fill-mask"))


def test_export(run, fail, tmp_path):
    model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", num_labels=3)).eval()
    model.save_pretrained(tmp_path / "trained")
    ITNetImageProcessor.from_model_config(model.config).save_pretrained(tmp_path / "trained")
    run("export", "trained", "out")
    assert (tmp_path / "out" / "modeling_itnet.py").exists()
    pixels = torch.randn(1, 3, 32, 32)
    again = AutoModelForImageClassification.from_pretrained("out")
    torch.testing.assert_close(again(pixels).logits, model(pixels).logits, rtol=1e-4, atol=1e-5)
    assert "needs another folder" in fail("export", "trained", "trained")
    assert "no such checkpoint folder: nowhere" in fail("export", "nowhere", "new")


class TestConvert:
    def test_low_rank(self, run, fail, tmp_path):
        # A kernel that matters, and more positions than the fit has unknowns: its error is far above rounding.
        run(
            *("create", "itnet-tiny", "a", "--set", "num_hidden_layers=1", "--set", "patch_size=8"),
            *("--set", "kernel_init_scale=1.0"),
        )
        (tmp_path / "pictures").mkdir()
        for seed in range(4):
            picture(tmp_path / "pictures" / f"{seed}.png", seed)
        printed = run(
            *("convert", "a", "b", "--rank", 1, "--data", "pictures", "--steps", 20, "--batch-size", 2, "--json")
        )
        report = json.loads(printed)
        assert report["integration_mode"] == "low_rank" and len(report["layer_errors"]) == 1
        exact, converted = AutoModel.from_pretrained("a").eval(), AutoModel.from_pretrained("b").eval()
        assert converted.config.rank == 1 and converted.config.integration_mode == "low_rank"
        images = [Image.open(tmp_path / "pictures" / f"{seed}.png") for seed in range(4)]
        pixels = AutoImageProcessor.from_pretrained("b")(images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            expected, actual = exact(pixels).last_hidden_state, converted(pixels).last_hidden_state
        error = ((actual - expected).norm() / expected.norm()).item()
        # Both errors are differences of float32 outputs: each may be off by the outputs' rounding, whatever its size.
        assert error > 1e-3
        assert error == pytest.approx(report["output_error"], abs=100 * torch.finfo(torch.float32).eps)
        assert "needs `--data`" in fail("convert", "a", "c")
        assert "no such file or folder: nowhere" in fail("convert", "a", "c", "--data", "nowhere")
        assert "low-rank model already" in fail("convert", "b", "c", "--data", "pictures")

    def test_near_far(self, run, fail, tmp_path):
        run(*("create", "itnet-tiny", "a", "--set", "num_hidden_layers=1", "--set", "kernel_init_scale=1.0"))
        (tmp_path / "pictures").mkdir()
        for seed in range(4):
            picture(tmp_path / "pictures" / f"{seed}.png", seed)
        options = ("--to", "near_far", "--near-size", 9, "--rank", 2, "--data", "pictures", "--steps", 5)
        report = json.loads(run("convert", "a", "b", *options, "--json"))
        assert report["integration_mode"] == "near_far" and len(report["layer_errors"]) == 1
        exact, converted = AutoModel.from_pretrained("a").eval(), AutoModel.from_pretrained("b").eval()
        config = converted.config
        assert (config.integration_mode, config.near_size, config.rank) == ("near_far", 9, 2)
        images = [Image.open(tmp_path / "pictures" / f"{seed}.png") for seed in range(4)]
        pixels = AutoImageProcessor.from_pretrained("b")(images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            expected, actual = exact(pixels).last_hidden_state, converted(pixels).last_hidden_state
        error = ((actual - expected).norm() / expected.norm()).item()
        assert error > 1e-4
        assert error == pytest.approx(report["output_error"], abs=100 * torch.finfo(torch.float32).eps)
        assert "square of an odd number" in fail(
            *("convert", "a", "c", "--to", "near_far", "--near-size", 8, "--data", "pictures")
        )
        assert "it has near kernels" in fail("convert", "b", "c", "--data", "pictures")

    def test_monte_carlo(self, run, refuse):
        run("create", "itnet-tiny", "a", "--set", "num_hidden_layers=1")
        run("convert", "a", "b", "--to", "monte_carlo", "--num-samples", 7)
        config = AutoModel.from_pretrained("b").config
        assert (config.integration_mode, config.num_samples) == ("monte_carlo", 7)
        assert "'magic' is not one of 'low_rank', 'auto'" in refuse("convert", "a", "c", "--to", "magic")


class TestPlotKernel:
    def test_image(self, run, fail, tmp_path):
        run("create", "itnet-tiny", "a", "--set", "num_hidden_layers=1", "--set", "patch_size=16")
        picture(tmp_path / "x.png", 0)
        run("plot-kernel", "a", "x.png", "-o", "out/k.png", "--query", "0,1", "--query", "cls")
        assert Image.open("out/k.png").width > 300
        assert "must be row,column" in fail("plot-kernel", "a", "x.png", "--query", "left")
        assert "out of range" in fail("plot-kernel", "a", "x.png", "--layer", 5)

    def test_text_and_cloud(self, run, fail, tmp_path):
        run("create", "itnet-tiny", "t", "--modality", "text", "--set", "num_hidden_layers=1")
        run("plot-kernel", "t", "a text", "-o", "t.png")
        run("create", "itnet-tiny", "p", "--modality", "point_cloud", "--set", "num_hidden_layers=1")
        np.save(tmp_path / "c.npy", np.random.default_rng(0).normal(size=(30, 3)))
        run("plot-kernel", "p", "c.npy", "-o", "p.png", "--query", 3)
        for name in ("t.png", "p.png"):
            assert np.asarray(Image.open(tmp_path / name)).std() > 5  # something was drawn
        assert "not one of the 30 points" in fail("plot-kernel", "p", "c.npy", "--query", 30)
        assert "shows every token" in fail("plot-kernel", "t", "a text", "--query", 1)


def test_bench(run, fail):
    modes = ("--mode", "exact", "--mode", "near_far")
    report = json.loads(run("bench", "-n", 8, "--rounds", 1, *modes, "--json"))
    assert [row["model"] for row in report["results"]] == ["exact", "near_far", "ViT (attention)"]
    assert all(0 < row["forward_ms"] < row["total_ms"] for row in report["results"])
    assert "`--mode` (magic)" in fail("bench", "--mode", "magic")
    assert "`--device` ('cuda')" in fail("bench", "--device", "cuda") or torch.cuda.is_available()


def test_bench_takes_turns(run, monkeypatch):
    """Every round measures every layer once; a slow moment meets all of them."""
    calls = []

    class Recorder(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, values):
            calls.append(self.name)
            return 2 * values

    def layer(config, mode="attention", backend="tiled"):
        return Recorder(f"{mode} {backend}"), lambda count: (torch.randn(1, count, 4, requires_grad=True),)

    monkeypatch.setattr("modeling_itnet.cli.reports.itnet_layer", layer)
    monkeypatch.setattr("modeling_itnet.cli.reports.attention_layer", layer)
    run("bench", "-n", 8, "--rounds", 2, "--mode", "exact", "--mode", "low_rank", "--json")
    assert calls == 3 * ["exact auto", "low_rank auto", "attention tiled"]  # one more round to warm up


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_bench_times_the_backend_that_runs(backend):
    """What is "auto" is Triton on a GPU; what a layer costs is counted in the tiled backend anywhere."""
    config = ITNetConfig.from_preset("itnet-tiny")
    assert itnet_layer(config, "exact", backend)[0].operator.config.backend == backend
    assert itnet_layer(config, "exact")[0].operator.config.backend == "tiled"


def test_another_models_checkpoint(fail, tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    assert "model of type 'bert', not 'itnet'" in fail("info", "bert")


def test_help_lists_every_command(run):
    text = run("--help")
    for command in ("create", "info", "export", "convert", "bench", "plot-kernel", "cards", "verify", "generate"):
        assert command in text


class TestVerify:
    def test_every_theorem_holds(self, run):
        rows = json.loads(run("verify", "--json"))
        assert len(rows) > 5 and all(row["holds"] for row in rows)

    def test_a_theorem_that_fails_is_exit_code_1(self, monkeypatch):
        row = TheoremRow("thm:x", "a statement", error=2.0, tolerance=1.0)
        monkeypatch.setattr("modeling_itnet.cli.reports.theorem_table", lambda seed: [row])
        result = CliRunner().invoke(app, ["verify"])
        assert result.exit_code == 1 and "0 of 1 statements hold" in result.stdout and "NO" in result.stdout
