"""Two processes (gloo, torchrun) train as one does, and a run that loses a process resumes where it was."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig
from safetensors.torch import load_file, save_file

from modeling_itnet import ITNetConfig, ITNetForImageClassification
from modeling_itnet.layers import ITNetLayer

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "examples" / "accelerate"


def torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(HERE / script), *map(str, arguments)], capture_output=True, text=True, env=environment
    )


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """The folder that parallel_steps.py wrote to, and the model after the same steps in this process."""
    folder = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(0)
    config = ITNetConfig.from_preset(
        "itnet-tiny", num_hidden_layers=2, patch_size=8, kernel_init_scale=1.0, num_labels=3
    )
    ITNetForImageClassification(config).save_pretrained(folder)
    data = {"pixel_values": torch.randn(3, 4, 3, 32, 32), "labels": torch.randint(3, (3, 4))}
    save_file(data, folder / "data.safetensors")
    spec = importlib.util.spec_from_file_location("parallel_steps", HERE / "parallel_steps.py")
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    model = ITNetForImageClassification.from_pretrained(folder)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model.eval()(data["pixel_values"][0]).logits
    steps.train(model, model.parameters(), data, rank=0, world=1)
    moved = max((value - start[name]).abs().max().item() for name, value in model.state_dict().items())
    assert moved > 1e-2  # the steps do something
    result = torchrun("parallel_steps.py", folder)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, model, logits


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(parallel, kind):
    folder, model, _ = parallel
    expected, actual = dict(model.named_parameters()), load_file(folder / f"{kind}.st")
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value.detach(), rtol=0, atol=1e-5, msg=name)


def test_tensor_parallel_forward(parallel):
    folder, model, logits = parallel
    found = load_file(folder / "tp.st")
    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-5)
    whole = sum(parameter.numel() for parameter in model.itnet.layers[0].feed_forward.parameters())
    assert found["feed_forward_size"].item() < 0.6 * whole


def test_a_lost_process_and_resuming(tmp_path):
    """Losses and gradient norms after the checkpoint are, digit for digit, those of the undisturbed run."""
    killed = torchrun("interrupted_run.py", tmp_path, "whole-then-killed")
    assert killed.returncode != 0 and (tmp_path / "whole.json").exists(), killed.stderr[-4000:]
    assert "SIGKILL" in killed.stderr
    resumed = torchrun("interrupted_run.py", tmp_path, "resumed")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    whole, after = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("whole", "resumed")
    )
    assert list(whole) == [str(step) for step in range(1, 7)]
    assert {step: whole[step] for step in ("3", "4", "5", "6")} == {
        step: values for step, values in after.items() if int(step) > 2
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_configs(path):
    """Accelerate reads them, they ask for the processes that their names say, and wrap a class that exists."""
    config = ClusterConfig.from_yaml_file(path)
    machines, processes = {"h200_1": (1, 1), "h200_8": (1, 8), "h200_2x8": (2, 16)}[path.stem.rpartition("_")[0]]
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (machines, processes, "bf16")
    kind = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[path.stem.rpartition("_")[2]]
    assert config.distributed_type == kind
    if kind == "FSDP":
        settings = config.fsdp_config
        assert settings["fsdp_version"] == 2
        assert settings["fsdp_transformer_layer_cls_to_wrap"] == ITNetLayer.__name__


def test_there_are_configs():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert names == {"h200_1_single", "h200_8_ddp", "h200_8_fsdp2", "h200_2x8_ddp", "h200_2x8_fsdp2"}
