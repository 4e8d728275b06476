"""Configurations of Transformers' own models, in the size of an ITNet."""

from transformers import BertConfig, ViltConfig, ViTConfig

from modeling_itnet import ITNetConfig


def _size(config: ITNetConfig) -> dict:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": config.initializer_range,
        "id2label": config.id2label,
        "label2id": config.label2id,
    }


def vit_config(config: ITNetConfig) -> ViTConfig:
    return ViTConfig(
        image_size=config.image_size, patch_size=config.patch_size, num_channels=config.num_channels, **_size(config)
    )


def bert_config(config: ITNetConfig) -> BertConfig:
    return BertConfig(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        type_vocab_size=config.type_vocab_size,
        pad_token_id=config.pad_token_id,
        **_size(config),
    )


def vilt_config(config: ITNetConfig) -> ViltConfig:
    return ViltConfig(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        image_size=max(config.image_shape),
        patch_size=config.patch_size,
        num_channels=config.num_channels,
        num_images=2,
        modality_type_vocab_size=3,  # text, first image, second image
        **_size(config),
    )
