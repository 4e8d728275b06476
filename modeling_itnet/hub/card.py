# SPDX-License-Identifier: Apache-2.0
"""Model cards: one template, filled from a configuration."""

from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from configuration_itnet import ITNetConfig, preset_names

from ..analysis.parameters import count_parameters
from ..modeling_itnet import ITNetModel
from .auto import AUTO_MODELS

_TEMPLATE = Path(__file__).with_name("card_template.md")
# What the Hub calls the tasks; it has no name for what is missing here.
PIPELINE_TAGS = {
    "ITNetForGraphClassification": "graph-ml",
    "ITNetForImageClassification": "image-classification",
    "ITNetForMaskedLM": "fill-mask",
    "ITNetForQuestionAnswering": "question-answering",
    "ITNetForSequenceClassification": "text-classification",
    "ITNetForTokenClassification": "token-classification",
    "ITNetForVisualQuestionAnswering": "visual-question-answering",
}
_MODALITIES = {
    "image": "images",
    "text": "text",
    "multimodal": "image and text together",
    "point_cloud": "point clouds",
    "graph": "graphs",
    "signal": "functions on any mesh",
}
_INPUTS = {
    "image": "`pixel_values`, which `AutoImageProcessor` makes",
    "text": "`input_ids` and `attention_mask`, which `AutoTokenizer` makes",
    "multimodal": "`pixel_values` and `input_ids`, which `AutoProcessor` makes",
    "point_cloud": "`points`, which `AutoFeatureExtractor` makes",
    "graph": "`node_features` or `node_types`, `positions` and `neighbors`, which `AutoFeatureExtractor` makes",
    "signal": "`signal_values` or `inputs_embeds`, and `positions`",
}
_MODES = {
    "exact": "every pair of positions counts",
    "monte_carlo": "{c.num_samples} sampled positions per query in training, as many anchors at evaluation",
    "low_rank": "a kernel of rank {c.rank} per head, in time linear in the number of positions",
    "auto": "exact up to {c.exact_max_positions} positions, approximate above",
}


def model_card(
    name: str,
    config: ITNetConfig,
    model_class: type = ITNetModel,
    results: Sequence[EvalResult] = (),
    is_random: bool = False,
    has_code: bool = True,
    *,
    title: str | None = None,
    datasets: Sequence[str] = (),
    about_data: str = "",
    preset: str | None = None,
) -> ModelCard:
    """
    The card of a model. Nothing is loaded or allocated.

    Args:
        name: Repository id (owner/name), or the name of a folder.
        config, model_class: What the model is made of.
        results: What a trained model reached; `metric_args={"command": ...}` says how to reproduce each of them.
        is_random: The weights are those of a new model.
        has_code: The folder holds the code that `trust_remote_code=True` runs.
        title: Heading of the card; by default the name without its owner.
        datasets: Hub ids of the training data.
        about_data: What the model was trained and tested on, in words.
        preset: The model is a size that `itnet create` makes, not a folder.
    """
    with torch.device("meta"):
        components = count_parameters(model_class(config))
    total = sum(components.values())
    modality = _MODALITIES[config.modality]
    bare_tag = "image-feature-extraction" if config.modality == "image" else "feature-extraction"
    tag = bare_tag if model_class is ITNetModel else PIPELINE_TAGS.get(model_class.__name__)
    data = ModelCardData(
        model_name=name.rstrip("/").split("/")[-1] if results else None,
        eval_results=list(results) or None,
        library_name="transformers",
        license="apache-2.0",
        datasets=list(datasets) or None,
        pipeline_tag=tag,
        tags=[
            "itnet",
            "integral-transform",
            config.modality.replace("_", "-"),
            *(["custom_code"] if has_code else []),
        ],
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title or name.rstrip("/").split("/")[-1],
        repo=name if "/" in name else f"./{name}",  # a bare name would be asked of the Hub
        about_data=about_data,
        preset=preset,
        model_class=model_class.__name__,
        auto_class=_auto_class_name(model_class),
        modality_text=modality,
        parameters=f"{total / 1e6:.4g} M",
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        is_random=is_random,
        has_code=has_code,
        inputs=_INPUTS[config.modality],
        components=components,
        total=total,
        mode=config.integration_mode,
        mode_text=_MODES[config.integration_mode].format(c=config),
        exact_max=config.exact_max_positions,
        kernel_width=config.kernel_hidden_size,
        results=list(results),
    )


def result_task(model_class: type) -> str:
    """What the Hub calls the task that a result was measured on, for `EvalResult.task_type`."""
    return PIPELINE_TAGS.get(model_class.__name__, "other")


def preset_cards() -> dict[str, str]:
    """File name -> card of every preset."""
    return {
        f"{name}.md": str(model_card(name, ITNetConfig.from_preset(name), is_random=True, preset=name))
        for name in preset_names()
    }


def _auto_class_name(model_class: type) -> str:
    return next(auto.__name__ for auto, classes in AUTO_MODELS.items() if model_class in classes.values())
