# SPDX-License-Identifier: Apache-2.0
"""Makes an image-and-text model out of one trained on images and one trained on text (App. train_vqa)."""

from typing import Literal

import torch
from torch import Tensor, nn

from ..encoders.multimodal import TEXT_LINE
from ..modeling_itnet import ITNetModel, ITNetPreTrainedModel


@torch.no_grad()
def from_image_and_text_checkpoints(
    model_class: type[ITNetPreTrainedModel],
    image_checkpoint: str,
    text_checkpoint: str,
    *,
    core: Literal["image", "text", "average"] = "image",
    **overrides,
) -> ITNetPreTrainedModel:
    """Returns a multimodal model whose image and text parts, and layers, start from two trained checkpoints.

    - Image: patch embeddings, [CLS], position projection and Fourier frequencies are those of the image model.
    - Text: token and segment embeddings are those of the text model. Its positions lie on a line, here they lie in
      the plane, with other frequencies; so its position projection is replaced by the one that comes closest to the
      same function of k/n (least squares over k/n in (0, 1]).
    - Layers and final layer norm: those of the image model (``core="image"``, whose frequencies the kernels were
      trained with), of the text model, or the mean of the two.
    - Modality embeddings and the head are new.

    Checkpoints are folders or Hub names, of the bare models or of models with a head; the sizes of their layers must
    agree. ``model_class`` is ITNetModel or a head for `modality="multimodal"`. ``overrides`` are arguments of
    ITNetConfig, such as ``measure="balanced"``; the rest is the configuration of the image model, with the vocabulary
    of the text model.
    """
    if core not in ("image", "text", "average"):
        raise ValueError(f"`core` ({core!r}) must be 'image', 'text' or 'average'")
    image, text = (ITNetModel.from_pretrained(name) for name in (image_checkpoint, text_checkpoint))
    for name, model in (("image", image), ("text", text)):
        if model.config.modality != name:
            raise ValueError(f"`{name}_checkpoint` holds a model for `modality` ({model.config.modality!r})")
    model = model_class(_multimodal_config(image.config, text.config, overrides))
    base = model if isinstance(model, ITNetModel) else model.itnet
    base.fourier.load_state_dict(image.fourier.state_dict())
    base.encoder.image.load_state_dict(image.encoder.state_dict())
    for name in ("word_embeddings", "token_type_embeddings"):
        getattr(base.encoder.text, name).load_state_dict(getattr(text.encoder, name).state_dict())
    base.encoder.text.position_projection.weight.copy_(_projection_in_the_plane(base, text))
    for name in ("layers", "layernorm"):
        getattr(base, name).load_state_dict(_core_state(getattr(image, name), getattr(text, name), core))
    return model


def _multimodal_config(image, text, overrides: dict):
    """Returns the image model's configuration for image and text. The label names of neither carry over."""
    left_out = ("id2label", "label2id", "problem_type", "architectures", "transformers_version", "model_type")
    values = {name: value for name, value in image.to_dict().items() if name not in left_out}
    of_text = ("vocab_size", "type_vocab_size", "max_position_embeddings", "pad_token_id")
    values |= {name: getattr(text, name) for name in of_text}
    return type(image)(**{**values, "modality": "multimodal", **overrides})


def _core_state(image: nn.Module, text: nn.Module, core: str) -> dict[str, Tensor]:
    states = {"image": image.state_dict(), "text": text.state_dict()}
    shapes, others = ({name: tensor.shape for name, tensor in state.items()} for state in states.values())
    if shapes != others:
        differing = sorted(name for name in shapes if shapes[name] != others.get(name))
        raise ValueError(f"the two checkpoints have layers of different sizes, for example {differing[:3]}")
    if core != "average":
        return states[core]
    return {name: (tensor + states["text"][name]) / 2 for name, tensor in states["image"].items()}


def _projection_in_the_plane(base: ITNetModel, text: ITNetModel) -> Tensor:
    """Returns argmin over W of sum_t |W gamma(t, 2) - W_text gamma_text(t)|^2: [d, 2L]."""
    line = torch.arange(1, 513, dtype=torch.float64).unsqueeze(-1) / 512  # k/n [T, 1], where the two are matched
    plane = torch.cat([line, torch.full_like(line, TEXT_LINE)], dim=-1)
    wanted = text.fourier(line).double() @ text.encoder.position_projection.weight.double().T  # [T, d]
    # Directions that the coordinates hardly excite get no weight instead of a huge one.
    return torch.linalg.lstsq(base.fourier(plane).double(), wanted, rcond=1e-2, driver="gelsd").solution.T
