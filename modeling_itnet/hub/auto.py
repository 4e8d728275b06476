# SPDX-License-Identifier: Apache-2.0
"""Which Auto class makes which ITNet class: one table for registration and for exported folders."""

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTimeSeriesPrediction,
    AutoModelForTokenClassification,
    AutoModelForVisualQuestionAnswering,
    AutoProcessor,
)

from configuration_itnet import ITNetConfig

from ..heads import (
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForImagesAndTextClassification,
    ITNetForMaskedLM,
    ITNetForPointCloudClassification,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForTokenClassification,
    ITNetForVisualQuestionAnswering,
)
from ..modeling_itnet import ITNetModel
from ..processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor, ITNetProcessor

#: Auto class -> modality -> class. Transformers has no Auto class for point clouds, graphs or image pairs: their heads
#: label a whole input, as sequence classifiers do. A function of time is the signal that it has one for.
AUTO_MODELS = {
    AutoModel: {"image": ITNetModel},
    AutoModelForImageClassification: {"image": ITNetForImageClassification},
    AutoModelForMaskedLM: {"text": ITNetForMaskedLM},
    AutoModelForQuestionAnswering: {"text": ITNetForQuestionAnswering},
    AutoModelForSequenceClassification: {
        "text": ITNetForSequenceClassification,
        "point_cloud": ITNetForPointCloudClassification,
        "graph": ITNetForGraphClassification,
        "multimodal": ITNetForImagesAndTextClassification,
    },
    AutoModelForTimeSeriesPrediction: {"signal": ITNetForSignalRegression},
    AutoModelForTokenClassification: {"text": ITNetForTokenClassification},
    AutoModelForVisualQuestionAnswering: {"multimodal": ITNetForVisualQuestionAnswering},
}

#: Auto class -> processors. Tokenizers are those of Transformers, which AutoTokenizer knows.
AUTO_PROCESSORS = {
    AutoFeatureExtractor: (ITNetGraphProcessor, ITNetPointCloudProcessor),
    AutoImageProcessor: (ITNetImageProcessor,),
    AutoProcessor: (ITNetProcessor,),
}


def model_classes(config: ITNetConfig) -> dict[str, type]:
    """Name of every Auto class -> the class that it makes of a checkpoint with this configuration."""
    return {
        auto_class.__name__: classes.get(config.modality, next(iter(classes.values())))
        for auto_class, classes in AUTO_MODELS.items()
    }


def register_auto_classes() -> None:
    AutoConfig.register("itnet", ITNetConfig, exist_ok=True)
    for auto_class, classes in AUTO_MODELS.items():
        # Of several classes, Transformers takes the one in `config.architectures`, and by default the first.
        classes = tuple(classes.values())
        auto_class.register(ITNetConfig, classes if len(classes) > 1 else classes[0], exist_ok=True)
    AutoImageProcessor.register(ITNetConfig, image_processor_classes={"pil": ITNetImageProcessor}, exist_ok=True)
    # These are found by the name in the checkpoint's files, not by its configuration: a folder of images has no
    # tokenizer, and one of texts no image processor. So the key only has to be unique.
    for auto_class in (AutoFeatureExtractor, AutoProcessor):
        for processor in AUTO_PROCESSORS[auto_class]:
            auto_class.register(processor, processor, exist_ok=True)
