"""The runs behind docs/results.md: which recipe, with which options, for which seeds."""

from dataclasses import dataclass

from modeling_itnet.recipes import ROOT

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Row:
    """One line of a table: a model, trained once per seed."""

    name: str  # in file names
    label: str  # in the table
    options: tuple[str, ...] = ()
    seeds: int = 1


@dataclass(frozen=True)
class Table:
    """A task: rows that share a recipe, and with it data, epochs, augmentation and schedule."""

    name: str
    title: str
    recipe: str
    metrics: dict[str, str]  # name in the log -> heading
    rows: tuple[Row, ...]
    note: str = ""
    is_ablation: bool = False


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
        return [*self.row.options, "--seed", str(self.seed)]


def mode(name: str) -> tuple[str, ...]:
    return ("--integration_mode", name)


def overrides(*settings: str) -> tuple[str, ...]:
    return ("--config_overrides", *settings)


def peer(name: str, *settings: str) -> tuple[str, ...]:
    return ("--model_type", name, *(overrides(*settings) if settings else ()))


MODES = {"exact": "ITNet, exact", "monte_carlo": "ITNet, Monte Carlo", "low_rank": "ITNet, low rank"}


def itnet_rows(**seeds: int) -> tuple[Row, ...]:
    """A row per integration mode with its number of seeds."""
    return tuple(Row(f"itnet-{name}", MODES[name], mode(name), count) for name, count in seeds.items())


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


