"""Mistakes at the command line: nothing is lost, and one line says what is wrong."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from modeling_itnet import ITNetConfig, ITNetModel

SMALL = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "kernel_hidden_size": 8}
MAIN = "from itnet_command import main; main()"


@pytest.fixture
def checkpoint(tmp_path):
    """A small exact model."""
    ITNetModel(ITNetConfig.from_preset("itnet-tiny", intermediate_size=8, **SMALL)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


class TestFolders:
    def test_a_source_is_never_overwritten(self, fail, checkpoint):
        before = contents(checkpoint)
        for options in ([], ["--overwrite"]):
            assert "needs another folder" in fail("convert", "m", "m", "--to", "monte_carlo", *options)
            assert "needs another folder" in fail("export", "m", "./m", *options)
        assert contents(checkpoint) == before

    def test_other_files_only_if_the_user_says_so(self, run, fail, checkpoint, tmp_path):
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "README.md").write_text("mine", encoding="utf-8")
        ITNetModel(ITNetConfig.from_preset("itnet-tiny", intermediate_size=8, **SMALL)).save_pretrained("other")
        before = contents(tmp_path / "notes"), contents(tmp_path / "other")
        commands = (
            ("create", "itnet-tiny"),
            ("convert", "m", "--to", "monte_carlo"),
            ("export", "m"),
        )
        for command in commands:
            assert "notes holds files already" in fail(*command[:2], "notes", *command[2:])
            assert "other holds a checkpoint already" in fail(*command[:2], "other", *command[2:])
        assert (contents(tmp_path / "notes"), contents(tmp_path / "other")) == before
        run("convert", "m", "other", "--to", "monte_carlo", "--overwrite")
        assert ITNetConfig.from_pretrained("other").integration_mode == "monte_carlo"

    def test_a_folder_of_hidden_files_is_empty(self, run, checkpoint, tmp_path):
        (tmp_path / "clone" / ".git").mkdir(parents=True)  # of a repository of the Hub
        run("convert", "m", "clone", "--to", "monte_carlo")
        assert ITNetConfig.from_pretrained("clone").integration_mode == "monte_carlo"

    def test_a_folder_without_a_configuration_is_no_checkpoint(self, fail, tmp_path):
        (tmp_path / "empty").mkdir()
        for command in ("info", "bench"):
            assert "empty is no checkpoint: it has no config.json" in fail(command, "empty")


class TestTexts:
    def test_files(self, fail, tmp_path):
        (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80" * 9)
        (tmp_path / "empty.txt").write_text(" \n\n", encoding="utf-8")
        create = ("create", "itnet-tiny", "b", "--modality", "text", "--text")
        assert "binary.txt is no text in UTF-8" in fail(*create, "binary.txt")
        assert "there is no text to train a tokenizer on in empty.txt" in fail(*create, "empty.txt")
        (tmp_path / "good.txt").write_text("the integral of the kernel", encoding="utf-8")
        assert "give one of the two" in fail(*create, "good.txt", "--tokenizer", "t")
        assert not (tmp_path / "b").exists()

    def test_the_size_of_the_vocabulary_is_printed(self, run, tmp_path):
        (tmp_path / "good.txt").write_text("the integral of the kernel\n" * 9, encoding="utf-8")
        (tmp_path / "empty.txt").write_text("", encoding="utf-8")
        printed = run("create", "itnet-tiny", "b", "--modality", "text", "--text", "good.txt", "--text", "empty.txt")
        assert f" {ITNetConfig.from_pretrained('b').vocab_size} tokens" in printed

    def test_tokenizer(self, fail):
        assert "`tokenizer` ('./nofolder') is no folder here with a tokenizer, nor one on the Hub" in fail(
            "create", "itnet-tiny", "b", "--modality", "text", "--tokenizer", "./nofolder"
        )


class TestOptions:
    def test_bench(self, refuse):
        message = refuse("bench", "-n", 0)
        assert "Invalid value for '--positions'" in message

    @pytest.mark.parametrize(
        "option, value, lowest", [("--batch-size", 0, 1), ("--steps", -1, 0), ("--rank", 0, 1), ("--limit", 0, 1)]
    )
    def test_convert(self, refuse, option, value, lowest):
        message = refuse("convert", "a", "b", option, value)
        assert f"Invalid value for '{option}'" in message and f"{lowest}" in message


class TestPlotKernel:
    def test_a_cloud_in_another_format(self, run, fail, tmp_path):
        run("create", "itnet-tiny", "p", "--modality", "point_cloud", "--set", "num_hidden_layers=1")
        (tmp_path / "x.ply").write_text("ply\nformat ascii 1.0\n", encoding="utf-8")
        (tmp_path / "x.obj").write_text("v 0 0 0\n", encoding="utf-8")
        (tmp_path / "x.xyz").write_text("one two three\n", encoding="utf-8")
        assert "no point cloud can be read from x.obj: it must be one of .npy" in fail("plot-kernel", "p", "x.obj")
        assert "x.ply is no readable ply file" in fail("plot-kernel", "p", "x.ply")
        assert "x.xyz must hold one point per line" in fail("plot-kernel", "p", "x.xyz")
        points = np.random.default_rng(0).normal(size=(20, 3))
        np.savetxt(tmp_path / "x.txt", points)
        run("plot-kernel", "p", "x.txt", "-o", "p.png")
        rows = "".join(f"{x} {y} {z}\n" for x, y, z in points)
        (tmp_path / "x.off").write_text(f"OFF\n20 0 0\n{rows}", encoding="utf-8")
        run("plot-kernel", "p", "x.off", "-o", "q.png")
        assert (tmp_path / "p.png").read_bytes() == (tmp_path / "q.png").read_bytes()

    def test_the_name_of_a_missing_file_is_no_text(self, run, fail):
        run("create", "itnet-tiny", "t", "--modality", "text", "--set", "num_hidden_layers=1")
        assert "no such file: typo.txt" in fail("plot-kernel", "t", "typo.txt")


@pytest.fixture
def clone(tmp_path):
    """What `itnet train` takes for a clone of the repository."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "configuration" / "recipes").mkdir(parents=True)

    def write(recipe, text, script=""):
        (tmp_path / "examples" / "run_it.py").write_text(script, encoding="utf-8")
        (tmp_path / "configuration" / "recipes" / f"{recipe}.yaml").write_text(text, encoding="utf-8")

    return write


