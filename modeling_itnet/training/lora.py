# SPDX-License-Identifier: Apache-2.0
"""Says which parts of an ITNet low-rank adaptation with PEFT should adapt."""

#: The linear maps of a layer: W^O, W_theta, the gate, where there is one, and the feed-forward network.
LORA_TARGET_MODULES = ("operator.output", "operator.residual", "operator.gate")
LORA_TARGET_MODULES += ("feed_forward.expand", "feed_forward.contract")
#: The kernels' output weights W2 [H, d_h^2, w]: a parameter that is no linear layer. PEFT adapts it per head.
LORA_TARGET_PARAMETERS = ("kernel.w2",)
#: What a new task trains in full, where a model has it.
HEADS = ("classifier", "qa_outputs", "regressor")


def lora_config(model, r: int = 8, adapt_kernels: bool = True, **kwargs):
    """
    Returns a `peft.LoraConfig` for an ITNet model: it adapts the linear maps of all layers and, with `adapt_kernels`,
    the output weights W2 of exact kernels, by updates of rank `r`, and trains the head in full.

    Further keyword arguments are those of `LoraConfig`, in place of ours.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install peft") from error

    names = [name for name, _ in model.named_parameters()]
    kernels = [target for target in LORA_TARGET_PARAMETERS if any(name.endswith(target) for name in names)]
    settings = {
        "target_modules": list(LORA_TARGET_MODULES),
        "target_parameters": kernels if adapt_kernels and kernels else None,
        "modules_to_save": [head for head in HEADS if hasattr(model, head)] or None,
        "lora_alpha": 2 * r,
    }
    return LoraConfig(r=r, **{**settings, **kwargs})
