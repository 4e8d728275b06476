"""The runs behind docs/results.md: which recipe, with which options, for which seeds."""

import json
from dataclasses import dataclass

from modeling_itnet.training.recipes import ROOT

RESULTS = ROOT / "docs" / "results"
RATES = ("1e-3", "3e-3", "1e-2")  # learning rates that every tuned model tries
HOLDOUT = "0.1"  # share of the training rows that they are judged on


@dataclass(frozen=True)
class Row:
    """One line of a table: a model, trained once per seed."""

    name: str  # in file names
    label: str  # in the table
    options: tuple[str, ...] = ()
    seeds: int = 1
    tuned: str = ""  # the model of the tuning table whose learning rate it takes; default: `name`
    start: str = ""  # the run whose trained model it starts from


@dataclass(frozen=True)
class Table:
    """A task: rows that share a recipe, and with it data, epochs, augmentation and schedule."""

    name: str
    title: str
    recipe: str
    metrics: dict[str, str]  # name in the log -> heading
    rows: tuple[Row, ...]
    kind: str = "task"  # "tuning", "task" or "ablation"
    tuning: str = ""  # the table of kind "tuning" that sets the learning rates


@dataclass(frozen=True)
class Run:
    """One training run."""

    table: Table
    row: Row
    seed: int

    @property
    def path(self):
        return RESULTS / f"{self.table.name}.{self.row.name}.{self.seed}.json"

    @property
    def options(self) -> list[str]:
        rate = best_rate(self.table.tuning, self.row.tuned or self.row.name) if self.table.tuning else None
        return [*self.row.options, *(["--learning_rate", rate] if rate else []), "--seed", str(self.seed)]


def tuning_table(task: str, title: str, metrics: dict[str, str], models: dict[str, tuple[str, ...]]) -> Table:
    """Every model with every one of RATES, judged on held-out training rows."""
    rows = tuple(
        Row(f"{model}-{rate}", f"{model}, {rate}", (*options, "--learning_rate", rate, "--holdout", HOLDOUT))
        for model, options in models.items()
        for rate in RATES
    )
    return Table(f"{task}-rates", title, f"{task}-cpu", metrics, rows, kind="tuning")


def best_rate(table: str, model: str) -> str:
    """The learning rate that a tuning table found best for a model by its first metric."""
    metric = next(iter(next(found for found in TABLES if found.name == table).metrics))
    paths = {rate: RESULTS / f"{table}.{model}-{rate}.0.json" for rate in RATES}
    missing = [path.stem for path in paths.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"learning rates are tuned first: {', '.join(missing)} has not run")
    scores = {rate: json.loads(path.read_text(encoding="utf-8"))["metrics"][metric] for rate, path in paths.items()}
    return (min if is_error(metric) else max)(scores, key=scores.get)


def is_error(metric: str) -> bool:
    """Whether less is better."""
    return metric.endswith(("loss", "relative_l2"))


def mode(name: str) -> tuple[str, ...]:
    return ("--integration_mode", name)


def overrides(*settings: str) -> tuple[str, ...]:
    return ("--config_overrides", *settings)


def peer(name: str, *settings: str) -> tuple[str, ...]:
    return ("--model_type", name, *(overrides(*settings) if settings else ()))


MODES = {"exact": "ITNet, exact", "monte_carlo": "ITNet, Monte Carlo", "low_rank": "ITNet, low rank"}


def itnet_rows(*options: str, **seeds: int) -> tuple[Row, ...]:
    """A row per integration mode with its number of seeds. They share a learning rate."""
    return tuple(
        Row(f"itnet-{name}", MODES[name], (*mode(name), *options), count, "itnet") for name, count in seeds.items()
    )


ACCURACY = {"accuracy": "accuracy"}
KERNEL_INPUTS = {
    "all": ("x", "y", "x-y", "distance", "u_x", "u_y", "u_x*u_y"),
    "no-hadamard": ("x", "y", "x-y", "distance", "u_x", "u_y"),
    "no-distance": ("x", "y", "x-y", "u_x", "u_y", "u_x*u_y"),
    "no-relative": ("x", "y", "u_x", "u_y", "u_x*u_y"),
    "content": ("u_x", "u_y", "u_x*u_y"),
    "content-no-hadamard": ("u_x", "u_y"),
    "position": ("x", "y", "x-y", "distance"),
    "absolute": ("x", "y"),
    "relative": ("x-y",),
    "distance": ("distance",),
    "query-content": ("u_x",),
    "hadamard": ("u_x*u_y",),
    "none": (),
}