TABLES = (
    Table(
        "cifar10",
        "CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3, exact=3, monte_carlo=1),
            Row("vit", "ViT", peer("vit", "intermediate_size=384"), 3),
            Row("convnet", "ConvNet", peer("convnet"), 3),
        ),
    ),
    Table(
        "modelnet10",
        "ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3, exact=1, monte_carlo=1),
            Row("pointnet", "PointNet-style", peer("pointnet", "intermediate_size=384"), 3),
            Row("point_transformer", "Point-Transformer-style", peer("point_transformer"), 3),
        ),
        note=(
            "ITNet loses to PointNet here. Tried on seed 0, low rank, judged on the test set and so optimistic: "
            "`kernel_init_scale=1.0 fourier_scale=0.3` 0.489, the same at a learning rate of 5e-3 0.595; "
            "`kernel_init_scale=1.0 point_embedding=raw` 0.558, the same at 5e-3 0.623. A higher learning rate and "
            "raw coordinates help a model of this size in this few steps, and do not close the gap. Options: "
            "`--learning_rate 5e-3 --config_overrides kernel_init_scale=1.0 point_embedding=raw`."
        ),
    ),
    Table(
        "darcy",
        "Darcy flow, trained on 16 × 16",
        "darcy-cpu",
        {"16_relative_l2": "relative L2, 16 × 16", "32_relative_l2": "relative L2, 32 × 32 (untrained)"},
        (
            Row("itnet-low_rank", "ITNet, low rank", mode("low_rank"), 3),
            Row("fno", "FNO", peer("fno"), 3),
            Row("gno", "GNO", peer("gno"), 1),
        ),
        note=(
            "A step asks ITNet for 32 random points of each solution, because its query layer is exact and costs the "
            "number of inputs per query; the peers are trained on all 256. ITNet loses to FNO so far. Seed 0, judged "
            "on the test set, `--learning_rate 5e-3 --config_overrides kernel_init_scale=1.0`: 0.139 and 0.161."
        ),
    ),
    Table(
        "sst2",
        "SST-2 from scratch",
        "sst2-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3, exact=1, monte_carlo=1), Row("bert", "BERT", peer("bert"), 3)),
    ),
    Table(
        "wikitext2",
        "Masked language modelling, WikiText-2",
        "wikitext2-cpu",
        {"loss": "loss (nats per masked token)", "accuracy": "accuracy"},
        (*itnet_rows(low_rank=3, exact=1), Row("bert", "BERT", peer("bert"), 3)),
    ),
    Table(
        "mutag",
        "MUTAG, ten folds",
        "mutag-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3), Row("gin", "GIN", peer("gin", "intermediate_size=448"), 3)),
    ),
    Table(
        "easy_vqa",
        "easy-VQA, questions for a shape or a colour",
        "easy_vqa-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3), Row("vilt", "ViLT", peer("vilt"), 3)),
    ),
    Table(
        "fashion_mnist",
        "Fashion-MNIST",
        "fashion_mnist-cpu",
        ACCURACY,
        (
            *itnet_rows(low_rank=3, exact=1),
            Row("vit", "ViT", peer("vit", "intermediate_size=384"), 3),
            Row("convnet", "ConvNet", peer("convnet"), 3),
        ),
    ),
    *(
        Table(
            task,
            f"{title} from scratch",
            f"{task}-cpu",
            metrics,
            (*itnet_rows(low_rank=3), Row("bert", "BERT", peer("bert"), 3)),
        )
        for task, title, metrics in (
            ("cola", "CoLA", {"matthews_correlation": "Matthews correlation"}),
            ("mrpc", "MRPC", {"f1": "F1", **ACCURACY}),
            ("stsb", "STS-B", {"spearmanr": "Spearman correlation"}),
            ("rte", "RTE", ACCURACY),
        )
    ),
    Table(
        "nlvr",
        "NLVR, single picture",
        "nlvr-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=3), Row("vilt", "ViLT", peer("vilt"), 3)),
    ),
    Table(
        "vqa_rad", "VQA-RAD", "vqa_rad-cpu", ACCURACY, (*itnet_rows(low_rank=3), Row("vilt", "ViLT", peer("vilt"), 3))
    ),
    Table(
        "proteins",
        "PROTEINS, ten folds",
        "proteins-cpu",
        ACCURACY,
        (*itnet_rows(low_rank=1), Row("gin", "GIN", peer("gin", "intermediate_size=448"), 1)),
    ),
    Table(
        "burgers",
        "Burgers' equation",
        "burgers-cpu",
        {"16_relative_l2": "relative L2"},
        (*itnet_rows(exact=3), Row("fno", "FNO", peer("fno"), 3)),
    ),
    Table(
        "cifar10-kernel-inputs",
        "Kernel inputs, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        kernel_input_rows("--num_train_epochs", "1"),
        is_ablation=True,
    ),
    Table(
        "modelnet10-kernel-inputs",
        "Kernel inputs, ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        kernel_input_rows("--integration_mode", "exact", "--num_points", "32", "--num_train_epochs", "2"),
        is_ablation=True,
    ),
    Table(
        "cifar10-width",
        "Width of the kernel, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("kernel_hidden_size", [16, 32, 64, 128], "--num_train_epochs", "1"),
        is_ablation=True,
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
                ("--num_train_epochs", "1", *overrides(f"num_fourier_features={count}", f"fourier_scale={scale}")),
            )
            for count in (16, 64)
            for scale in (0.3, 1.0, 3.0, 10.0)
        ),
        is_ablation=True,
    ),
    Table(
        "cifar10-depth",
        "Depth, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("num_hidden_layers", [1, 2, 4, 6], *mode("low_rank"), "--num_train_epochs", "1"),
        is_ablation=True,
    ),
    Table(
        "cifar10-initialisation",
        "Initial kernel scale ε, CIFAR-10",
        "cifar10-cpu",
        ACCURACY,
        setting_rows("kernel_init_scale", [1.0, 0.1, 0.01, 0.001, 0.0001], "--num_train_epochs", "1"),
        is_ablation=True,
    ),
    Table(
        "modelnet10-local",
        "Local neighbours K, ModelNet10",
        "modelnet10-cpu",
        ACCURACY,
        setting_rows("local_neighbors", [0, 4, 8, 16], *mode("low_rank"), "--num_train_epochs", "4"),
        is_ablation=True,
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
        is_ablation=True,
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
