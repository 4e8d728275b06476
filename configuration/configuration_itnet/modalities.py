# SPDX-License-Identifier: Apache-2.0
"""The table of modalities: one row holds all that the packages need to know of a modality, in plain values.

A row names classes and functions as "module:name", those of modeling_itnet as ".module:name". They are imported when
they are used, so that reading the table imports nothing. A model that is exported with its code takes along its own
row alone, and of that the fields that a configuration reads.
"""

import re
from dataclasses import dataclass, field
from typing import Any


def _as_reference(value) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


@dataclass(frozen=True)
class Head:
    """A model class for a task. References may be given as the classes themselves."""

    model: str | type
    auto_class: str  # name of the Auto class that makes it
    hub_task: str | None = None  # what the Hub calls the task; None if it has no name for it
    pipeline: str | type | None = None  # pipeline for the task "itnet-<hub_task>", where Transformers has none
    # Of a new configuration for the task; a function finds its value in all that the configuration says.
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        for name in ("model", "pipeline"):
            object.__setattr__(self, name, _as_reference(getattr(self, name)))

    @property
    def task(self) -> str:
        """The name of the task here, such as image-classification for ITNetForImageClassification."""
        name = self.model.split(":")[1].removeprefix("ITNetFor")
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


@dataclass(frozen=True)
class Modality:
    """A row of the table. References may be given as the classes or functions themselves."""

    name: str
    position_dim: int | None = None  # coordinates per position, s; None: every configuration says it
    has_free_position_dim: bool = False  # a configuration may say another number
    has_cls: bool = False  # there is a [CLS] position that can be pooled
    is_ordered: bool = False  # positions have an order, so that a model can be causal
    grid_dim: int = 0  # axes of the grid that the positions form, whose windows are near fields; 0: they form none
    has_edges: bool = False  # positions may be joined by edges (`edge_gate`), whose ends are near fields
    near_radius: float | None = None  # of the balls that are near fields elsewhere; None: every configuration says it
    has_tokens: bool = False  # there is a vocabulary, and a tokenizer
    parts: tuple[str, ...] = ()  # the modalities that lie on its joint domain, in the order of weights in `measure`

    encoder: str | type = ""  # turns the inputs into a signal; see modeling_itnet/encoders
    heads: tuple[Head, ...] = ()
    bare_task: str = "feature-extraction"  # what the Hub calls the task of a model without a head
    processor: str | type | None = None  # has `from_model_config(config)`, with a tokenizer `(config, tokenizer)`
    reader: str | None = None  # function that reads a path on the command line as a list of inputs for the processor
    plot: str | None = None  # function that draws a kernel for `itnet plot-kernel`
    example: str | None = None  # function that makes up an input for `itnet explore`
    title: str = ""  # on the card: "an ITNet for <title>"
    inputs: str = ""  # on the card: the forward arguments, and what makes them

    def __post_init__(self):
        if not self.name.isidentifier():
            raise ValueError(f"`name` ({self.name!r}) of a modality must be an identifier")
        for name in ("encoder", "processor", "reader", "plot", "example"):
            object.__setattr__(self, name, _as_reference(getattr(self, name)))

    @property
    def exported(self) -> tuple[str, ...]:
        """References to all code that may be exported with a model."""
        own = (self.encoder, self.processor)
        return tuple(filter(None, (*own, *(part for head in self.heads for part in (head.model, head.pipeline)))))


def _token_frequencies(values: dict[str, Any]) -> float:
    """Returns sigma of gamma, by which neighbouring tokens are 3/8 of a wave of the typical frequency apart."""
    return 3 / 8 * values.get("max_position_embeddings", 512)


