"""Several documents in one row do not see each other: the row computes what a row for each of them would."""

import re

import pytest
import torch
from transformers import DataCollatorWithFlattening

from modeling_itnet import ITNetForTokenClassification, ITNetModel

# Lengths of the documents of each row of a batch.
LAYOUTS = {
    "a few": [(5, 7, 4)],
    "single tokens": [(1, 1, 6, 1)],
    "nothing but single tokens": [(1,) * 6],
    "one long and many short": [(2, 1, 19, 2, 3, 1)],
    "several rows": [(5, 3, 8), (16,), (1, 14, 1)],
}
WAYS = ("position_ids", "seq_idx", "cu_seq_lens_q")


def documents(lengths, seed=0):
    """A batch [B, n] of rows with documents of these lengths, and the documents [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (len(lengths), sum(lengths[0])), generator=generator)
    alone = [part.unsqueeze(0) for row, own in zip(ids, lengths, strict=True) for part in row.split(list(own))]
    return ids, alone


def boundaries(way, lengths):
    """The argument by which a row says where its documents start."""
    if way == "position_ids":
        return {way: torch.stack([torch.cat([torch.arange(k) for k in own]) for own in lengths])}
    if way == "seq_idx":
        numbers = [torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in lengths]
        return {way: torch.stack(numbers).int()}
    total = torch.tensor([0, *(k for own in lengths for k in own)]).cumsum(0)
    return {way: total.int()}


def laid_out(outputs, like):
    """Tensors [1, length, d] of all documents as rows [B, n, d]."""
    return torch.cat(outputs, dim=1).view(*like.shape[:2], -1)


def gradients(model, *calls):
    """What some calls give, and the gradients of the parameters of a sum over all logits."""
    model.zero_grad()
    outputs = [model(**inputs).logits for inputs in calls]
    sum(logits.sin().sum() for logits in outputs).backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class TestEqualToRows:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_logits_and_gradients(self, causal_mode, causal_model, assert_near, layout):
        model, lengths = causal_model(causal_mode), LAYOUTS[layout]
        ids, alone = documents(lengths)
        parts, expected = gradients(model, *({"input_ids": part} for part in alone))
        (logits,), actual = gradients(model, {"input_ids": ids, **boundaries("position_ids", lengths)})
        assert_near(logits, laid_out(parts, ids), 1e-12)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_near(actual[name], gradient, 1e-12)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_all_ways_of_saying_it(self, causal_mode, causal_model, layout):
        model, lengths = causal_model(causal_mode), LAYOUTS[layout]
        ids, _ = documents(lengths)
        with torch.no_grad():
            one, *others = (model(ids, **boundaries(way, lengths)).logits for way in WAYS)
            plain = model(ids).logits
        assert all(torch.equal(one, other) for other in others)
        if layout != "nothing but single tokens":  # the last tokens see more than they should without a word on it
            assert (one - plain).abs().max() > 1e-3

    def test_single_precision(self, causal_mode, causal_model, assert_near):
        model, lengths = causal_model(causal_mode, dtype=torch.float32), LAYOUTS["one long and many short"]
        ids, alone = documents(lengths)
        with torch.no_grad():
            expected = laid_out([model(part).logits for part in alone], ids)
            assert_near(model(ids, **boundaries("seq_idx", lengths)).logits, expected, 1e-5)

    def test_gradient_checkpointing(self, causal_mode, causal_model, assert_near):
        model, lengths = causal_model(causal_mode), LAYOUTS["several rows"]
        inputs = {"input_ids": documents(lengths)[0], **boundaries("cu_seq_lens_q", lengths)}
        _, expected = gradients(model, inputs)
        model.gradient_checkpointing_enable()
        if "monte_carlo" not in causal_mode:  # which draws in training
            model.train()
        _, actual = gradients(model, inputs)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_near(actual[name], gradient, 1e-12)

    def test_monte_carlo_training(self, causal_model):
        """Draws differ from run to run, but stay inside of a document, and train the proposal."""
        model, lengths = causal_model("monte_carlo").train(), LAYOUTS["one long and many short"]
        ids, _ = documents(lengths)
        given = boundaries("position_ids", lengths)
        output = model(ids, **given, labels=ids)
        assert output.proposal_loss.isfinite() and output.loss.isfinite()
        output.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert any(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "proposal" in n)
        other = ids.clone()
        other[:, :3] = other[:, :3] % 39 + 1
        with torch.no_grad():
            torch.manual_seed(5)
            first = model(ids, **given).logits
            torch.manual_seed(5)
            second = model(other, **given).logits
        assert (first - second)[:, :3].abs().max() > 1e-3
        # The documents before the long one are those that changed.
        torch.testing.assert_close(second[:, 22:], first[:, 22:], rtol=0, atol=1e-12)
        torch.testing.assert_close(second[:, 3:4], first[:, 3:4], rtol=0, atol=1e-12)

    def test_hidden_states_stay_in_their_rows(self, causal_mode, causal_model, assert_near):
        model, lengths = causal_model(causal_mode, ITNetModel), LAYOUTS["several rows"]
        ids, alone = documents(lengths)
        with torch.no_grad():
            packed = model(ids, **boundaries("seq_idx", lengths), output_hidden_states=True)
            parts = [model(part, output_hidden_states=True).hidden_states for part in alone]
        assert packed.past_key_values is None  # they have no common future
        assert len(packed.hidden_states) == 3
        for layer, states in enumerate(packed.hidden_states):
            assert states.shape == (3, 16, 16)
            assert_near(states, laid_out([part[layer] for part in parts], ids), 1e-12)

    def test_other_heads(self, causal_mode, causal_model, assert_near):
        model, lengths = causal_model(causal_mode, ITNetForTokenClassification), LAYOUTS["several rows"]
        ids, alone = documents(lengths)
        with torch.no_grad():
            expected = laid_out([model(part).logits for part in alone], ids)
            assert_near(model(ids, **boundaries("seq_idx", lengths)).logits, expected, 1e-12)

    def test_embeddings(self, causal_mode, causal_model, assert_near):
        model, lengths = causal_model(causal_mode), LAYOUTS["a few"]
        ids, _ = documents(lengths)
        given = boundaries("cu_seq_lens_q", lengths)
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(ids)
            assert_near(model(inputs_embeds=embeddings, **given).logits, model(ids, **given).logits, 1e-12)


class TestCollator:
    """Transformers' DataCollatorWithFlattening, with all that it can return."""

    OPTIONS = {
        "by default": {},
        "seq_idx": {"return_seq_idx": True},
        "flash": {"return_flash_attn_kwargs": True},
        "everything": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
        "seq_idx alone": {"return_position_ids": False, "return_seq_idx": True},
        "flash alone": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    }

    @pytest.mark.parametrize("options", OPTIONS)
    def test_loss(self, causal_mode, causal_model, assert_near, options):
        """Of all tokens but the first of a document: the separate losses by their numbers of tokens."""
        model, (lengths,) = causal_model(causal_mode), LAYOUTS["one long and many short"]
        _, alone = documents([lengths])
        batch = DataCollatorWithFlattening(**self.OPTIONS[options])([{"input_ids": part[0]} for part in alone])
        with torch.no_grad():
            losses = [model(part, labels=part).loss * (part.shape[1] - 1) for part in alone]
            output = model(**batch)
            expected = sum(losses) / sum(length - 1 for length in lengths)
            assert_near(output.loss, expected, 1e-12)
            assert_near(output.logits, torch.cat([model(part).logits for part in alone], 1), 1e-12)

    def test_other_first_numbers(self, causal_mode, causal_model, assert_near):
        model, (lengths,) = causal_model(causal_mode), LAYOUTS["a few"]
        _, alone = documents([lengths])
        collate = DataCollatorWithFlattening(position_ids_start=3, separator_id=-100)
        batch = collate([{"input_ids": part[0], "labels": part[0]} for part in alone])
        with torch.no_grad():
            rows = [model(part, position_ids=3 + torch.arange(part.shape[1])).logits for part in alone]
            assert_near(model(**batch).logits, torch.cat(rows, 1), 1e-12)


