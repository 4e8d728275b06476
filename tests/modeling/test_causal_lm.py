"""ITNetForCausalLM as a Transformers model: loss, logits, embeddings, training; and causal heads see no future."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import logging

from modeling_itnet import (
    ITNetForCausalLM,
    ITNetForMaskedLM,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForTokenClassification,
    ITNetModel,
)


@pytest.fixture
def model(causal_model):
    return causal_model("near_far, matrix")


@pytest.fixture
def labels(texts):
    """Labels [2, 20], of which some do not count: the first of a text never does."""
    labels = texts(seed=6)
    labels[0, :4] = labels[1, 9] = labels[1, 15:] = -100
    return labels


class TestLoss:
    def test_is_the_cross_entropy_of_the_next_token(self, model, texts, labels):
        output = model(texts(), labels=labels)
        expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
        theirs = ForCausalLMLoss(output.logits.float(), labels, model.config.vocab_size)
        torch.testing.assert_close(output.loss.float(), theirs, rtol=1e-5, atol=0)

    def test_labels_that_are_shifted_already(self, model, texts, labels):
        shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
        expected = model(texts(), labels=labels).loss
        assert torch.equal(model(texts(), shift_labels=shifted).loss, expected)
        assert torch.equal(model(texts(), labels=texts(), shift_labels=shifted).loss, expected)

    def test_share_of_a_larger_batch(self, model, texts, labels):
        """Trainer counts the labels of all accumulated batches."""
        output = model(texts(), labels=labels, num_items_in_batch=50)
        total = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        torch.testing.assert_close(output.loss, total / 50, rtol=1e-12, atol=0)

    def test_smoothed_labels(self, model, texts, labels):
        """Every token gets an even part of 0.2, and the label the rest."""
        output, targets = model(texts(), labels=labels, label_smoothing=0.2), labels[:, 1:]
        logs, counts = output.logits[:, :-1].log_softmax(-1), targets != -100
        right = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1))[..., 0]
        expected = -(0.8 * right + 0.2 * logs.mean(-1))[counts].mean()
        torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
        assert (output.loss - model(texts(), labels=labels).loss).abs() > 1e-3

    def test_no_label_that_counts(self, model, texts):
        """A part of a batch may have none."""
        loss = model(texts(), labels=torch.full((2, 20), -100)).loss
        assert loss == 0 and loss.requires_grad

    def test_labels_do_not_change(self, model, texts, labels):
        before = labels.clone()
        model(texts(), labels=labels)
        assert torch.equal(labels, before)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (torch.full((2, 20), 40), "`labels` hold 40, but there are 40 classes"),
            (torch.zeros(2, 19, dtype=torch.long), "`labels` [2, 19] must be [2, 20]"),
            ([[1] * 20] * 2, "`labels` (list) must be a torch.Tensor"),
        ],
        ids=["class", "length", "list"],
    )
    def test_labels_that_do_not_fit(self, model, texts, given, text):
        with pytest.raises(ValueError, match=re.escape(text)):
            model(texts(), labels=given)

    def test_accumulation(self, causal_model, texts, tmp_path):
        """Trainer: 4 steps of 2 texts move the parameters as 1 step of 8, though texts have unequal shares."""
        ids = texts(8, 10)
        labels = ids.where(torch.arange(10) < torch.arange(2, 10)[:, None], -100)
        rows, moves = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)], []
        for size, accumulation in ((8, 1), (2, 4)):
            model = causal_model("low_rank, matrix")
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            arguments = TrainingArguments(
                output_dir=tmp_path,
                use_cpu=True,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                max_steps=1,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            Trainer(model=model, args=arguments, train_dataset=rows).train()
            moves.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        for name, expected in moves[0].items():
            assert expected.abs().max() > 0, name
            torch.testing.assert_close(moves[1][name], expected, rtol=1e-6, atol=1e-8)

    def test_falls(self, cache_mode, causal_model, texts):
        """A few texts are learned by heart."""
        model, ids = causal_model(cache_mode, dtype=torch.float32).train(), texts(3, 10)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(25):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]


class TestLogits:
    def test_are_products_with_the_embeddings(self, model, texts):
        states = model.itnet(texts(), use_cache=False).last_hidden_state
        expected = states @ model.itnet.encoder.word_embeddings.weight.T
        torch.testing.assert_close(model(texts()).logits, expected, rtol=1e-12, atol=1e-12)

    def test_of_some_tokens(self, model, texts):
        whole = model(texts()).logits
        torch.testing.assert_close(model(texts(), logits_to_keep=1).logits, whole[:, -1:], rtol=0, atol=1e-12)
        torch.testing.assert_close(model(texts(), logits_to_keep=7).logits, whole[:, -7:], rtol=0, atol=1e-12)
        torch.testing.assert_close(model(texts(), logits_to_keep=0).logits, whole, rtol=0, atol=1e-12)
        rows = torch.tensor([3, 0, 19])
        torch.testing.assert_close(model(texts(), logits_to_keep=rows).logits, whole[:, rows], rtol=0, atol=1e-12)

    def test_of_embeddings(self, model, texts):
        embeddings = model.get_input_embeddings()(texts())
        torch.testing.assert_close(model(inputs_embeds=embeddings).logits, model(texts()).logits, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match=re.escape("exactly one of `input_ids` or `inputs_embeds`")):
            model(texts(), inputs_embeds=embeddings)

    def test_token_types(self, model, texts):
        """Zeros are the default, and others count."""
        types = torch.zeros(2, 20, dtype=torch.long)
        expected = model(texts()).logits
        torch.testing.assert_close(model(texts(), token_type_ids=types).logits, expected, rtol=0, atol=1e-12)
        assert (model(texts(), token_type_ids=types + 1).logits - expected).abs().max() > 1e-3


class TestEmbeddings:
    def test_one_tensor(self, model, tmp_path):
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head.weight is embeddings.weight
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        assert len([name for name, tensor in saved.items() if tensor.shape == (40, 16)]) == 1
        again, info = ITNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert again.lm_head.weight is again.itnet.encoder.word_embeddings.weight

    def test_a_bare_model_from_the_same_folder(self, model, texts, tmp_path):
        model.save_pretrained(tmp_path)
        bare = ITNetModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
        expected = model.itnet(texts()).last_hidden_state
        torch.testing.assert_close(bare(texts()).last_hidden_state, expected, rtol=0, atol=1e-10)

    def test_more_and_fewer_tokens(self, model, texts):
        with torch.no_grad():
            before = model(texts()).logits
        model.resize_token_embeddings(47, mean_resizing=False)
        assert model.config.vocab_size == 47 and model.lm_head.weight is model.get_input_embeddings().weight
        assert model.lm_head.weight.shape == (47, 16)
        torch.testing.assert_close(model(texts()).logits[..., :40], before, rtol=0, atol=1e-12)
        ids = texts() + 6
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite() and model.lm_head.weight.grad[46].abs().max() > 0
        model.resize_token_embeddings(40)
        torch.testing.assert_close(model(texts()).logits, before, rtol=0, atol=1e-12)

    def test_untied(self, causal_model, texts):
        model = causal_model("exact", tie_word_embeddings=False)
        assert model.lm_head.weight is not model.get_input_embeddings().weight
        states = model.itnet(texts()).last_hidden_state
        expected = states @ model.lm_head.weight.T
        torch.testing.assert_close(model(texts()).logits, expected, rtol=1e-12, atol=1e-12)


class TestTraining:
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_gradient_checkpointing(self, causal_mode, causal_model, texts, assert_near, use_reentrant):
        model = causal_model(causal_mode, proposal_epsilon=1.0).train()

        def gradients():
            torch.manual_seed(0)
            model.zero_grad()
            model(texts(), labels=texts()).loss.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters()}

        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert model.is_gradient_checkpointing
        for name, gradient in gradients().items():
            assert_near(gradient, expected[name], 1e-12)

    def test_makes_no_cache(self, causal_mode, causal_model, texts):
        model = causal_model(causal_mode).train()
        assert model.config.use_cache
        output = model(texts(), labels=texts())
        assert output.past_key_values is None and "past_key_values" not in output

    def test_monte_carlo_adds_the_loss_of_its_proposal(self, causal_model, texts):
        model = causal_model("monte_carlo", proposal_loss_weight=0.5).train()
        output = model(texts(), labels=texts())
        plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), texts()[:, 1:].flatten())
        assert output.proposal_loss.abs() > 1e-6
        torch.testing.assert_close(output.loss, plain + 0.5 * output.proposal_loss, rtol=1e-12, atol=0)


class TestOtherModels:
    def test_a_model_that_sees_the_future_is_refused(self, tiny_config):
        text = "`is_causal` (False) must be True for ITNetForCausalLM: a token must not see the next one"
        with pytest.raises(ValueError, match=re.escape(text)):
            ITNetForCausalLM(tiny_config("text"))

    def test_another_modality_is_refused(self, tiny_config):
        text = "ITNetForCausalLM needs `modality` in ['text'], but the config has 'signal'"
        with pytest.raises(ValueError, match=re.escape(text)):
            ITNetForCausalLM(tiny_config("signal", is_causal=True))


# class -> settings and outputs per token
HEADS = {
    "bare": (ITNetModel, {}, ("last_hidden_state",)),
    "causal-lm": (ITNetForCausalLM, {}, ("logits",)),
    "masked-lm": (ITNetForMaskedLM, {}, ("logits",)),
    "token-classification": (ITNetForTokenClassification, {}, ("logits",)),
    "question-answering": (ITNetForQuestionAnswering, {"num_labels": 2}, ("start_logits", "end_logits")),
}


class TestFuture:
    @pytest.mark.parametrize("use_cache", [False, True], ids=["without a cache", "with a cache"])
    @pytest.mark.parametrize("head", HEADS)
    def test_no_token_sees_a_later_one(self, causal_mode, causal_model, texts, head, use_cache):
        """Other tokens from each place on, and other masks: all before stays as it is."""
        model_class, settings, names = HEADS[head]
        model, ids = causal_model(causal_mode, model_class, **settings), texts(length=16)
        with torch.no_grad():
            whole = model(ids, use_cache=use_cache)
            for place in (1, 7, 8, 15):
                other = torch.cat([ids[:, :place], ids[:, place:] % 39 + 1], 1)
                mask = torch.ones_like(ids)
                mask[0, place:] = 0
                for changed in (model(other, use_cache=use_cache), model(ids, mask, use_cache=use_cache)):
                    for name in names:
                        expected = whole[name][:, :place]
                        torch.testing.assert_close(changed[name][:, :place], expected, rtol=0, atol=1e-12)
                changed = model(other, use_cache=use_cache)
                for name in names:
                    assert (changed[name] - whole[name])[:, place:].abs().amin() > 0
                    assert (changed[name] - whole[name])[:, place:].abs().max() > 1e-3

    def test_in_training(self, causal_mode, causal_model, texts):
        """By the gradient: the logits of a token depend on the embeddings of those up to it alone."""
        model = causal_model(causal_mode).train()
        embeddings = model.get_input_embeddings()(texts(1, 12)).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings).logits
        for place in (0, 5, 11):
            (gradient,) = torch.autograd.grad(logits[0, place].sum(), embeddings, retain_graph=True)
            assert (gradient[0, place + 1 :] == 0).all()
            assert gradient[0, place].abs().max() > 1e-6

    def test_a_text_head_sees_all_tokens_and_no_padding(self, causal_mode, causal_model, texts):
        """What is behind the last real token has no effect; every real token has."""
        model, ids = causal_model(causal_mode, ITNetForSequenceClassification), texts(length=16)
        mask = torch.ones_like(ids)
        mask[:, 11:] = 0
        with torch.no_grad():
            expected = model(ids, mask).logits
            other = torch.cat([ids[:, :11], ids[:, 11:] % 39 + 1], 1)
            torch.testing.assert_close(model(other, mask).logits, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(model(ids[:, :11]).logits, expected, rtol=0, atol=1e-12)
            last = torch.cat([ids[:, :10], ids[:, 10:] % 39 + 1], 1)
            assert (model(last, mask).logits - expected).abs().max() > 1e-4

    @pytest.mark.parametrize("head", [ITNetForSequenceClassification, ITNetForQuestionAnswering])
    def test_a_text_of_padding_alone_is_an_error(self, cache_mode, causal_model, texts, head):
        """These heads keep nothing, so that this is no piece of a longer text."""
        mask = torch.ones(2, 20)
        mask[1] = 0
        with pytest.raises(ValueError, match=re.escape("`attention_mask` removes every position of sample(s) [1]")):
            causal_model(cache_mode, head)(texts(), mask)


class TestBeyondTheUnit:
    """Positions are coordinates: `max_position_embeddings` is no limit, but nothing was learned beyond it."""

    def test_runs_and_warns(self, causal_mode, causal_model, texts, full, assert_near, caplog, monkeypatch):
        monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
        logging.get_logger("transformers").warning_once.cache_clear()
        model, ids = causal_model(causal_mode, max_position_embeddings=12), texts(length=20)
        start = full(model, ids[:, :12])
        assert "a text is longer" not in caplog.text
        assert_near(full(model, ids)[:, :12], start, 1e-12)
        assert "a text is longer than `max_position_embeddings` (12): its positions exceed 1" in caplog.text

    def test_a_cache_warns_as_well(self, causal_model, texts, read, new_cache, caplog, monkeypatch):
        monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
        logging.get_logger("transformers").warning_once.cache_clear()
        model = causal_model("exact", max_position_embeddings=12)
        cache = new_cache(model)
        read(model, texts(length=12), [5], cache)
        assert "a text is longer" not in caplog.text
        read(model, texts(length=1), [], cache)
        assert "a text is longer than `max_position_embeddings` (12)" in caplog.text
