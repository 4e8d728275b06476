# SPDX-License-Identifier: Apache-2.0
"""Makes up an input of every modality, for ``itnet explore`` without inputs. The table of modalities names the
functions.

Each takes a configuration and the processors of a checkpoint, and returns forward arguments for one sample.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from configuration_itnet import ITNetConfig

from ..processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor
from .inputs import find_tokenizer, process, process_pairs

SENTENCE = "The kernel sees where two words stand and what they are."
QUESTION = "What colour is the circle?"


def picture() -> Image.Image:
    """Draws a yellow circle and a blue square before a slope of grey."""
    slope = np.linspace(40, 200, 256)[None].repeat(256, 0).astype(np.uint8)
    image = Image.fromarray(slope).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 40, 140, 150), fill=(240, 200, 40))
    draw.rectangle((140, 130, 225, 215), fill=(30, 80, 190))
    return image


def example_image(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    processor = processors[0] if processors else ITNetImageProcessor.from_model_config(config)
    mode = "RGB" if config.num_channels == 3 else "L"
    return process(processor, config, [picture().convert(mode)])


def example_text(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    """Returns a sentence or, without a tokenizer, every token of a small vocabulary in turn."""
    tokenizer = find_tokenizer(processors)
    if tokenizer is not None:
        return process(tokenizer, config, [SENTENCE])
    count = min(config.vocab_size, config.max_position_embeddings, 24)
    return {"input_ids": torch.arange(count)[None], "attention_mask": torch.ones(1, count, dtype=torch.long)}


def example_image_and_text(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    images = [picture().convert("RGB" if config.num_channels == 3 else "L")]
    if (config.architectures or [""])[0] == "ITNetForImagesAndTextClassification":
        images = [[images[0], images[0].rotate(90)]]
    return process_pairs(processors, images, [QUESTION])


def example_cloud(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    """Returns 512 points of a torus, evenly spread by the golden ratio."""
    processor = processors[0] if processors else ITNetPointCloudProcessor.from_model_config(config)
    number = np.arange(512)
    long, short = 2 * math.pi * number / 512, 2 * math.pi * number * (math.sqrt(5) - 1) / 2
    ring = 1 + 0.4 * np.cos(short)
    points = np.stack([ring * np.cos(long), ring * np.sin(long), 0.4 * np.sin(short)], 1)
    batch = process(processor, config, [points])
    if config.point_feature_size:
        batch["point_features"] = torch.zeros(*batch["points"].shape[:2], config.point_feature_size)
    return batch


def example_graph(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    """Returns two rings of six nodes that share an edge, with a tail of two."""
    processor = processors[0] if processors else ITNetGraphProcessor.from_model_config(config)
    edges = [(k, k + 1) for k in range(9)] + [(9, 0), (4, 9), (2, 10), (10, 11)]
    types = np.arange(12) % max(config.num_node_types or config.node_feature_size, 1)
    graph = {"edge_index": np.array(edges).T, "num_nodes": 12}
    if config.num_node_types:
        graph["node_types"] = types
    else:
        graph["x"] = np.eye(config.node_feature_size, dtype=np.float32)[types]
    return dict(processor([graph], return_tensors="pt"))


def example_signal(config: ITNetConfig, processors: list) -> dict[str, Tensor]:
    """Returns a wave on 64 points of a line, or on 256 points that fill a cube of more dimensions evenly."""
    size = config.position_dim
    count = 64 if size == 1 else 256
    number = torch.arange(count, dtype=torch.float64)
    steps = torch.tensor([math.sqrt(prime) % 1 for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)][:size])
    positions = number[:, None] / count if size == 1 else (number[:, None] * steps) % 1
    wave = torch.sin(2 * math.pi * positions.sum(1))
    name = "signal_values" if config.signal_feature_size else "inputs_embeds"
    channels = config.signal_feature_size or config.hidden_size
    values = torch.stack([wave.roll(3 * k) for k in range(channels)], -1)
    return {name: values[None].float(), "positions": positions.float()}