class TestPadding:
    """A mask beside `seq_idx` or `cu_seq_lens_q`: real tokens are counted in their documents."""

    @pytest.mark.parametrize("way", ["seq_idx", "cu_seq_lens_q"])
    def test_real_tokens_are_as_in_separate_rows(self, causal_mode, causal_model, assert_near, way):
        model, lengths = causal_model(causal_mode), [(5, 3, 8), (9, 7, 0)]
        ids, _ = documents(lengths)
        mask = torch.ones_like(ids)
        mask[0, :2] = mask[0, 6] = mask[0, 14:] = mask[1, 3:5] = mask[1, 9] = 0
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, **boundaries(way, lengths)).logits
            for row, own in enumerate(lengths):
                starts = torch.tensor([0, *own]).cumsum(0).tolist()
                for start, length in zip(starts, own, strict=False):
                    part = slice(start, start + length)
                    real = mask[row, part].bool()
                    if length:
                        expected = model(ids[row : row + 1, part][:, real]).logits
                        assert_near(logits[row, part][real], expected[0], 1e-12)

    def test_numbers_beside_a_mask_start_no_document(self, causal_mode, causal_model, assert_near):
        """As `generate` gives them for left padding."""
        model, (ids, _) = causal_model(causal_mode), documents([(16,)])
        mask = torch.ones_like(ids)
        mask[:, :3] = 0
        numbers = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            actual = model(ids, attention_mask=mask, position_ids=numbers).logits
        assert_near(actual[:, 3:], expected[:, 3:], 1e-12)


