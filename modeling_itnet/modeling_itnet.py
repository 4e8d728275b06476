# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""ITNetModel: encoder -> L layers -> final layer norm."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from configuration_itnet import ITNetConfig

from .encoders import ENCODERS, ITNetImageEncoder
from .layers import ITNetFeedForward, ITNetLayer
from .operator import ITNetFourierFeatures, ITNetKernel, ITNetOperator


@auto_docstring
class ITNetPreTrainedModel(PreTrainedModel):
    config: ITNetConfig
    base_model_prefix = "itnet"
    main_input_name = "pixel_values"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ("ITNetLayer", "ITNetImageEncoder", "ITNetTextEncoder", "ITNetSignalEncoder")
    _keep_in_fp32_modules_strict = ("fourier.frequencies",)
    _can_record_outputs = {"hidden_states": ITNetLayer}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """App. init of the paper; what is not named there keeps Transformers' N(0, initializer_range^2)."""
        super()._init_weights(module)
        std = self.config.initializer_range
        output_gain = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, ITNetFourierFeatures):
            init.copy_(module.frequencies, module.draw())
        elif isinstance(module, ITNetKernel):
            width = module.w1.shape[0]
            init.normal_(module.w1, std=std)
            init.zeros_(module.b1)
            if module.w_mid is not None:
                init.normal_(module.w_mid, std=1 / math.sqrt(width))
                init.zeros_(module.b_mid)
            init.normal_(module.w2, std=module.init_scale / math.sqrt(width))
            init.copy_(module.b2, torch.eye(module.head_dim, device="cpu").flatten().expand(module.b2.shape))
        elif isinstance(module, ITNetOperator):
            init.xavier_uniform_(module.output.weight, gain=output_gain)
            init.eye_(module.residual.weight)
        elif isinstance(module, ITNetFeedForward):
            init.xavier_uniform_(module.expand.weight)
            init.xavier_uniform_(module.contract.weight, gain=output_gain)
        elif isinstance(module, ITNetImageEncoder):
            for embed in module.patch_embeddings:
                init.trunc_normal_(embed.weight, std=std)
            if module.cls_token is not None:
                init.normal_(module.cls_token, std=std)


@auto_docstring(
    custom_intro="""
    The bare ITNet: a stack of learnable integral operators on the signal that the encoder of `config.modality` makes.
    """
)
class ITNetModel(ITNetPreTrainedModel):
    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        if config.modality not in ENCODERS:
            raise ValueError(f"`modality` ({config.modality!r}) has no encoder; there are {sorted(ENCODERS)}")
        self.fourier = ITNetFourierFeatures(config)
        self.encoder = ENCODERS[config.modality](config, self.fourier.size)
        self.layers = nn.ModuleList(ITNetLayer(config, index + 1) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.main_input_name = self.encoder.main_input_name
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        if self.config.modality != "text":
            raise ValueError(f"`modality` ({self.config.modality!r}) has no token embeddings to set; only 'text' has")
        self.encoder.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        positions: Tensor | None = None,
        measure: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        r"""
        positions (`torch.FloatTensor` of shape `(batch_size, num_positions, position_dim)`, *optional*):
            Coordinates of `inputs_embeds`, for `modality="signal"`. Without the first axis the batch shares them.
        measure (`torch.FloatTensor` of shape `(batch_size, num_positions)`, *optional*):
            Quadrature weights of the positions, for `modality="signal"`; normalised to sum to 1. Uniform if not given.
        """
        given = {
            "pixel_values": pixel_values,
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "positions": positions,
            "measure": measure,
        }
        given = {name: value for name, value in given.items() if value is not None}
        self._check_inputs(given)
        signal = self.encoder(self.fourier, **given)
        hidden_states = signal.features
        for layer in self.layers:
            hidden_states = layer(hidden_states, signal.positions, signal.measure, self.fourier.frequencies)
        hidden_states = self.layernorm(hidden_states)
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else signal.mean(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _check_inputs(self, given: dict[str, Tensor]) -> None:
        """Exactly one of the encoder's required inputs, and nothing it does not know."""
        encoder, modality = self.encoder, self.config.modality
        extra = [name for name in given if name not in encoder.required + encoder.optional]
        if extra:
            allowed = [*encoder.required, *encoder.optional]
            raise ValueError(f"`modality` {modality!r} takes {allowed}, but {extra} was given too")
        main = [name for name in encoder.required if name in given]
        if len(main) != 1:
            needs = " or ".join(f"`{name}`" for name in encoder.required)
            raise ValueError(f"`modality` {modality!r} needs exactly one of {needs}, got {main or 'none'}")


__all__ = ["ITNetModel", "ITNetPreTrainedModel"]
