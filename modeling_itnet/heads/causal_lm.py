# SPDX-License-Identifier: Apache-2.0
"""The head that predicts the next token, and generates texts with it."""

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, GenerationMixin
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig

from ..checks import check_tensor
from ..generation.cache import ITNetCache
from ..modeling_itnet import INPUTS, ITNetHead
from ..outputs import ITNetCausalLMOutput


@auto_docstring(
    custom_intro="""
    A causal ITNet with a language modeling head, its output weights tied to the token embeddings.
    """
)
class ITNetForCausalLM(ITNetHead, GenerationMixin):
    modality = "text"
    main_input_name = "input_ids"
    output_class = ITNetCausalLMOutput
    problem_type = "single_label_classification"  # of every token that has a next one
    _tied_weights_keys = {"lm_head.weight": "itnet.encoder.word_embeddings.weight"}

    def __init__(self, config: ITNetConfig):
        if not config.is_causal:
            raise ValueError(
                f"`is_causal` ({config.is_causal}) must be True for {type(self).__name__}: a token must not see the "
                "next one, which it predicts"
            )
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)  # [B, n, d] -> [B, n, V]
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ITNetCausalLMOutput:
        r"""
        Returns:
            [`CausalLMOutputWithPast`]: the mean `loss` of predicting `labels[:, 1:]` from the tokens before each, if
            there are `labels`; the `logits` of the token after each; `past_key_values`, unless `use_cache=False`; and
            `hidden_states` if asked for.
        """
        # Not in the signature, where the Trainer would expect it in every batch: without it there was no `eval_loss`.
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.itnet(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, rows])
        if labels is not None and shift_labels is None:
            shift_labels = pad(check_tensor(labels, "labels"), (0, 1), value=-100)[:, 1:]
        predictions = {"logits": logits, "past_key_values": outputs.past_key_values}
        return self.output(outputs, predictions, shift_labels, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, *args) -> None:
        """Gives `generate` a cache of the kind that this model needs, or checks that a given one can be continued."""
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                f"`assistant_early_exit` ({generation_config.assistant_early_exit}) must be None: an ITNet has no "
                "early exit. Give a smaller model as `assistant_model`"
            )
        given, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        # Transformers drops a mask of ones, and notes its length. It would slice new tokens off as `[:, -0:]`: all.
        length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if isinstance(given, ITNetCache) and length is not None and 0 < given.get_seq_length() >= length:
            raise ValueError(
                f"`past_key_values` hold {given.get_seq_length()} tokens, but the prompt has {length}: give the whole "
                "text, which goes on behind them, or its new tokens with an `attention_mask` of the whole text. "
                "`crop` takes tokens back"
            )
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            return
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"`cache_implementation` ({kind!r}) must be None: a causal ITNet has a cache of its own, ITNetCache"
            )
        model_kwargs["past_key_values"] = cache = ITNetCache(self.config)
        if generation_config.is_assistant:
            cache.activate_past_recording()
