"""Gets the data that recipes name, from where it is published, into data/<name>/ of the repository.

python examples/data/download.py fashion_mnist cifar10

Every set becomes parquet files, one per split, or npz files for `pde` and `meshes`, in the form that the scripts
read. Sets keep the licence of their source. Those marked * are not the very rows behind docs/results.md, which says
what these were.
"""

import argparse
import io
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset

ROOT = Path(__file__).resolve().parents[2]
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
PDE = "https://raw.githubusercontent.com/neuraloperator/neuraloperator/main/neuralop/data/datasets/data"
PDE_FILES = ("darcy_train_16", "darcy_test_16", "darcy_test_32", "burgers_train_16", "burgers_test_16")
RAW = "https://raw.githubusercontent.com/"
MESHES = {  # at fixed commits
    "holed_poisson": RAW
    + "mathLab/PINA/60ea474a95e0aa8aa44212c094b8d92ee14b125f/tutorials/tutorial22/holed_poisson.pt",
    "flow_past_shapes": RAW + "Ali-Stanford/PointNetCFD/0e7c3498cc0e4a18540e1e7f772b71bc80e6e651/Data.npy",
    "linear_elastic": RAW
    + "SURGroup/UQpy/0a28a1d692c916a23ee6f73c2b92fdc4a505d661/docs/code/scientific_machine_learning/"
    + "deep_operator_network/linear_elastic_data.mat",
}
POINTS = 1024  # of every cloud
GUTENBERG = "https://www.gutenberg.org/cache/epub/{number}/pg{number}.txt"
# Split -> numbers of books at Project Gutenberg: The Time Machine and Emma, Sherlock Holmes, and eleven more novels.
BOOKS = {
    "train": (11, 84, 98, 145, 174, 345, 766, 1342, 1400, 2600, 2701),
    "validation": (35, 158),
    "test": (1661,),
}


class DownloadError(Exception):
    """What a user has to do; printed in one line."""


def from_hub(folder: Path, name: str, config: str | None = None, rename: dict[str, str] | None = None) -> None:
    """Loads all splits of a Hub dataset; columns in ``rename`` get the name that the scripts expect."""
    for split, rows in load_dataset(name, config).items():
        for old, new in (rename or {}).items():
            rows = rows.rename_column(old, new)
        save(rows, folder / f"{split}.parquet")


def glue(folder: Path) -> None:
    for task in GLUE:
        from_hub(folder / task, "nyu-mll/glue", task)


def easy_vqa(folder: Path) -> None:
    """Reads the package easy-vqa, which holds its images."""
    try:
        import easy_vqa as package
    except ImportError as error:
        raise DownloadError("easy_vqa comes as a package: pip install easy-vqa, then try again") from error
    features = Features(
        {"image": Image(), "question": Value("string"), "answer": ClassLabel(names=package.get_answers())}
    )
    for split in ("train", "test"):
        questions, answers, images = getattr(package, f"get_{split}_questions")()
        paths = getattr(package, f"get_{split}_image_paths")()
        rows = {"image": [paths[number] for number in images], "question": questions, "answer": answers}
        save(Dataset.from_dict(rows, features), folder / f"{split}.parquet")


def nlvr(folder: Path, source: Path | None) -> None:
    """Reads a clone of lil-lab/nlvr: six orders of the boxes per training sentence, the first one elsewhere."""
    if source is None or not (source / "nlvr").is_dir():
        raise DownloadError(
            "nlvr comes as a repository: git clone --depth 1 https://github.com/lil-lab/nlvr, then --source nlvr"
        )
    features = Features({"image": Image(), "sentence": Value("string"), "label": ClassLabel(names=["false", "true"])})
    for split, theirs in (("train", "train"), ("validation", "dev"), ("test", "test")):
        part = source / "nlvr" / theirs
        rows: dict[str, list] = {"image": [], "sentence": [], "label": []}
        for line in (part / f"{theirs}.json").read_text(encoding="utf-8").splitlines():
            example = json.loads(line)
            for order in range(6 if split == "train" else 1):
                name = f"{theirs}-{example['identifier']}-{order}.png"
                rows["image"].append(str(part / "images" / example["directory"] / name))
                rows["sentence"].append(example["sentence"])
                rows["label"].append(example["label"])
        save(Dataset.from_dict(rows, features), folder / f"{split}.parquet")


