"""The benchmarks at a tiny size: every contestant computes what its name says, and figures are judged rightly."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"
pytest.importorskip("psutil")
pytest.importorskip("rich")


@pytest.fixture(scope="module")
def benchmark():
    """Imports a module of the benchmarks, which find each other by their plain names."""
    sys.path.insert(0, str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == FOLDER:
            del sys.modules[name]


@pytest.fixture
def tiny(benchmark):
    return benchmark("contestants").Size(layers=1, width=16, heads=2, tokens=128)


def has_package(name: str) -> bool:
    packages = {"performer": "performer_pytorch", "nystrom": "nystrom_attention"}
    packages["linear"] = "linear_attention_transformer"
    return name not in packages or importlib.util.find_spec(packages[name]) is not None


@pytest.mark.parametrize("n", [64, 196])
@pytest.mark.parametrize("name", ["exact", "mc-128", "lr-8", "nf-25", "sdpa", "performer", "nystrom", "linear"])
def test_contestants(benchmark, tiny, name, n):
    """The features have n positions, besides a [CLS] of images, and every kind of run is the same computation."""
    if not has_package(name):
        pytest.skip("not installed")
    entry = benchmark("contestants").contestant(name, n, tiny)
    with torch.no_grad():
        out = entry.model.eval()(**entry.inputs)
    features = out if isinstance(out, torch.Tensor) else out.last_hidden_state
    assert features.shape[0] == tiny.batch(n) == max(1, 128 // n)
    assert features.shape[1] in ({n, n + 1} if n == 196 else {n})
    loss = entry.loss()
    if name not in ("mc-128", "performer"):  # whose training draws samples or projections
        torch.testing.assert_close(loss.detach(), features.square().mean(), rtol=1e-5, atol=1e-6)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in entry.model.parameters())
    entry.backward(entry.loss())
    assert all(p.grad is None for p in entry.model.parameters())


def test_names(benchmark):
    contestants = benchmark("contestants")
    assert set(contestants.NAMES) == {"exact", "mc-128", "lr-8", "nf-25", "sdpa", "performer", "nystrom", "linear"}
    assert contestants.taking_part(196, ("nf-25", "exact")) == ["exact", "nf-25", "sdpa"]
    assert contestants.taking_part(4096, ("nf-25", "exact")) == ["nf-25", "sdpa"]


def test_near_far(benchmark, tiny):
    """The issue's configuration: windows of 25 with a kernel of 16 units, image at 196 and text elsewhere."""
    contestant = benchmark("contestants").contestant
    image, text = contestant("nf-25", 196, tiny).model.config, contestant("nf-25", 64, tiny).model.config
    assert (image.modality, text.modality) == ("image", "text")
    for config in (image, text):
        assert config.integration_mode == "near_far"
        assert (config.near_size, config.kernel_hidden_size, config.factor_form, config.rank) == (25, 16, "matrix", 8)


def test_modes(benchmark, tiny):
    modes = benchmark("modes")
    found = modes.measure(1, tiny, (64, 196), ("nf-25", "lr-8", "sdpa"), with_memory=False)
    assert list(found["speed"]) == [
        "forward, n = 64",
        "training step, n = 64",
        "forward, n = 196",
        "training step, n = 196",
    ]
    for row in found["speed"].values():
        assert list(row) == ["lr-8", "nf-25", "sdpa"]
        assert row["sdpa"]["speed_over_sdpa"] == 1
    assert found["growth"] == {}  # 4096 was not asked for


def test_modes_summary(benchmark):
    """Goals stand beside the figures that have one, and a missed one says so."""
    figures = {"speed_over_sdpa": 0.6, "speed_over_exact": None, "peak_bytes": 2e6, "peak_over_sdpa": 1.4}
    peer = {"speed_over_sdpa": 1.0, "speed_over_exact": None, "peak_bytes": 1e6, "peak_over_sdpa": 1.0}
    speed = {
        f"{kind}, n = {n}": {"nf-25": figures, "sdpa": peer}
        for n in (196, 1024)
        for kind in ("forward", "training step")
    }
    machine = {"threads": 2, "instructions": "AVX2", "torch": "2"}
    growth = {"nf-25": {"forward": 2.1, "training step": 2.3}}
    text = benchmark("modes").summary({"machine": machine, "rounds": 3, "layers": 2, "speed": speed, "growth": growth})
    assert "| training step, n = 196 | 0.60 (≥ 0.50) | 1.40 (≤ 1.30, missed) |" in text
    assert "| training step, n = 1024 | 0.60 (≥ 0.75, missed) | 1.40 (≤ 1.30, missed) |" in text
    assert "| forward, n = 1024 | 0.60 | 1.40 (≤ 1.30, missed) |" in text
    assert "| nf-25 | 2.10 (≤ 2.20) | 2.30 (≤ 2.20, missed) |" in text
    assert "(2 layers; 2 threads of AVX2, torch 2; medians of 3 interleaved rounds.)" in text


