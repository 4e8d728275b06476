# SPDX-License-Identifier: Apache-2.0
"""``pipeline("itnet-visual-question-answering")``: Transformers 5 has no pipeline for answers out of a fixed list."""

from typing import Any

import torch
from transformers import Pipeline
from transformers.image_utils import load_image


class ITNetVisualQuestionAnsweringPipeline(Pipeline):
    """
    Answers questions about images: `pipe(image, question)`, or `pipe({"image": ..., "question": ...})` or a list of
    such pairs. An image is a PIL image, a path or a URL.

    Returns, for every pair, the `top_k` (5) most likely answers as `{"answer": ..., "score": ...}`. A score is the
    probability that an answer is right; several may be.
    """

    _load_processor = True
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = False

    def _sanitize_parameters(self, top_k: int | None = None, timeout: float | None = None):
        before = {} if timeout is None else {"timeout": timeout}
        return before, {}, {} if top_k is None else {"top_k": top_k}

    def __call__(self, image: Any, question: str | list[str] | None = None, **kwargs):
        if isinstance(question, str):
            image = {"image": image, "question": question}
        elif question is not None:
            image = [{"image": image, "question": one} for one in question]
        return super().__call__(image, **kwargs)

    def preprocess(self, inputs: dict, timeout: float | None = None):
        if not isinstance(inputs, dict) or inputs.keys() != {"image", "question"}:
            raise ValueError('an input must be {"image": ..., "question": ...}, or an image and a question')
        image = load_image(inputs["image"], timeout=timeout)
        return self.processor(images=image, text=inputs["question"], return_tensors="pt", truncation=True)

    def _forward(self, model_inputs):
        return self.model(**{name: value for name, value in model_inputs.items() if value is not None})

    def postprocess(self, model_outputs, top_k: int = 5) -> list[dict[str, Any]]:
        scores = torch.sigmoid(model_outputs.logits[0].float())
        best, labels = scores.topk(min(top_k, len(scores))), self.model.config.id2label
        found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [{"score": score, "answer": labels[index]} for score, index in found]