class TestOneDocument:
    @pytest.mark.parametrize("way", WAYS)
    def test_has_a_cache(self, causal_model, way):
        """Rows with one document each are rows."""
        model, lengths = causal_model("near_far, matrix"), [(16,), (16,)]
        ids, _ = documents(lengths)
        with torch.no_grad():
            output = model(ids, **boundaries(way, lengths))
            assert torch.equal(output.logits, model(ids).logits)
        assert output.past_key_values.get_seq_length() == 16


class TestErrors:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"seq_idx": torch.zeros(2, 15)}, "`seq_idx` [2, 15] must be [2, 16]: a document for each token"),
            ({"seq_idx": torch.zeros(16)}, "`seq_idx` [16] must be [2, 16]"),
            ({"cu_seq_lens_q": torch.tensor([0, 5, 16])}, "`cu_seq_lens_q` [3] must rise from 0 to 32"),
            ({"cu_seq_lens_q": torch.tensor([1, 5, 32])}, "`cu_seq_lens_q` [3] must rise from 0 to 32"),
            ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 32])}, "`cu_seq_lens_q` [4] must rise from 0 to 32"),
            ({"cu_seq_lens_q": torch.tensor([[0, 32]])}, "`cu_seq_lens_q` [1, 2] must rise from 0 to 32"),
            ({"cu_seq_lens_q": torch.tensor([32])}, "`cu_seq_lens_q` [1] must rise from 0 to 32"),
            ({"position_ids": torch.zeros(2, 15)}, "`position_ids` [2, 15] must be [2, 16]: one for each token"),
        ],
        ids=["short", "flat", "end", "start", "falling", "shape", "one", "numbers"],
    )
    def test_what_does_not_fit(self, causal_model, given, text):
        ids, _ = documents([(16,), (16,)])
        with pytest.raises(ValueError, match=re.escape(text)):
            causal_model("exact")(ids, **given)

    @pytest.mark.parametrize("way", ["seq_idx", "cu_seq_lens_q"])
    def test_a_model_that_sees_the_future(self, tiny_model, way):
        ids, _ = documents(LAYOUTS["a few"])
        with pytest.raises(ValueError, match="`seq_idx` and `cu_seq_lens_q` tell documents apart in rows of causal"):
            tiny_model("masked-lm")(ids, **boundaries(way, LAYOUTS["a few"]))

    def test_a_graph(self, causal_model):
        """What is compiled or exported cannot look at the numbers."""
        model, lengths = causal_model("exact"), LAYOUTS["a few"]
        inputs = {"input_ids": documents(lengths)[0], **boundaries("seq_idx", lengths), "use_cache": False}
        with pytest.raises(Exception, match="several documents in one row cannot be told apart in a compiled or"):
            torch.export.export(model, (), inputs, strict=False)