def kernel_input_rows(*options: str) -> tuple[Row, ...]:
    rows = []
    for name, groups in KERNEL_INPUTS.items():
        value = "[" + ", ".join(f'"{group}"' for group in groups) + "]"
        label = ", ".join(groups) or "none (constant kernel)"
        rows.append(Row(name, label, (*options, *overrides(f"kernel_inputs={value}"))))
    return tuple(rows)


def setting_rows(setting: str, values: list, *options: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{setting}-{value}", f"`{setting}={value}`", (*options, *overrides(f"{setting}={value}")))
        for value in values
    )


GLUE = {
    "cola": ("CoLA", {"matthews_correlation": "Matthews correlation"}),
    "sst2": ("SST-2", ACCURACY),
    "mrpc": ("MRPC", {"f1": "F1", **ACCURACY}),
    "stsb": ("STS-B", {"spearmanr": "Spearman correlation"}),
    "rte": ("RTE", ACCURACY),
}
ITNET = {"itnet": mode("low_rank")}
VIT = peer("vit", "intermediate_size=384")
POINTNET = peer("pointnet", "intermediate_size=384")
BERT, VILT, FNO = peer("bert"), peer("vilt"), peer("fno")
DARCY = {"16_relative_l2": "relative L2, 16 × 16", "32_relative_l2": "relative L2, 32 × 32 (untrained)"}
RELATIVE_L2 = {"16_relative_l2": "relative L2"}
IMAGE_ABLATION = ("--num_train_epochs", "1", "--max_train_samples", "15000", "--learning_rate", "3e-3")
POINT_ABLATION = ("--num_train_epochs", "2", "--learning_rate", "3e-3")
MLM = {"loss": "loss, nats per masked token", "perplexity": "perplexity", **ACCURACY}