def modelnet(folder: Path, name: str) -> None:
    """Gets ModelNet10 or 40 by PyTorch Geometric: points drawn on the surfaces by area, mean 0, in the unit ball."""
    from torch_geometric.datasets import ModelNet
    from torch_geometric.transforms import SamplePoints

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        for split in ("train", "test"):
            meshes = ModelNet(root, name, train=split == "train", pre_transform=SamplePoints(POINTS))
            names = sorted(path.name for path in Path(meshes.raw_dir).iterdir() if path.is_dir())
            clouds = [mesh.pos - mesh.pos.mean(0) for mesh in meshes]
            clouds = [(cloud / cloud.norm(dim=1).max()).numpy().astype(np.float16).tolist() for cloud in clouds]
            rows = Dataset.from_dict({"points": clouds, "label": [int(mesh.y) for mesh in meshes]})
            save(rows.cast_column("label", ClassLabel(names=names)).shuffle(seed=0), folder / f"{split}.parquet")


def graphs(folder: Path) -> None:
    """Gets MUTAG and PROTEINS of TUDataset by PyTorch Geometric."""
    from torch_geometric.datasets import TUDataset

    for name in ("MUTAG", "PROTEINS"):
        with tempfile.TemporaryDirectory() as root:
            data = TUDataset(root, name, use_node_attr=True)
            attributes = data.num_node_attributes
            rows: dict[str, list] = {"edge_index": [], "node_label": [], "y": []}
            if attributes:
                rows["node_attr"] = []
            for graph in data:
                rows["edge_index"].append(graph.edge_index.tolist())
                rows["node_label"].append(graph.x[:, attributes:].argmax(1).tolist())
                rows["y"].append(int(graph.y))
                if attributes:
                    rows["node_attr"].append(graph.x[:, :attributes].flatten().tolist())
            save(Dataset.from_dict(rows), folder / f"{name.lower()}.parquet")


def pde(folder: Path) -> None:
    """Gets Darcy flow and Burgers' equation, as the neuraloperator library ships them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PDE_FILES:
        with urllib.request.urlopen(f"{PDE}/{name}.pt", timeout=60) as answer:
            values = torch.load(io.BytesIO(answer.read()), weights_only=True, map_location="cpu")
        arrays = {key: np.asarray(values[key]) for key in ("x", "y")}
        arrays = {key: array.astype(np.float32) if array.dtype != bool else array for key, array in arrays.items()}
        np.savez_compressed(folder / f"{name}.npz", **arrays)


def meshes(folder: Path) -> None:
    """Fetches fields on irregular points: PINA's Poisson problem with a hole, PointNetCFD's flows, UQpy's elastic
    plate."""
    from scipy.io import loadmat

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, address in MESHES.items():
        with urllib.request.urlopen(address, timeout=60) as answer:
            files[name] = io.BytesIO(answer.read())
    poisson = torch.load(files["holed_poisson"], weights_only=True, map_location="cpu")
    flow, plate = np.load(files["flow_past_shapes"]), loadmat(files["linear_elastic"])
    arrays = {
        "holed_poisson": {
            "positions": np.stack([poisson["x"].T, poisson["y"].T], axis=-1),
            "u": poisson["u"].T,
            "mu": poisson["mu"],
            "triangles": poisson["triang"],
        },
        "flow_past_shapes": {"positions": flow[..., :2]} | {key: flow[..., 2 + k] for k, key in enumerate("puv")},
        "linear_elastic": {
            "positions": plate["X"],
            "load": plate["F"].squeeze(1),
            "ux": plate["Ux"].squeeze(-1),
            "uy": plate["Uy"].squeeze(-1),
        },
    }
    for name, parts in arrays.items():
        found = {key: np.asarray(part) for key, part in parts.items()}
        found = {key: part.astype(np.float32 if part.dtype.kind == "f" else np.int32) for key, part in found.items()}
        np.savez_compressed(folder / f"{name}.npz", **found)
        print(f"{folder / name}.npz: {len(found['u' if 'u' in found else 'ux']):,} samples")


def gutenberg(folder: Path) -> None:
    """Fetches paragraphs of novels, split by book, without what Project Gutenberg puts before and after them."""
    for split, numbers in BOOKS.items():
        rows: dict[str, list] = {"text": [], "title": []}
        for number in numbers:
            with urllib.request.urlopen(GUTENBERG.format(number=number), timeout=60) as answer:
                title, texts = paragraphs(answer.read().decode("utf-8-sig"))
            rows["text"] += texts
            rows["title"] += [title] * len(texts)
        save(Dataset.from_dict(rows), folder / f"{split}.parquet")


def paragraphs(book: str) -> tuple[str, list[str]]:
    """Returns title and paragraphs, each in one line, of a text file of Project Gutenberg."""
    head, begin, rest = re.split(r"^(\*\*\* ?START OF .*)$", book.replace("\r\n", "\n"), maxsplit=1, flags=re.M)
    title = re.search(r"^Title: (.*)$", head, flags=re.M)
    body = re.split(r"^\*\*\* ?END OF ", rest, maxsplit=1, flags=re.M)[0]
    texts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", body)]
    return (title[1].strip() if title else begin.strip("* ")), [text for text in texts if text]


def save(rows: Dataset, path: Path) -> None:
    """Saves whole or not at all: an interrupted download leaves no file that looks finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    rows.to_parquet(part)
    part.replace(path)
    print(f"{path}: {len(rows):,} rows")