class TestTrain:
    def test_scripts_and_recipes_are_those_of_the_clone_around(self, run, clone, tmp_path, monkeypatch):
        clone("mine", "script: run_it\n")
        (tmp_path / "below").mkdir()
        words = run("train", "mine", "--dry-run").split()
        assert words[1:] == [str(tmp_path / "examples" / "run_it.py"), words[2]]
        monkeypatch.chdir(tmp_path / "below")
        monkeypatch.setattr("modeling_itnet.training.recipes.ROOT", tmp_path / "nowhere")  # as in a wheel
        assert run("train", "mine", "--dry-run").split()[1:] == words[1:]

    def test_no_clone(self, fail, tmp_path, monkeypatch):
        monkeypatch.setattr("modeling_itnet.training.recipes.ROOT", tmp_path / "nowhere")
        assert "there is no clone of the repository around" in fail("train", "cifar10-cpu")
        (tmp_path / "mine.yaml").write_text("script: run_mlm\n", encoding="utf-8")
        assert "there is no clone of the repository around" in fail("train", "mine.yaml")

    def test_recipes(self, fail, clone):
        clone("broken", "script: [run_it\n")
        assert "broken.yaml is no valid YAML" in fail("train", "broken")
        clone("a", "base: b\n")
        clone("b", "base: a\n")
        assert "a.yaml builds on itself" in fail("train", "a")
        clone("lost", "base: nothing\n")
        assert "the `base` of" in fail("train", "lost") and "nothing.yaml" in fail("train", "lost")
        clone("wrong", "script: run_away\n")
        message = fail("train", "wrong")
        assert "names the `script` 'run_away'" in message and "there are run_it" in message and "wheel" not in message

    def test_an_unknown_option_is_one_line(self):
        words = ["train", "fashion_mnist-cpu", "-o", "sed=1"]
        done = subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)
        lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
        assert done.returncode == 2
        assert lines[-1].startswith("itnet: no such option: --sed, did you mean '--seed'?")
        assert "run_image_classification, the script of" in lines[-1] and "fashion_mnist-cpu.yaml, has" in lines[-1]
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("processes", [1, 2])
    def test_interruption_is_one_line(self, clone, tmp_path, processes):
        clone(
            "long",
            "script: run_it\n",
            "import time\nfrom pathlib import Path\n"
            "def main(recipe=None, options=None):\n    Path('started').touch()\n    time.sleep(600)\n"
            "if __name__ == '__main__':\n    main()\n",
        )
        # What runs in the background of a shell inherits that SIGINT is ignored; a user's terminal does not.
        listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        command = [sys.executable, "-c", listen + MAIN, "train", "long", "--processes", str(processes)]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        while not (tmp_path / "started").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C sends: to the command and to the script
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130
        assert errors.splitlines()[-1] == "itnet: interrupted"
        assert processes > 1 or "Traceback" not in errors  # torchrun says more