def test_widths(benchmark, tiny, monkeypatch):
    widths = benchmark("widths")
    monkeypatch.setattr(widths, "PAPER_SMALL", benchmark("operator_speed").Shape(1, 9, 2, 4, 8, frequencies=2))
    rows = widths.measure(1, tiny, (4, 8, 32))["widths"]
    assert list(rows) == ["sdpa", "4", "8", "32", "4, per head", "8, per head"]
    assert rows["sdpa"]["forward"] == rows["sdpa"]["training step"] == 1
    machine = {"threads": 2, "instructions": "AVX2", "torch": "2"}
    text = widths.summary({"machine": machine, "rounds": 1, "layers": 1, "widths": rows})
    goals = {line.split(" | ")[0][2:]: line.count("≥") for line in text.splitlines() if line.startswith("| ")}
    assert {name for name, count in goals.items() if count == 2} == {"exact, w = 8", "exact, w = 8, per head"}
    config = widths.exact(8, "per_head", tiny).model.config
    assert (config.kernel_hidden_size, config.kernel_input_sharing) == (8, "per_head")
    assert config.integration_mode == "exact"


def test_padded(benchmark, tiny):
    padded = benchmark("padded")
    mask = padded.ragged_mask(32, 128)
    kept = mask.sum(1)
    assert mask.shape == (32, 128)
    assert kept.min() >= 64
    assert kept.max() == 128
    assert len(kept.unique()) > 8
    assert bool((mask.diff(dim=1) <= 0).all())  # padding stands on the right
    rows = padded.measure(1, tiny, length=16, batch=2)["padded"]
    assert list(rows) == ["exact, w = 16", "nf-25", "lr-8", "sdpa"]


def test_generation(benchmark, tiny):
    """Linear modes and Mamba keep as many bytes of a long context as of one that fills what they keep of tokens."""
    generation = benchmark("generation")
    results = generation.measure(1, tiny, contexts=(256, 512), lengths=(8,))
    kept = {name: list(row["bytes"].values()) for name, row in results["decoding"].items()}
    assert all(kept[name][0] == kept[name][1] for name in (*generation.LINEAR, "mamba"))
    assert kept["gpt-2"][1] == 2 * kept["gpt-2"][0] == 512 * 2 * tiny.width * 4
    assert 1.99 < kept["exact"][1] / kept["exact"][0] <= 2  # beside what does not grow
    assert kept["exact"][1] < 0.75 * kept["gpt-2"][1]
    assert list(results["training"]["8"]) == [*generation.LINEAR, "gpt-2"]
    text = generation.summary(results | {"machine": benchmark("timing").machine(), "rounds": 1, "layers": 1})
    assert "| near_far |" in text
    assert "ms per token, context 256" in text


def test_points(benchmark):
    """A ball around the middle of the cube holds about as many points as it should, and the model runs on them."""
    points = benchmark("points")
    cloud = torch.rand(20000, 3, generator=torch.Generator().manual_seed(0))
    middle = cloud[(cloud - 0.5).abs().amax(1) < 0.3]
    counts = (torch.cdist(middle, cloud) <= points.ball_radius(20000)).sum(1).float()
    assert abs(counts.mean() - 31) < 1  # 30 others and the point itself
    entry = points.cloud(50, hidden_size=16)
    entry.loss().backward()
    assert entry.model.config.integration_mode == "near_far"
    assert all(p.grad is not None and p.grad.isfinite().all() for p in entry.model.layers.parameters())


def test_own_process(benchmark):
    timing = benchmark("timing")
    assert timing.peak_bytes("memory_probe", "1", "16") >= 0
    with pytest.raises(RuntimeError, match="no_such_module"):
        timing.own_process("no_such_module")


class TestAgainst:
    ROOT = FOLDER.parents[1]

    def test_cells(self, benchmark, capfd):
        """A checkout answers by seconds, or by why it cannot, and goes on."""
        with benchmark("against").Checkout(self.ROOT) as checkout:
            assert checkout.measure("reference, w = 32, forward")["seconds"] > 0
            assert "KeyError" in checkout.measure("nobody, forward")["error"]
            assert checkout.measure("reference, w = 32, training step")["seconds"] > 0
            assert checkout.measure("preset itnet-tiny, B = 8, training step")["seconds"] > 0

    def test_other_packages(self, benchmark, tmp_path):
        """What is measured comes from the folder that was named, not from the environment."""
        code = [sys.executable, "-m", "against", str(tmp_path)]
        done = subprocess.run(code, cwd=FOLDER, capture_output=True, text=True, input="")
        assert done.returncode == 1
        assert f"not from {tmp_path}" in done.stderr

    @pytest.mark.parametrize(
        ("ratios", "is_more"),
        [([1.1, 1.2, 1.1, 1.15], True), ([1.02] * 4, False), ([0.9, 0.9, 1.2, 1.2], False), ([0.8] * 4, False)],
    )
    def test_spread(self, benchmark, ratios, is_more):
        assert benchmark("against").spread(ratios)["is_more"] is is_more


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "text"),
    [
        (0.5, None, False, "0.50"),
        (0.5, 0.5, False, "0.50 (≥ 0.50)"),
        (0.4, 0.5, False, "0.40 (≥ 0.50, missed)"),
        (0.4, 0.5, True, "0.40 (≤ 0.50)"),
        (0.6, 0.5, True, "0.60 (≤ 0.50, missed)"),
    ],
)
def test_judged(benchmark, value, goal, at_most, text):
    assert benchmark("report").judged(value, goal, at_most) == text


def test_marks(benchmark, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- widths: begin -->\nold\n<!-- widths: end -->\nb\n", encoding="utf-8")
    benchmark("run").write_between_marks(page, "widths", "new")
    benchmark("run").write_between_marks(page, "points", "nowhere")
    assert page.read_text(encoding="utf-8") == "a\n<!-- widths: begin -->\nnew\n<!-- widths: end -->\nb\n"