# Name -> what it is, and what gets it into a folder.
SETS: dict[str, tuple[str, Callable]] = {
    "fashion_mnist": ("Fashion-MNIST", lambda f, s: from_hub(f, "zalando-datasets/fashion_mnist")),
    "cifar10": ("CIFAR-10 *", lambda f, s: from_hub(f, "uoft-cs/cifar10", rename={"img": "image"})),
    "glue": ("the nine tasks of GLUE", lambda f, s: glue(f)),
    "wikitext2": ("WikiText-2", lambda f, s: from_hub(f, "Salesforce/wikitext", "wikitext-2-v1")),
    "gutenberg": ("14 novels of Project Gutenberg *", lambda f, s: gutenberg(f)),
    "vqa_rad": ("VQA-RAD *", lambda f, s: from_hub(f, "flaviagiammarino/vqa-rad")),
    "easy_vqa": ("easy-VQA * (needs the package easy-vqa)", lambda f, s: easy_vqa(f)),
    "nlvr": ("NLVR * (needs a clone, see --source)", nlvr),
    "modelnet10": ("ModelNet10 *, 1,024 points per shape (needs torch_geometric)", lambda f, s: modelnet(f, "10")),
    "modelnet40": ("ModelNet40, 1,024 points per shape (needs torch_geometric)", lambda f, s: modelnet(f, "40")),
    "graphs": ("MUTAG and PROTEINS (needs torch_geometric)", lambda f, s: graphs(f)),
    "pde": ("Darcy flow and Burgers' equation", lambda f, s: pde(f)),
    "meshes": ("fields on irregular meshes: Poisson, flow, elasticity (needs scipy)", lambda f, s: meshes(f)),
}


def main(arguments: list[str] | None = None) -> None:
    sets = "\n".join(f"  {name:14} {what}" for name, (what, _) in SETS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{sets}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=SETS, metavar="name", help="sets to get, of the list above")
    parser.add_argument("--output", type=Path, default=ROOT / "data", help="folder to put them in; default: data")
    parser.add_argument("--source", type=Path, help="the clone of lil-lab/nlvr")
    args = parser.parse_args(arguments)
    for name in args.names:
        try:
            SETS[name][1](args.output / name, args.source)
        except DownloadError as error:
            sys.exit(f"download.py: {error}")
        except ImportError as error:
            sys.exit(f"download.py: {name} needs a package that is not installed: pip install {error.name}")
        except OSError as error:  # no network, no such dataset, a full disk: all of them say which
            sys.exit(f"download.py: {name} could not be got: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