TABLES = (
    tuning_table("cifar10", "CIFAR-10", ACCURACY, ITNET | {"vit": VIT, "convnet": peer("convnet")}),
    tuning_table("modelnet10", "ModelNet10", ACCURACY, ITNET | {"pointnet": POINTNET}),
    tuning_table("darcy", "Darcy flow", RELATIVE_L2, ITNET | {"fno": FNO}),
    tuning_table("burgers", "Burgers' equation", RELATIVE_L2, {"itnet": mode("exact"), "fno": FNO}),
    tuning_table("sst2", "SST-2", ACCURACY, ITNET | {"bert": BERT}),
    tuning_table("wikitext2", "WikiText-2", {"loss": "loss"}, {"itnet": mode("exact"), "bert": BERT}),
    Table(
        "cifar10",
        "CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3, exact=3, monte_carlo=1),
            Row("vit", "ViT", VIT, 3),
            Row("convnet", "ConvNet", peer("convnet"), 3),
        ),
        tuning="cifar10-rates",
    ),
    Table(
        "modelnet10",
        "ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3),
            Row("pointnet", "PointNet-style", POINTNET, 3),
            Row("point_transformer", "Point-Transformer-style", peer("point_transformer"), 3, "pointnet"),
        ),
        tuning="modelnet10-rates",
    ),
    Table(
        "darcy",
        "Darcy flow, trained on 16 × 16",
        "darcy-cpu",
        DARCY,
        (*itnet_rows(low_rank=3), Row("fno", "FNO", FNO, 3), Row("gno", "GNO", peer("gno"), 1, "fno")),
        tuning="darcy-rates",
    ),
    Table(
        "burgers",
        "Burgers' equation",
        "burgers-cpu",
        RELATIVE_L2,
        (*itnet_rows(exact=3), Row("fno", "FNO", FNO, 3), Row("gno", "GNO", peer("gno"), 3, "fno")),
        tuning="burgers-rates",
    ),
    Table(
        "sst2",
        "SST-2 from scratch",
        "sst2-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3, exact=1, monte_carlo=1), Row("bert", "BERT", BERT, 3)),
        tuning="sst2-rates",
    ),
    Table(
        "wikitext2",
        "Masked language modelling, WikiText-2",
        "wikitext2-cpu",
        MLM,
        (*itnet_rows(exact=3, low_rank=1), Row("bert", "BERT", BERT, 3)),
        tuning="wikitext2-rates",
    ),
    *(
        Table(
            f"{task}-pretrained",
            f"{title} after masked language modelling",
            f"{task}-cpu",
            metrics,
            (
                Row("itnet-low_rank", "ITNet, low rank", (), 3, "itnet", "wikitext2.itnet-low_rank.0"),
                Row("bert", "BERT", BERT, 3, start="wikitext2.bert.0"),
            ),
            tuning="sst2-rates",
        )
        for task, (title, metrics) in GLUE.items()
    ),
    Table(
        "mutag",
        "MUTAG, ten folds",
        "mutag-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3, exact=1), Row("gin", "GIN", peer("gin", "intermediate_size=448"), 3)),
    ),
    Table(
        "easy_vqa",
        "easy-VQA, questions for a shape or a colour",
        "easy_vqa-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3, exact=1), Row("vilt", "ViLT", VILT, 3)),
    ),
    Table(
        "fashion_mnist",
        "Fashion-MNIST",
        "fashion_mnist-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3, exact=1),
            Row("vit", "ViT", VIT, 3),
            Row("convnet", "ConvNet", peer("convnet"), 3),
        ),
        tuning="cifar10-rates",
    ),
    Table(
        "nlvr",
        "NLVR, single picture",
        "nlvr-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3), Row("vilt", "ViLT", VILT, 3)),
    ),
    Table(
        "vqa_rad",
        "VQA-RAD",
        "vqa_rad-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3), Row("vilt", "ViLT", VILT, 3)),
    ),
    Table(
        "proteins",
        "PROTEINS, ten folds",
        "proteins-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=1), Row("gin", "GIN", peer("gin", "intermediate_size=448"), 1)),
    ),
    Table(
        "cifar10-kernel-inputs",
        "Kernel inputs, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        kernel_input_rows(*IMAGE_ABLATION),
        kind="ablation",
    ),
    Table(
        "modelnet10-modes",
        "Integration modes, ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        itnet_rows("--num_train_epochs", "3", "--learning_rate", "3e-3", low_rank=1, exact=1, monte_carlo=1),
        kind="ablation",
    ),
    Table(
        "modelnet10-kernel-inputs",
        "Kernel inputs, ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        kernel_input_rows(*POINT_ABLATION),
        kind="ablation",
    ),
    Table(
        "cifar10-width",
        "Width of the kernel, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("kernel_hidden_size", [16, 32, 64, 128], *IMAGE_ABLATION),
        kind="ablation",
    ),
    Table(
        "cifar10-fourier",
        "Fourier features, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        tuple(
            Row(
                f"{count}-{scale}",
                f"L = {count}, σ = {scale}",
                (*IMAGE_ABLATION, *overrides(f"num_fourier_features={count}", f"fourier_scale={scale}")),
            )
            for count in (16, 64)
            for scale in (0.3, 1.0, 3.0, 10.0)
        ),
        kind="ablation",
    ),
    Table(
        "cifar10-depth",
        "Depth, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("num_hidden_layers", [1, 2, 4, 6], *mode("low_rank"), *IMAGE_ABLATION),
        kind="ablation",
    ),
    Table(
        "cifar10-initialisation",
        "Initial kernel scale ε and standard deviation of the weights, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        (
            *setting_rows("kernel_init_scale", [1.0, 0.1, 0.01, 0.001, 0.0001], *IMAGE_ABLATION),
            *setting_rows("initializer_range", [0.05, 0.1], *IMAGE_ABLATION),
        ),
        kind="ablation",
    ),
    Table(
        "cifar10-pooling",
        "What the classifier reads, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("pooling", ["cls", "mean", "max"], *mode("low_rank"), *IMAGE_ABLATION),
        kind="ablation",
    ),
    Table(
        "sst2-pooling",
        "What the classifier reads, SST-2",
        "sst2-cpu",
        ACCURACY,
        setting_rows("pooling", ["cls", "mean", "max"], *mode("low_rank"), "--learning_rate", "3e-3"),
        kind="ablation",
    ),
    Table(
        "modelnet10-local",
        "Local neighbours K, ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        setting_rows("local_neighbors", [0, 4, 8, 16], *mode("low_rank"), *POINT_ABLATION),
        kind="ablation",
    ),
    Table(
        "easy_vqa-measure",
        "Measure, easy-VQA",
        "easy_vqa-cpu",
        ACCURACY,
        tuple(
            Row(name, label, overrides(f"measure={value}"))
            for name, label, value in (
                ("uniform", "uniform", "uniform"),
                ("balanced", "balanced (1 : 1)", "balanced"),
                ("image", "image : text = 3 : 1", "[3, 1]"),
                ("text", "image : text = 1 : 3", "[1, 3]"),
            )
        ),
        kind="ablation",
    ),
)


def runs() -> list[Run]:
    """All runs, in the order of the tables, the first seed of every row before the next."""
    return [
        Run(table, row, seed)
        for table in TABLES
        for seed in range(max(row.seeds for row in table.rows))
        for row in table.rows
        if seed < row.seeds
    ]
