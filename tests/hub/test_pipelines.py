"""Pipelines, from a folder as a user has it: the scores are those of the model."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from modeling_itnet.hub import create_checkpoint

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(task, modality): a checkpoint, made once."""
    made = {}

    def make(task, modality=None, **overrides):
        if (task, modality) not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            small = {"num_hidden_layers": 1, "kernel_init_scale": 1.0, "num_labels": 3, **overrides}
            model = create_checkpoint("itnet-tiny", path, task=task, modality=modality, **small)
            made[task, modality] = str(path), model.eval()
        return made[task, modality]

    return make


def test_image_classification(folder):
    path, model = folder("image-classification")
    found = pipeline("image-classification", path, trust_remote_code=False)(IMAGE)
    pixels = AutoProcessor.from_pretrained(path)(IMAGE, return_tensors="pt")
    expected = model(**pixels).logits.softmax(-1)[0]
    assert {row["label"]: pytest.approx(row["score"], abs=1e-6) for row in found} == {
        label: expected[index].item() for index, label in model.config.id2label.items()
    }


def test_image_features(folder):
    path, model = folder(None)
    found = pipeline("image-feature-extraction", path, trust_remote_code=False)(IMAGE)
    pixels = AutoProcessor.from_pretrained(path)(IMAGE, return_tensors="pt")
    torch.testing.assert_close(torch.tensor(found), model(**pixels).last_hidden_state)


def test_text_features(folder):
    path, model = folder(None, "text")
    found = pipeline("feature-extraction", path)("some text")
    inputs = AutoTokenizer.from_pretrained(path)("some text", return_tensors="pt")
    torch.testing.assert_close(torch.tensor(found), model(**inputs).last_hidden_state)


def test_fill_mask(folder):
    path, model = folder("masked-lm")
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = pipeline("fill-mask", path)("a [MASK] c", top_k=2)
    inputs = tokenizer("a [MASK] c", return_tensors="pt")
    place = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    expected = model(**inputs).logits[0, place].softmax(-1).topk(2)
    assert [row["token"] for row in found] == expected.indices.tolist()
    assert [row["score"] for row in found] == pytest.approx(expected.values.tolist(), abs=1e-6)


class TestTextGeneration:
    MODES = {
        "exact": {"integration_mode": "exact"},
        "near_far": {"integration_mode": "near_far", "near_size": 3, "rank": 2, "factor_form": "matrix"},
    }
    SETTINGS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    @pytest.fixture(params=MODES)
    def generator(self, request, tmp_path):
        """The path of a causal language model, the model and its tokenizer, which pads on the left."""
        small = {"num_hidden_layers": 1, "kernel_init_scale": 1.0, "is_causal": True, **self.MODES[request.param]}
        model = create_checkpoint("itnet-tiny", tmp_path, task="text-generation", **small)
        return str(tmp_path), model.eval(), AutoTokenizer.from_pretrained(tmp_path, padding_side="left")

    def expected(self, model, tokenizer, text):
        """By the largest logit, one call on the whole text for each token."""
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        count = ids.shape[1]
        for _ in range(6):
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return ids[:, count:]

    def test_texts(self, generator):
        path, model, tokenizer = generator
        pipe = pipeline("text-generation", path, tokenizer=tokenizer)
        texts = ["short", "a rather longer text"]
        found = pipe(texts, batch_size=2, return_full_text=False, **self.SETTINGS)
        for text, (row,) in zip(texts, found, strict=True):
            expected = self.expected(model, tokenizer, text)
            assert row["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)

    def test_streaming(self, generator, capsys):
        path, _, tokenizer = generator
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        inputs = tokenizer("a text", return_tensors="pt")
        expected = tokenizer.decode(self.expected(model, tokenizer, "a text")[0])
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        capsys.readouterr()
        model.generate(**inputs, **self.SETTINGS, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == expected + "\n"
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        model.generate(**inputs, **self.SETTINGS, streamer=streamer)
        assert "".join(streamer) == expected


def test_text_classification(folder):
    path, model = folder("sequence-classification")
    texts = ["short", "a rather longer text than that"]
    found = pipeline("text-classification", path, top_k=None)(texts, batch_size=2)
    for text, rows in zip(texts, found, strict=True):
        expected = model(**AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")).logits.softmax(-1)[0]
        scores = {row["label"]: row["score"] for row in rows}
        assert [scores[f"LABEL_{index}"] for index in range(3)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_token_classification(folder):
    path, model = folder("token-classification")
    found = pipeline("token-classification", path, ignore_labels=[])("abc")
    inputs = AutoTokenizer.from_pretrained(path)("abc", return_tensors="pt")
    expected = model(**inputs).logits.softmax(-1)[0, 1:-1]  # without [CLS] and [SEP]
    assert [row["entity"] for row in found] == [f"LABEL_{index}" for index in expected.argmax(-1).tolist()]
    assert [row["score"] for row in found] == pytest.approx(expected.amax(-1).tolist(), abs=1e-6)


class TestVisualQuestionAnswering:
    @pytest.fixture
    def pipe(self, folder):
        labels = {0: "red", 1: "blue", 2: "round", 3: "square"}
        path, self.model = folder("visual-question-answering", num_labels=4, id2label=labels)
        self.path = path
        return pipeline("itnet-visual-question-answering", path)

    def test_answers(self, pipe):
        found = pipe(IMAGE, "What colour?", top_k=2)
        inputs = AutoProcessor.from_pretrained(self.path)(images=IMAGE, text="What colour?", return_tensors="pt")
        expected = self.model(**inputs).logits[0].sigmoid().topk(2)
        assert [row["answer"] for row in found] == [self.model.config.id2label[i] for i in expected.indices.tolist()]
        assert [row["score"] for row in found] == pytest.approx(expected.values.tolist(), abs=1e-6)

    def test_several(self, pipe, tmp_path):
        IMAGE.save(tmp_path / "x.png")
        pair = {"image": str(tmp_path / "x.png"), "question": "What shape?"}
        together = pipe([pair, {**pair, "question": "What colour, I would like to know?"}], batch_size=2)
        alone = pipe(IMAGE, ["What shape?", "What colour, I would like to know?"])
        for a, b in zip(together, alone, strict=True):
            assert [row["answer"] for row in a] == [row["answer"] for row in b]
            assert [row["score"] for row in a] == pytest.approx([row["score"] for row in b], abs=1e-5)

    def test_input_of_another_form(self, pipe):
        with pytest.raises(ValueError, match=r'must be \{"image"'):
            pipe(IMAGE)
