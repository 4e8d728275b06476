"""The page about learned kernels shows the diagnosis of the trained model beside that of an untrained one."""

import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification
from modeling_itnet.analysis.diagnosis import diagnose_kernels


def test_section(load_script, monkeypatch, tmp_path):
    figures = load_script("kernel_figures")
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    settings = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 2, "kernel_init_scale": 1.0}
    torch.manual_seed(3)
    model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", **settings)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "run")
    inputs = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.zeros(4)}
    task = figures.Task("run", "Title", ITNetForImageClassification, lambda folder, data: inputs)
    lines = figures.section("image", task, tmp_path, tmp_path)

    assert (tmp_path / "kernels-image.png").stat().st_size > 10_000
    diagnosis = diagnose_kernels(model, inputs, part="centred")
    for layer in range(2):
        row = next(line for line in lines if line.startswith(f"| {layer + 1} |"))
        cells = [cell.split(" (") for cell in row.strip("| ").split(" | ")[1:]]
        heads = [head for head in diagnosis.heads if head.layer == layer]
        for name, (trained, untrained) in zip(figures.COLUMNS, cells, strict=True):
            mean = sum(getattr(head, name) for head in heads) / len(heads)
            assert abs(float(trained) - mean) < 1e-3
            assert trained != untrained.rstrip(")") or name == "causality"


def test_every_task_is_a_run_of_the_grid(load_script):
    runs = {run.path.stem for run in load_script("grid").runs()}
    assert {task.run.split("/")[0] for task in load_script("kernel_figures").TASKS.values()} <= runs
