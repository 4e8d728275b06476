# SPDX-License-Identifier: Apache-2.0
"""Fills the one template of model cards from a configuration."""

from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from configuration_itnet import ITNetConfig, find_modality, preset_names

from ..analysis.parameters import count_parameters
from ..integration.choice import exact_limit
from ..modalities import find_head
from ..modeling_itnet import ITNetModel


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
    Returns the card of a model. Nothing is loaded or allocated.

    Args:
        name: Repository id (owner/name), or the name of a folder.
        results: What a trained model reached; `metric_args={"command": ...}` says how to reproduce each of them.
        is_random: The weights are those of a new model.
        has_code: The folder holds the code that `trust_remote_code=True` runs.
        title: Heading of the card; by default the name without its owner.
        datasets, about_data: Hub ids of the training data, and a text on what the model was trained and tested on.
        preset: The model is a size that `itnet create` makes, not a folder.
    """
    with torch.device("meta"):
        components = count_parameters(model_class(config))
    row, head = find_modality(config.modality), find_head(model_class)
    task = row.bare_task if head is None else head.hub_task
    short_name = name.rstrip("/").split("/")[-1]
    tags = ["itnet", "integral-transform", config.modality.replace("_", "-")]
    data = ModelCardData(
        model_name=short_name if results else None,
        eval_results=list(results) or None,
        library_name="transformers",
        license="apache-2.0",
        datasets=list(datasets) or None,
        pipeline_tag=task,
        tags=[*tags, "custom_code"] if has_code else tags,
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card_template.md")),
        title=title or short_name,
        repo=name if "/" in name else f"./{name}",  # a bare name would be asked of the Hub
        config=config,
        exact_limit=exact_limit(config),
        modality=row,
        task=task,
        model_class=model_class.__name__,
        auto_class="AutoModel" if head is None else head.auto_class,
        components=components,
        total=sum(components.values()),
        is_random=is_random,
        has_code=has_code,
        results=list(results),
        about_data=about_data,
        preset=preset,
    )


def result_task(model_class: type) -> str:
    """Returns what the Hub calls the task that a result was measured on, for `EvalResult.task_type`."""
    return getattr(find_head(model_class), "hub_task", None) or "other"


def preset_cards() -> dict[str, str]:
    """Returns file name -> card of every preset."""
    configs = {name: ITNetConfig.from_preset(name) for name in preset_names()}
    cards = {name: model_card(name, config, is_random=True, preset=name) for name, config in configs.items()}
    return {f"{name}.md": str(card) for name, card in cards.items()}