# A language model reads the last tokens with the full kernel, and all of them with one that keeps a small state. What
# the kernel sees and how it starts was chosen on validation data (docs/language.md).
_LANGUAGE_MODEL = {
    "is_causal": True,
    "integration_mode": "near_far",
    "near_size": 4,
    "fourier_scale": _token_frequencies,
    "initializer_range": 0.05,
    "kernel_inputs": ("x-y", "u_x", "u_y", "u_x*u_y"),
    "kernel_init_scale": 1.0,
    "kernel_hidden_size": 8,
    "factor_form": "matrix",
    "factor_decay": True,
    "output_gate": True,
    "kernel_position_scale": 10.0,
    "position_init_scale": 0.0,
}
# Transformers has no Auto class for point clouds, graphs or image pairs: their heads label a whole input, as sequence
# classifiers do. A function of time is the signal that it has one for.
_ROWS = (
    Modality(
        "image",
        position_dim=2,
        grid_dim=2,
        has_cls=True,
        encoder=".encoders.image:ITNetImageEncoder",
        heads=(
            Head(
                ".heads.image:ITNetForImageClassification", "AutoModelForImageClassification", "image-classification"
            ),
        ),
        bare_task="image-feature-extraction",
        processor=".processing.image:ITNetImageProcessor",
        reader=".cli.inputs:read_images",
        plot=".cli.kernels:plot_image",
        example=".cli.examples:example_image",
        title="images",
        inputs="`pixel_values`, which `AutoImageProcessor` makes",
    ),
    Modality(
        "text",
        position_dim=1,
        grid_dim=1,
        has_cls=True,
        is_ordered=True,
        has_tokens=True,
        encoder=".encoders.text:ITNetTextEncoder",
        heads=(
            Head(
                ".heads.causal_lm:ITNetForCausalLM",
                "AutoModelForCausalLM",
                "text-generation",
                settings=_LANGUAGE_MODEL,
            ),
            Head(".heads.text:ITNetForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
            Head(".heads.text:ITNetForQuestionAnswering", "AutoModelForQuestionAnswering", "question-answering"),
            Head(
                ".heads.text:ITNetForSequenceClassification",
                "AutoModelForSequenceClassification",
                "text-classification",
            ),
            Head(".heads.text:ITNetForTokenClassification", "AutoModelForTokenClassification", "token-classification"),
        ),
        reader=".cli.inputs:read_texts",
        plot=".cli.kernels:plot_text",
        example=".cli.examples:example_text",
        title="text",
        inputs="`input_ids` and `attention_mask`, which `AutoTokenizer` makes",
    ),
    Modality(
        "multimodal",
        position_dim=2,
        grid_dim=2,
        has_cls=True,
        has_tokens=True,
        parts=("image", "text"),
        encoder=".encoders.multimodal:ITNetMultimodalEncoder",
        heads=(
            Head(".heads.multimodal:ITNetForImagesAndTextClassification", "AutoModelForSequenceClassification"),
            Head(
                ".heads.multimodal:ITNetForVisualQuestionAnswering",
                "AutoModelForVisualQuestionAnswering",
                "visual-question-answering",
                pipeline=".hub.pipelines:ITNetVisualQuestionAnsweringPipeline",
            ),
        ),
        processor=".processing.multimodal:ITNetProcessor",
        example=".cli.examples:example_image_and_text",
        title="image and text together",
        inputs="`pixel_values` and `input_ids`, which `AutoProcessor` makes",
    ),
    Modality(
        "point_cloud",
        position_dim=3,
        near_radius=0.25,
        encoder=".encoders.point_cloud:ITNetPointCloudEncoder",
        heads=(Head(".heads.point_cloud:ITNetForPointCloudClassification", "AutoModelForSequenceClassification"),),
        processor=".processing.point_cloud:ITNetPointCloudProcessor",
        reader=".cli.inputs:read_clouds",
        plot=".cli.kernels:plot_cloud",
        example=".cli.examples:example_cloud",
        title="point clouds",
        inputs="`points`, which `AutoFeatureExtractor` makes",
    ),
    Modality(
        "graph",
        position_dim=8,
        has_free_position_dim=True,
        has_edges=True,
        encoder=".encoders.graph:ITNetGraphEncoder",
        heads=(Head(".heads.graph:ITNetForGraphClassification", "AutoModelForSequenceClassification", "graph-ml"),),
        processor=".processing.graph:ITNetGraphProcessor",
        example=".cli.examples:example_graph",
        title="graphs",
        inputs="`node_features` or `node_types`, `positions` and `neighbors`, which `AutoFeatureExtractor` makes",
    ),
    Modality(
        "signal",
        has_free_position_dim=True,
        is_ordered=True,
        encoder=".encoders.signal:ITNetSignalEncoder",
        heads=(Head(".heads.signal:ITNetForSignalRegression", "AutoModelForTimeSeriesPrediction"),),
        example=".cli.examples:example_signal",
        title="functions on any mesh",
        inputs="`signal_values` or `inputs_embeds`, and `positions`",
    ),
)
#: Name -> row. `modeling_itnet.register_modality` adds one.
MODALITIES = {row.name: row for row in _ROWS}


def find_modality(name: str) -> Modality:
    """Returns the row of a modality."""
    if name not in MODALITIES:
        raise ValueError(f"`modality` ({name!r}) must be one of {', '.join(MODALITIES)}")
    return MODALITIES[name]


def find_task(name: str) -> tuple[Head, Modality]:
    """Returns the head for a task and its modality, by our name (causal-lm) or the Hub's (text-generation)."""
    heads = [(head, row) for row in MODALITIES.values() for head in row.heads]
    found = {head.hub_task: (head, row) for head, row in heads} | {head.task: (head, row) for head, row in heads}
    if name not in found:
        names = ", ".join(head.task for head, _ in heads)
        raise ValueError(f"there is no task {name!r}; there are {names}, and the Hub's names of these")
    return found[name]


def task_settings(task: str) -> dict[str, Any]:
    """Returns what a new configuration for a task says: its modality, and what its head needs."""
    head, row = find_task(task)
    return {"modality": row.name, **head.settings}
