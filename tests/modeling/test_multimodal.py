"""Image and text on one domain: positions, measure, answers, two images, two checkpoints, processors."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, BertTokenizer

from modeling_itnet import (
    ITNetConfig,
    ITNetForImageClassification,
    ITNetForImagesAndTextClassification,
    ITNetForMaskedLM,
    ITNetForVisualQuestionAnswering,
    ITNetImageProcessor,
    ITNetModel,
    ITNetProcessor,
    from_image_and_text_checkpoints,
    vqa_accuracy,
    vqa_soft_targets,
)

IDS = torch.tensor([[5, 9, 2, 7], [3, 8, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "is", "there", "a", "red", "shape"]


def encode(model, **inputs):
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": IDS, **inputs}
    return model.encoder(model.fourier, **inputs)


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS), encoding="utf-8")
    return BertTokenizer(str(path), model_max_length=8)


class TestEncoder:
    def test_positions(self, tiny_config):
        model = ITNetModel(tiny_config("multimodal"))
        positions = encode(model, attention_mask=MASK).positions
        assert positions.shape == (2, 5 + 4, 2)
        square = torch.tensor([[0.5, 0.5], [0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
        for row, text in enumerate([[1 / 4, 2 / 4, 3 / 4, 1], [1 / 2, 1, 1, 1]]):
            expected = torch.cat([square, torch.tensor([[x, 2.0] for x in text])])
            torch.testing.assert_close(positions[row], expected)
        assert encode(model).positions.shape == (9, 2)  # without a mask the batch shares them

    def test_features(self, tiny_config, shake):
        model = shake(ITNetModel(tiny_config("multimodal"))).eval()
        pixels = torch.randn(2, 3, 16, 16)
        encoder = model.encoder
        signal = encode(model, pixel_values=pixels)
        image = encoder.image(model.fourier, pixels).features + encoder.modality_embeddings.weight[0]
        angles = 2 * math.pi * signal.positions[5:].double() @ model.fourier.frequencies.double().T
        gamma = torch.cat([angles.sin(), angles.cos()], dim=-1).float()
        text = encoder.text.word_embeddings(IDS) + encoder.text.token_type_embeddings.weight[0]
        text = text + gamma @ encoder.text.position_projection.weight.T + encoder.modality_embeddings.weight[1]
        torch.testing.assert_close(signal.features, torch.cat([image, text], dim=1), rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("measure", "shares"),
        [
            ("balanced", [(0.5, 0.5), (0.5, 0.5)]),
            ([3, 1], [(0.75, 0.25), (0.75, 0.25)]),
            ([1.0, 3.0], [(0.25, 0.75), (0.25, 0.75)]),
            ("uniform", [(5 / 9, 4 / 9), (5 / 7, 2 / 7)]),
        ],
        ids=str,
    )
    def test_total_weight_of_each_modality(self, tiny_config, measure, shares):
        omega = encode(ITNetModel(tiny_config("multimodal", measure=measure)), attention_mask=MASK).measure
        for row, (image, text) in enumerate(shares):
            count = MASK[row].sum()
            torch.testing.assert_close(omega[row, :5], torch.full((5,), image / 5), rtol=1e-6, atol=0)
            torch.testing.assert_close(omega[row, 5 : 5 + count], (text / count).expand(count), rtol=1e-6, atol=0)
            assert not omega[row, 5 + count :].any()

    def test_modality_embeddings_start_small(self, tiny_config):
        weight = ITNetModel(tiny_config("multimodal", hidden_size=512)).encoder.modality_embeddings.weight
        assert 0.018 < weight.std() < 0.022

    def test_pooled_features_are_those_of_the_first_position(self, tiny_model_with_text):
        output = tiny_model_with_text(pixel_values=torch.randn(2, 3, 16, 16), input_ids=IDS)
        assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])

    def test_left_padding(self, tiny_model_with_text):
        pixels = torch.randn(2, 3, 16, 16)
        right = tiny_model_with_text(pixel_values=pixels, input_ids=IDS, attention_mask=MASK).pooler_output
        ids, mask = torch.tensor([[5, 9, 2, 7], [0, 0, 3, 8]]), MASK.flip(1)
        mask[0] = 1
        left = tiny_model_with_text(pixel_values=pixels, input_ids=ids, attention_mask=mask).pooler_output
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)

    def test_token_embeddings_can_be_replaced(self, tiny_config):
        model = ITNetModel(tiny_config("multimodal"))
        model.resize_token_embeddings(50)
        assert model.encoder.text.word_embeddings.num_embeddings == model.config.vocab_size == 50

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pixel_values": None}, "`pixel_values` is missing"),
            ({"input_ids": None}, "needs exactly one of `input_ids` or `inputs_embeds`"),
            ({"pixel_values": torch.randn(3, 3, 16, 16)}, "holds 3 images, but there are 2 texts"),
        ],
    )
    def test_bad_input(self, tiny_config, change, message):
        with pytest.raises(ValueError, match=message):
            ITNetModel(tiny_config("multimodal"))(
                **{"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": IDS, **change}
            )


@pytest.fixture
def tiny_model_with_text(tiny_config, shake):
    return shake(ITNetModel(tiny_config("multimodal", measure="balanced")), 0.1).eval()


class TestAnswers:
    def test_default_is_vqa_v2(self, tiny_config):
        values = tiny_config("multimodal").to_dict()
        values = {name: value for name, value in values.items() if name not in ("id2label", "label2id")}
        config = ITNetConfig(**values)
        model = ITNetForVisualQuestionAnswering(config)
        assert model.config.num_labels == model.classifier.out_features == 3129

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_counted_answers_stay(self, tiny_config, tmp_path, count):
        model = ITNetForVisualQuestionAnswering(tiny_config("multimodal", num_labels=count))
        assert model.classifier.out_features == count
        model.save_pretrained(tmp_path)
        assert ITNetForVisualQuestionAnswering.from_pretrained(tmp_path).classifier.out_features == count

    def test_named_answers_stay(self, tiny_config):
        config = tiny_config("multimodal", num_labels=2, id2label={0: "no", 1: "yes"})
        assert ITNetForVisualQuestionAnswering(config).classifier.out_features == 2

    @pytest.mark.parametrize("answers", ["red", ["red"], [["red"], "r"]])
    def test_answers_that_are_no_lists(self, answers):
        with pytest.raises(ValueError, match="`answers` must hold a list of answers for each question"):
            vqa_soft_targets(answers, {"red": 0, "r": 1})

    def test_soft_targets(self):
        """Of ten people, c said the answer: c/10 min((c-1)/3, 1) + (10-c)/10 min(c/3, 1)."""
        label2id = {"yes": 0, "no": 1, "red": 2}
        targets = vqa_soft_targets([["yes"] * 7 + ["no"] * 2 + ["odd"], ["red"] * 10, ["no"]], label2id)
        no = 0.2 * (1 / 3) + 0.8 * (2 / 3)
        torch.testing.assert_close(targets, torch.tensor([[1.0, no, 0], [0, 0, 1], [0, 1, 0]]))

    def test_accuracy(self):
        logits = torch.tensor([[3.0, 1, 0], [0, 1, 2]])
        assert vqa_accuracy(logits, torch.tensor([[0.3, 1, 0], [0, 0, 0.9]])) == pytest.approx(0.6)
        assert vqa_accuracy(logits, torch.tensor([0, 1])) == 0.5


class TestTwoImages:
    def test_classifier_reads_both(self, tiny_config, shake):
        model = shake(ITNetForImagesAndTextClassification(tiny_config("multimodal"))).eval()
        pixels = torch.randn(2, 2, 3, 16, 16)
        pooled = [
            model.itnet(pixel_values=pixels[:, side], input_ids=IDS, attention_mask=MASK).pooler_output
            for side in (0, 1)
        ]
        linear = model.classifier
        expected = torch.cat(pooled, dim=1) @ linear.weight.T + linear.bias
        actual = model(pixel_values=pixels, input_ids=IDS, attention_mask=MASK).logits
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_one_image_is_not_enough(self, tiny_config):
        with pytest.raises(ValueError, match=r"must be \[batch, 2, channels, height, width\]"):
            ITNetForImagesAndTextClassification(tiny_config("multimodal"))(
                pixel_values=torch.randn(2, 3, 16, 16), input_ids=IDS
            )


class TestCheckpoints:
    @pytest.fixture
    def checkpoints(self, tiny_config, shake, tmp_path):
        values = {"num_fourier_features": 32, "fourier_scale": 4.0}
        image = shake(ITNetForImageClassification(tiny_config("image", **values)))
        text = shake(ITNetForMaskedLM(tiny_config("text", **values)), seed=5)
        image.save_pretrained(tmp_path / "image")
        text.save_pretrained(tmp_path / "text")
        return image.itnet, text.itnet, (str(tmp_path / "image"), str(tmp_path / "text"))

    @pytest.mark.parametrize("core", ["image", "text", "average"])
    def test_where_weights_come_from(self, checkpoints, core):
        image, text, paths = checkpoints
        model = from_image_and_text_checkpoints(
            ITNetForVisualQuestionAnswering, *paths, core=core, measure="balanced", num_labels=4
        )
        assert (model.config.modality, model.config.measure, model.num_labels) == ("multimodal", "balanced", 4)
        base = model.itnet
        pixels = torch.randn(2, 3, 16, 16)
        expected = image.encoder(image.fourier, pixel_values=pixels).features
        torch.testing.assert_close(base.encoder.image(base.fourier, pixels).features, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(base.encoder.text.word_embeddings.weight, text.encoder.word_embeddings.weight)
        for (name, mine), (_, one), (_, other) in zip(
            base.layers.named_parameters(),
            image.layers.named_parameters(),
            text.layers.named_parameters(),
            strict=True,
        ):
            wanted = {"image": one, "text": other, "average": (one + other) / 2}[core]
            assert torch.equal(mine, wanted), name

    def test_text_positions_mean_the_same(self, checkpoints):
        """The refitted projection gives tokens of the plane nearly the features that they had on the line."""
        _, text, paths = checkpoints
        base = from_image_and_text_checkpoints(ITNetModel, *paths)
        line = torch.arange(1, 12).unsqueeze(-1) / 11
        expected = text.encoder.position_projection(text.fourier(line))
        plane = torch.cat([line, torch.full_like(line, 2.0)], dim=-1)
        actual = base.encoder.text.position_projection(base.fourier(plane))
        assert (actual - expected).norm() < 0.25 * expected.norm()

    def test_errors(self, checkpoints, tiny_config, tmp_path):
        _, _, (image, text) = checkpoints
        with pytest.raises(ValueError, match=r"`image_checkpoint` holds a model for `modality` \('text'\)"):
            from_image_and_text_checkpoints(ITNetModel, text, image)
        with pytest.raises(ValueError, match="`core`"):
            from_image_and_text_checkpoints(ITNetModel, image, text, core="both")
        ITNetModel(tiny_config("text", intermediate_size=32)).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match="layers of different sizes"):
            from_image_and_text_checkpoints(ITNetModel, image, str(tmp_path / "other"))


class TestImageProcessor:
    GREY = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)

    @pytest.mark.parametrize("form", ["I;16", "I;16B", "array"])
    @pytest.mark.parametrize("resize", [True, False])
    def test_16_bits(self, form, resize):
        """Black is -1 and white 1, and what lies between is where it was, to half a step of 8 bits."""
        image = np.stack([self.GREY] * 3, axis=-1)
        if form != "array":
            image = Image.frombytes(form, (8, 8), self.GREY.astype("<u2" if form == "I;16" else ">u2").tobytes())
        processor = ITNetImageProcessor(size={"height": 8, "width": 8}, do_resize=resize)
        pixels = processor(image, return_tensors="np")["pixel_values"][0]
        expected = np.stack([self.GREY / 65535 * 2 - 1] * 3)
        np.testing.assert_allclose(pixels, expected, atol=1 / 255 + 1e-6)

    @pytest.mark.parametrize("mode", ["I", "F"])
    def test_numbers_without_a_range(self, mode):
        image = Image.fromarray(self.GREY.astype(np.int32 if mode == "I" else np.float32))
        with pytest.raises(ValueError, match=rf"mode '{mode}' holds values from 0(\.0)? to 65535"):
            ITNetImageProcessor()(image)

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (Image.new("RGB", (0, 10)), "an image of 0 × 10 pixels is empty"),
            (np.zeros((3, 0, 10)), r"an array \[3, 0, 10\] is no image: it has no pixels"),
            (np.zeros((50, 50)), r"an array \[50, 50\] is no image: it needs an axis of channels"),
            ([torch.zeros(50, 50)], r"an array \[50, 50\] is no image"),
            ([[0.5] * 50] * 50, "not lists of numbers"),
        ],
    )
    def test_no_images(self, image, message):
        with pytest.raises(ValueError, match=message) as error:
            ITNetImageProcessor()(image)
        assert len(str(error.value)) < 150  # no pixels in it

    def test_unknown_settings(self, tmp_path):
        with pytest.raises(ValueError, match=r"`num_chanels` is no argument of .* is `num_channels`"):
            ITNetImageProcessor(num_chanels=1)
        processor = ITNetImageProcessor(size={"height": 8, "width": 4})
        processor.save_pretrained(tmp_path)
        path = tmp_path / "preprocessor_config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**values, "a_field_of_2030": 5}), encoding="utf-8")
        assert ITNetImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()

    def image(self, mode="RGB", size=(20, 10)):
        pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert(mode)

    def test_values(self):
        image = self.image(size=(32, 32))
        pixels = ITNetImageProcessor(size={"height": 32, "width": 32})(image, return_tensors="pt")["pixel_values"]
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        torch.testing.assert_close(pixels[0], expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
    def test_modes_become_rgb(self, mode):
        pixels = ITNetImageProcessor()(self.image(mode), return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, 224, 224)

    def test_grey(self, tiny_config):
        processor = ITNetImageProcessor.from_model_config(tiny_config("image", num_channels=1, image_size=(8, 16)))
        pixels = processor(self.image("L", size=(16, 8)), return_tensors="pt")["pixel_values"]
        expected = torch.from_numpy(np.array(self.image("L", size=(16, 8)))).float() / 127.5 - 1
        torch.testing.assert_close(pixels[0, 0], expected, rtol=0, atol=1e-5)

    def test_save_and_load(self, tmp_path):
        processor = ITNetImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.1, 0.2, 0.3])
        processor.save_pretrained(tmp_path)
        for loaded in (ITNetImageProcessor.from_pretrained(tmp_path), AutoImageProcessor.from_pretrained(tmp_path)):
            assert type(loaded) is ITNetImageProcessor
            a, b = (p(self.image(), return_tensors="pt")["pixel_values"] for p in (processor, loaded))
            assert torch.equal(a, b)

    @pytest.mark.parametrize(("mode", "channels"), [("RGBA", 4), ("L", 1)])
    def test_wrong_mode(self, mode, channels):
        with pytest.raises(ValueError, match=f"mode '{mode}' has {channels} channels, but `num_channels` is 3"):
            ITNetImageProcessor(do_convert_rgb=False)(self.image(mode))

    def test_palette_is_no_colour(self):
        with pytest.raises(ValueError, match="palette indices"):
            ITNetImageProcessor(do_convert_rgb=False)(self.image("P"))

    def test_wrong_type(self):
        with pytest.raises((ValueError, TypeError)):
            ITNetImageProcessor()(3.5)


class TestProcessor:
    TEXT = "is there a red shape"

    @pytest.fixture
    def processor(self, tokenizer):
        return ITNetProcessor(ITNetImageProcessor(size={"height": 16, "width": 16}), tokenizer)

    @pytest.fixture
    def image(self):
        return Image.new("RGB", (20, 20), (255, 0, 0))

    def test_batch_runs_through_a_model(self, processor, image, tiny_model_with_text):
        batch = processor([image, image], ["is there", self.TEXT], return_tensors="pt")
        assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 0, 0, 0], [2, 5, 6, 7, 8, 9, 3]]
        assert batch["attention_mask"].sum(1).tolist() == [4, 7]
        alone = processor([image], ["is there"], return_tensors="pt")
        together = tiny_model_with_text(**batch).pooler_output[:1]
        torch.testing.assert_close(together, tiny_model_with_text(**alone).pooler_output, rtol=0, atol=1e-5)

    def test_pairs_of_images(self, processor, image):
        black = Image.new("RGB", (20, 20))
        batch = processor([[image, black], [black, image]], [self.TEXT] * 2, return_tensors="pt")
        assert batch["pixel_values"].shape == (2, 2, 3, 16, 16)
        assert batch["pixel_values"][:, :, 0].mean((2, 3)).tolist() == [[1, -1], [-1, 1]]

    def test_save_and_load(self, processor, image, tmp_path):
        processor.save_pretrained(tmp_path / "processor")
        for loaded in (c.from_pretrained(tmp_path / "processor") for c in (ITNetProcessor, AutoProcessor)):
            assert type(loaded) is ITNetProcessor
            a, b = (p([image], [self.TEXT], return_tensors="pt") for p in (processor, loaded))
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a)

    def test_long_text(self, processor, image):
        long = " ".join(["red"] * 9)
        with pytest.raises(ValueError, match=r"11 tokens, more than `model_max_length` \(8\)"):
            processor([image], [long], return_tensors="pt")
        assert processor([image], [long], truncation=True, return_tensors="pt")["input_ids"].shape == (1, 8)

    def test_mismatched_counts(self, processor, image):
        with pytest.raises(ValueError, match="`images` holds 1 entries, but there are 2 texts"):
            processor([image], [self.TEXT] * 2)
        with pytest.raises(ValueError, match="the same number of images"):
            processor([[image, image], [image]], [self.TEXT] * 2)
