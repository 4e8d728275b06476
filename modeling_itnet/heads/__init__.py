# SPDX-License-Identifier: Apache-2.0
"""Task heads: a read-out of ITNetModel and the task's loss, one file per modality."""

from .graph import ITNetForGraphClassification
from .image import ITNetForImageClassification
from .multimodal import (
    ITNetForImagesAndTextClassification,
    ITNetForVisualQuestionAnswering,
    vqa_accuracy,
    vqa_soft_targets,
)
from .point_cloud import ITNetForPointCloudClassification
from .signal import ITNetForSignalRegression
from .text import (
    ITNetForMaskedLM,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForTokenClassification,
)

__all__ = [
    "ITNetForGraphClassification",
    "ITNetForImageClassification",
    "ITNetForImagesAndTextClassification",
    "ITNetForMaskedLM",
    "ITNetForPointCloudClassification",
    "ITNetForQuestionAnswering",
    "ITNetForSequenceClassification",
    "ITNetForSignalRegression",
    "ITNetForTokenClassification",
    "ITNetForVisualQuestionAnswering",
    "vqa_accuracy",
    "vqa_soft_targets",
]
