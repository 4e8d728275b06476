"""examples/data/download.py writes what the scripts read, and says in one line what stands in its way."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage

from modeling_itnet.training.recipes import find_recipe, read_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def download():
    spec = importlib.util.spec_from_file_location("download", ROOT / "examples" / "data" / "download.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png() -> bytes:
    buffer = io.BytesIO()
    PILImage.new("RGB", (8, 8), (200, 10, 10)).save(buffer, "PNG")
    return buffer.getvalue()


def test_sets_are_those_that_recipes_name(download, load_script):
    data = load_script("common.data")
    assert tuple(download.SETS) == data.DOWNLOADS
    named = {read_recipe(find_recipe(name))["dataset"] for name in recipe_names() if name.endswith("-cpu")}
    assert {name.partition("/")[2] for name in named} <= set(download.SETS)


def test_images_of_the_hub(download, load_script, tmp_path, monkeypatch):
    asked = []

    def load(name, config=None):
        asked.append((name, config))
        features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
        rows = Dataset.from_dict({"img": [{"bytes": png(), "path": None}] * 2, "label": [0, 1]}, features)
        return DatasetDict({"train": rows, "test": rows})

    monkeypatch.setattr(download, "load_dataset", load)
    download.main(["cifar10", "--output", str(tmp_path)])
    assert asked == [("uoft-cs/cifar10", None)]
    arguments = load_script("common.arguments").DataArguments(dataset=str(tmp_path / "cifar10"))
    train, test = load_script("common.data").load_train_and_eval(arguments)
    assert train.features["label"].names == ["cat", "dog"] and test[1]["label"] == 1
    assert train[0]["image"].getpixel((0, 0)) == (200, 10, 10)
    assert not list(tmp_path.rglob("*.part"))


def test_glue(download, tmp_path, monkeypatch):
    rows = Dataset.from_dict({"sentence": ["a"], "label": [0]})
    monkeypatch.setattr(download, "load_dataset", lambda name, config: DatasetDict({"train": rows, config: rows}))
    download.main(["glue", "--output", str(tmp_path)])
    for task in download.GLUE:
        assert (tmp_path / "glue" / task / "train.parquet").is_file()
        assert (tmp_path / "glue" / task / f"{task}.parquet").is_file()


def test_fields(download, load_script, tmp_path, monkeypatch):
    def answer(url, timeout):
        side = 32 if "32" in url else 16
        shape = (2, side) if "burgers" in url else (2, side, side)
        solution = torch.rand(2, 17, side, dtype=torch.float64) if "burgers" in url else torch.rand(shape)
        file = io.BytesIO()
        torch.save({"x": torch.rand(shape) > 0.5 if "darcy" in url else torch.rand(shape), "y": solution}, file)
        file.seek(0)
        return file

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    download.main(["pde", "--output", str(tmp_path)])
    script = load_script("run_operator_learning")
    for problem, points in (("darcy", 256), ("burgers", 16)):
        train, tests = script.load(script.OperatorDataArguments(dataset=str(tmp_path / "pde"), problem=problem))
        assert train[0]["signal_values"].shape == train[0]["labels"].shape == (points, 1)
        assert list(tests) == ([16, 32] if problem == "darcy" else [16])
    with np.load(tmp_path / "pde" / "darcy_train_16.npz") as arrays:
        assert arrays["x"].dtype == bool and arrays["y"].dtype == np.float32


def test_meshes(download, load_script, tmp_path, monkeypatch):
    """Rows of the sources are columns of theirs; a plate of four nodes, a square of two triangles."""
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    files = {name: io.BytesIO() for name in download.MESHES}
    poisson = {"x": corners[:, :1].repeat(3, 1), "y": corners[:, 1:].repeat(3, 1), "u": np.arange(12.0).reshape(4, 3)}
    poisson |= {"mu": np.zeros((3, 2)), "triang": np.array([[0, 1, 2], [0, 2, 3]]), "edge_index": np.zeros((2, 5))}
    torch.save({key: torch.tensor(values) for key, values in poisson.items()}, files["holed_poisson"])
    np.save(files["flow_past_shapes"], np.arange(2 * 6 * 5).reshape(2, 6, 5).astype(np.float32))
    plate = {"X": corners, "F": np.ones((2, 1, 7)), "Ux": np.ones((2, 4, 1)), "Uy": np.ones((2, 4, 1))}
    scipy.io.savemat(files["linear_elastic"], plate)

    def answer(address, timeout):
        name = next(name for name, known in download.MESHES.items() if known == address)
        files[name].seek(0)
        return files[name]

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    download.main(["meshes", "--output", str(tmp_path)])
    data = load_script("mesh_data")
    holed = data.holed_poisson(tmp_path / "meshes")
    assert holed.labels[1, :, 0].tolist() == [1, 4, 7, 10] and holed.positions[2].tolist() == corners.tolist()
    assert holed.measure[0].tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 3, 1 / 6])
    elastic = data.linear_elastic(tmp_path / "meshes")
    assert elastic.values.shape == (2, 4, 4) and elastic.labels.shape == (2, 4, 2)
    with np.load(tmp_path / "meshes" / "flow_past_shapes.npz") as flow:
        assert flow["positions"][1, 0].tolist() == [30, 31]
        assert [flow[key][0, 1] for key in "puv"] == [7, 8, 9]


def test_nlvr_from_a_clone(download, tmp_path):
    for part, orders in (("train", 6), ("dev", 1), ("test", 1)):
        folder = tmp_path / "clone" / "nlvr" / part / "images" / "3"
        folder.mkdir(parents=True)
        example = {"sentence": "a box", "label": "true", "identifier": "7-0", "directory": "3"}
        (folder.parents[1] / f"{part}.json").write_text(json.dumps(example) + "\n", encoding="utf-8")
        for order in range(orders):
            (folder / f"{part}-7-0-{order}.png").write_bytes(png())
    download.main(["nlvr", "--output", str(tmp_path), "--source", str(tmp_path / "clone")])
    rows = Dataset.from_parquet(str(tmp_path / "nlvr" / "train.parquet"))
    assert len(rows) == 6 and rows[0]["label"] == 1 and rows[0]["image"].size == (8, 8)
    assert rows.features["sentence"] == Value("string")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion_mnist", "fashion_mnist could not be got: Couldn't reach the Hub"),
        ("nlvr", "nlvr comes as a repository: git clone"),
        ("easy_vqa", "easy_vqa comes as a package: pip install easy-vqa"),
    ],
)
def test_what_is_missing(download, tmp_path, monkeypatch, name, message):
    def offline(*args):
        raise ConnectionError("Couldn't reach\n the Hub")

    monkeypatch.setattr(download, "load_dataset", offline)
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(SystemExit) as stop:
        download.main([name, "--output", str(tmp_path)])
    assert message in stop.value.code and "\n" not in stop.value.code
    assert not (tmp_path / name).exists()


def test_easy_vqa_from_its_package(download, tmp_path, monkeypatch):
    (tmp_path / "0.png").write_bytes(png())
    package = SimpleNamespace(
        get_answers=lambda: ["circle", "red"],
        get_train_questions=lambda: (["what colour?"], ["red"], [0]),
        get_test_questions=lambda: (["what shape?"], ["circle"], [0]),
        get_train_image_paths=lambda: {0: str(tmp_path / "0.png")},
        get_test_image_paths=lambda: {0: str(tmp_path / "0.png")},
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    download.main(["easy_vqa", "--output", str(tmp_path)])
    rows = Dataset.from_parquet(str(tmp_path / "easy_vqa" / "train.parquet"))
    assert rows[0]["answer"] == 1 and rows[0]["image"].size == (8, 8)


@pytest.mark.parametrize("name", ["graphs", "modelnet10"])
def test_by_pytorch_geometric(download, load_script, tmp_path, monkeypatch, name):
    geometric = pytest.importorskip("torch_geometric")
    data = geometric.data.Data
    if name == "graphs":
        edges = torch.tensor([[0, 1], [1, 0]])
        x = torch.tensor([[0.5, 1, 0, 0], [0.7, 0, 0, 1]])  # one attribute, three labels

        class Graphs(list):
            num_node_attributes = 1

        monkeypatch.setattr(
            "torch_geometric.datasets.TUDataset",
            lambda root, name, use_node_attr: Graphs([data(x=x, edge_index=edges, y=torch.tensor([1]))]),
        )
        download.main(["graphs", "--output", str(tmp_path)])
        row = Dataset.from_parquet(str(tmp_path / "graphs" / "proteins.parquet"))[0]
        graph = load_script("run_graph_classification").as_graph(row, 3)
        np.testing.assert_allclose(graph["x"], x.numpy())
        assert graph["y"] == 1
        return

    class Meshes(list):
        raw_dir = str(tmp_path / "raw")

    for kind in ("bed", "sofa"):
        (tmp_path / "raw" / kind).mkdir(parents=True)
    cloud = 5 + torch.randn(1024, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        "torch_geometric.datasets.ModelNet",
        lambda root, name, train, pre_transform: Meshes([data(pos=cloud, y=torch.tensor([1]))]),
    )
    download.main(["modelnet10", "--output", str(tmp_path)])
    rows = Dataset.from_parquet(str(tmp_path / "modelnet10" / "test.parquet"))
    points = load_script("run_point_cloud").read_clouds(rows)[0]["points"]
    assert rows.features["label"].names == ["bed", "sofa"] and points.shape == (1024, 3)
    np.testing.assert_allclose(points.mean(0), 0, atol=1e-3)  # half precision
    assert np.linalg.norm(points, axis=1).max() == pytest.approx(1, abs=1e-3)


def test_novels(download, tmp_path, monkeypatch):
    """The text between the marks of Project Gutenberg, paragraph by paragraph."""
    asked = []

    def answer(url, timeout):
        asked.append(url)
        book = (
            "\ufeffPreface\r\n\r\nTitle: A Novel\r\n\r\n*** START OF THE PROJECT GUTENBERG EBOOK A NOVEL ***\r\n\r\n"
        )
        book += (
            "Chapter 1\r\n\r\nIt was\r\nlate.  Very.\r\n\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK ***\r\nLicence"
        )
        return io.BytesIO(book.encode())

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    download.main(["gutenberg", "--output", str(tmp_path)])
    rows = Dataset.from_parquet(str(tmp_path / "gutenberg" / "validation.parquet"))
    assert rows[:] == {"text": ["Chapter 1", "It was late. Very."] * 2, "title": ["A Novel"] * 4}
    assert len(asked) == len(set(asked)) == 14 and asked[-1].endswith("/1661/pg1661.txt")
