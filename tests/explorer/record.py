"""Measures how long a page takes from a new query to its map, and takes the pictures of docs/explorer.md.

python -m tests.explorer.record             writes docs/figures/explorer-*.png and docs/figures/explorer.json
python -m tests.explorer.record --pictures  the pictures alone
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from modeling_itnet import ITNetModel
from modeling_itnet.analysis.explorer import explore_kernels
from modeling_itnet.cli.examples import example_cloud
from modeling_itnet.cli.inputs import load_model, process, read_images, read_processors

from .browser import Visit, open_browser
from .cases import CASES

ROOT = Path(__file__).resolve().parents[2]
FIGURES, RESULTS = ROOT / "docs" / "figures", ROOT / "docs" / "figures" / "explorer.json"
CHECKPOINTS = ROOT / "examples" / "checkpoints"
FASHION, CLOUDS = CHECKPOINTS / "itnet-tiny-fashion-mnist", CHECKPOINTS / "itnet-tiny-modelnet10"
# The setting of the goal: n = 1,024 patches, H = 6, d_h = 64, w = 128, 64 frequencies.
LARGE = {
    "modality": "image",
    "image_size": 32,
    "patch_size": 1,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "kernel_hidden_size": 128,
    "num_fourier_features": 64,
    "kernel_init_scale": 1.0,
    "pooling": "mean",
    "integration_mode": "monte_carlo",  # the same kernels, and a quick forward: the page evaluates all keys
    "num_samples": 8,
}
TIMES = """async ({quantity, count}) => {
    explorer.set({quantity, query: 0});
    const computed = [], shown = [];
    for (let k = 1; k <= count; k++) {
        await new Promise(done => setTimeout(done, 20));
        const start = performance.now();
        explorer.set({query: (k * 389) % 1024});
        computed.push(performance.now() - start);
        await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
        shown.push(performance.now() - start);
    }
    return {computed, shown};
}"""


def clothes() -> tuple[nn.Module, dict[str, Tensor]]:
    """The bundled image model on three pictures of the bundled test set."""
    pictures = read_images(ROOT / "examples" / "data" / "fashion_mnist_small" / "test.parquet")[:3]
    model = load_model(FASHION)
    return model, process(read_processors(FASHION)[0], model.config, pictures)


def torus() -> tuple[nn.Module, dict[str, Tensor]]:
    """The bundled cloud model on a torus."""
    model = load_model(CLOUDS)
    return model, example_cloud(model.config, read_processors(CLOUDS))


class Words:
    """Names for the 40 tokens of the small text models, whose texts are random."""

    text = (
        "the a one two some every red blue round small near far kernel query key word field point line graph sees "
        "adds moves turns stands falls grows is was of in on at with and or not here there ."
    )

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        words = self.text.split()
        return [words[number % len(words)] for number in ids]


#: Picture -> title, and what makes the model and the inputs. The small models of the tests are not trained.
PICTURES = {
    "image": ("itnet-tiny-fashion-mnist", clothes),
    "points": ("itnet-tiny-modelnet10", torus),
    "text": ("Text, random weights", CASES["text"].make),
    "causal-text": ("Causal text, random weights", CASES["causal-text"].make),
    "mesh": ("Functions on a mesh, random weights", CASES["mesh"].make),
    "graph": ("Graphs, random weights", CASES["graph"].make),
    "image-text": ("Image and text, random weights", CASES["image-text"].make),
}


def take_pictures(visit, folder: Path) -> dict[str, int]:
    """The upper part of every page; returns the sizes of the pages in bytes."""
    sizes = {}
    for name, (title, make) in PICTURES.items():
        model, inputs = make()
        given = {"title": title, "tokenizer": Words() if "input_ids" in inputs else None}
        sizes[name] = len(explore_kernels(model, inputs, folder / f"{name}.html", **given).encode())
        page: Visit = visit(1000, 1250).open(folder / f"{name}.html")
        assert not page.errors and not page.requests, (page.errors, page.requests)
        path = FIGURES / f"explorer-{name}.png"
        page.page.screenshot(path=path, full_page=name == "causal-text")
        picture = Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=128)
        picture.save(path, optimize=True)
        page.page.close()
    return sizes


def measure(visit, folder: Path, count: int = 15) -> dict:
    """Milliseconds until the map is computed and drawn, and until the frame with it is over: median and least."""
    torch.manual_seed(0)
    model = ITNetModel(ITNetConfig(**LARGE)).eval()
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    text = explore_kernels(model, inputs, folder / "large.html", precision="float16", max_bytes=30_000_000)
    page = visit().open(folder / "large.html")
    found = {"page bytes, float16, all six heads": len(text.encode())}
    for quantity in ("full", "variation", "entry", "output", "action"):
        times = page.page.evaluate(TIMES, {"quantity": quantity, "count": count})
        figures = {"median": statistics.median, "least": min}
        found[quantity] = {
            f"{name}, {figure}": round(take(values), 1)
            for name, values in times.items()
            for figure, take in figures.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", action="store_true", help="take the pictures, and measure nothing")
    parser.add_argument("--times", action="store_true", help="measure, and take no pictures")
    arguments = parser.parse_args()
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder, open_browser() as visit:
        if not arguments.times:
            record["page bytes"] = take_pictures(visit, Path(folder))
        if not arguments.pictures:
            record["redraw in ms, n = 1024, H = 6, d_h = 64, w = 128"] = measure(visit, Path(folder))
    RESULTS.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
