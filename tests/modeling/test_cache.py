"""The cache of a causal model: whatever is done to it, the next tokens are what one call on all tokens says."""

import copy
import re

import pytest
import torch
from transformers import DynamicCache

from modeling_itnet import ITNetCache, ITNetForCausalLM, ITNetModel
from modeling_itnet.generation.cache import SPARE

LENGTH = 20
# Sizes of the pieces that a text is read in.
PIECES = {
    "one by one": [1] * LENGTH,
    "a long start": [13] + [1] * 7,
    "a long end": [1, 2, 1],
    "in between": [4, 1, 6, 3, 5],
    "all at once": [LENGTH],
}
FOLDING = ("near_far", "low_rank")  # modes that do not keep all tokens


def folds(mode):
    return any(name in mode for name in FOLDING)


def random_pieces(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 7, (count,), generator=generator).tolist()


class TestPieces:
    @pytest.mark.parametrize("pieces", PIECES)
    def test_any_pieces_give_what_one_call_gives(
        self, causal_mode, causal_model, texts, read, full, new_cache, assert_near, pieces
    ):
        model, ids = causal_model(causal_mode), texts()
        cache = new_cache(model)
        assert_near(read(model, ids, PIECES[pieces], cache), full(model, ids))
        assert cache.get_seq_length() == LENGTH
        kept = cache.layers[0].features.shape[1]
        assert kept < LENGTH if folds(causal_mode) and len(PIECES[pieces]) > 3 else kept <= LENGTH

    @pytest.mark.parametrize("spare", [0, 2, SPARE])
    def test_random_pieces(self, causal_mode, causal_model, texts, read, full, new_cache, assert_near, spare):
        model, ids = causal_model(causal_mode), texts(length=40)
        expected = full(model, ids)
        for seed in range(2):
            assert_near(read(model, ids, random_pieces(20, seed), new_cache(model, spare)), expected)

    def test_single_precision(self, causal_mode, causal_model, texts, read, full, new_cache, assert_near):
        model, ids = causal_model(causal_mode, dtype=torch.float32), texts(length=40)
        expected = full(model, ids)
        assert_near(read(model, ids, random_pieces(20, 0), new_cache(model)), expected, 1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, cache_mode, causal_model, texts, read, full, new_cache, dtype):
        """As close to the model in float64 as one call in half precision is, up to a small factor."""
        model, ids = causal_model(cache_mode), texts()
        exact, half = full(model, ids), model.to(dtype)
        once = full(half, ids)
        pieces = read(half, ids, [5] + [1] * LENGTH, new_cache(half))
        assert pieces.dtype == once.dtype == dtype
        allowed = 4 * float((once.double() - exact).abs().max())
        assert float((pieces.double() - exact).abs().max()) <= allowed
        assert allowed < 80 * torch.finfo(dtype).eps * float(exact.abs().max())

    def test_a_model_without_a_head(self, causal_mode, causal_model, texts, new_cache, assert_near):
        """And a pooled vector belongs to a whole text: a piece has none."""
        model, ids = causal_model(causal_mode, ITNetModel), texts()
        with torch.no_grad():
            whole = model(ids, use_cache=False)
            first = model(ids[:, :9])
            second = model(ids[:, 9:], past_key_values=first.past_key_values)
        assert isinstance(first.past_key_values, ITNetCache) and first.past_key_values is second.past_key_values
        assert second.pooler_output is None
        states = torch.cat([first.last_hidden_state, second.last_hidden_state], 1)
        assert_near(states, whole.last_hidden_state)

    def test_gradients_go_through_the_cache(self, causal_mode, causal_model, texts, new_cache, assert_near):
        model, ids = causal_model(causal_mode), texts()

        def gradients(*pieces, cache=None):
            model.zero_grad()
            outputs = [model(piece, past_key_values=cache, use_cache=cache is not None).logits for piece in pieces]
            torch.cat(outputs, 1).sin().sum().backward()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        expected, actual = gradients(ids), gradients(*ids.split(6, dim=1), cache=new_cache(model))
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_near(actual[name], gradient)


def padded(kind):
    """A mask [3, LENGTH] with padding of this kind in two of three texts."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if kind == "left":
        mask[1, :7] = mask[2, :1] = 0
    elif kind == "right":
        mask[1, 9:] = mask[2, 17:] = 0
    elif kind == "holes":
        mask[1, 2:5] = mask[1, 8] = mask[2, 4:12] = mask[2, 0] = 0
    else:  # a text begins late, and one ends early
        mask[1, :15] = mask[2, 4:] = 0
    return mask


class TestMasks:
    @pytest.mark.parametrize("kind", ["left", "right", "holes", "rows"])
    def test_padding(self, causal_mode, causal_model, texts, read, full, new_cache, assert_near, kind):
        """Real tokens are as in the whole text, and as in the text alone: pieces of nothing but padding included."""
        model, ids, mask = causal_model(causal_mode), texts(3), padded(kind)
        logits = read(model, ids, [1, 1, 1, 4, 1, 7, 1], new_cache(model), mask)
        whole = full(model, ids, mask)
        for row, real in enumerate(mask.bool()):
            assert_near(logits[row, real], whole[row, real])
            assert_near(logits[row, real], full(model, ids[row : row + 1, real])[0])

    def test_a_mask_of_the_new_tokens_alone(self, cache_mode, causal_model, texts, new_cache, assert_near):
        model, ids, mask = causal_model(cache_mode), texts(3), padded("holes")
        caches = [new_cache(model), new_cache(model)]
        with torch.no_grad():
            for start in range(0, LENGTH, 5):
                piece = ids[:, start : start + 5]
                one = model(piece, past_key_values=caches[0], attention_mask=mask[:, : start + 5]).logits
                other = model(piece, past_key_values=caches[1], attention_mask=mask[:, start : start + 5]).logits
                assert torch.equal(one, other)
        assert caches[0].count.tolist() == mask.sum(1).tolist()

    def test_no_mask_means_real_tokens(self, causal_mode, causal_model, texts, read, full, new_cache, assert_near):
        """A padded start, then tokens without a mask."""
        model, ids, mask = causal_model(causal_mode), texts(3), padded("left")
        cache = new_cache(model)
        read(model, ids[:, :9], [], cache, mask)
        rest = read(model, ids[:, 9:], [1, 1], cache)
        assert_near(rest, full(model, ids, mask)[:, 9:])

    def test_position_ids_say_where_the_tokens_are(self, causal_mode, causal_model, texts, new_cache, assert_near):
        """Numbers that jump: the same with and without a cache."""
        model, ids = causal_model(causal_mode), texts()
        numbers = (2 * torch.arange(LENGTH) + 3).expand(2, -1)
        cache, parts = new_cache(model), []
        with torch.no_grad():
            whole = model(ids, position_ids=numbers, use_cache=False).logits
            for start in range(0, LENGTH, 4):
                part = slice(start, start + 4)
                parts.append(model(ids[:, part], position_ids=numbers[:, part], past_key_values=cache).logits)
            default = model(ids, use_cache=False).logits
        assert_near(torch.cat(parts, 1), whole)
        assert (whole - default).abs().max() > 1e-3


class TestTakingBack:
    """`crop`: the cache is then what it was before the tokens that are taken back."""

    def test_every_number_that_is_promised(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near):
        """At every length, 1 to `spare` tokens, however few the cache keeps at that time."""
        model, ids, other = causal_model(cache_mode), texts(length=14), texts(length=14, seed=5)
        cache, spare = new_cache(model, 2), 2
        for length in range(1, 14):
            read(model, ids[:, length - 1 : length], [], cache)
            for number in range(1, min(spare, length) + 1):
                cut, start = copy.deepcopy(cache), length - number
                cut.crop(-number)
                assert cut.get_seq_length() == start
                text = torch.cat([ids[:, :start], other[:, start : start + 3]], 1)
                assert_near(read(model, text[:, start:], [], cut), full(model, text)[:, start:])

    @pytest.mark.parametrize("seed", range(2))
    def test_again_and_again(self, causal_mode, causal_model, texts, read, full, new_cache, assert_near, seed):
        """Read some, take some back, read others: at the end, as if the text had been read once."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low, high):
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        model, cache = causal_model(causal_mode), new_cache(causal_model(causal_mode), spare=2)
        text = texts(length=12)
        read(model, text, [1] * 12, cache)
        for step in range(8):
            new = texts(length=draw(1, 6), seed=100 * seed + step)
            logits = read(model, new, [draw(1, 6)], cache)
            text = torch.cat([text, new], 1)
            assert_near(logits, full(model, text)[:, -new.shape[1] :])
            number = draw(0, 2)
            cache.crop(-number)
            text = text[:, : text.shape[1] - number]
            assert cache.get_seq_length() == text.shape[1]

    @pytest.mark.parametrize("kind", ["left", "right", "holes", "rows"])
    def test_padding(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near, kind):
        model, ids, mask = causal_model(cache_mode), texts(3), padded(kind)
        expected = full(model, ids, mask)
        for stop in (5, 14, 18):
            for number in (1, 3):
                cache = new_cache(model)
                read(model, ids[:, :stop], [1, 4], cache, mask)
                cache.crop(-number)
                start = stop - number
                assert torch.equal(cache.count, mask[:, :start].sum(1))
                logits = read(model, ids[:, start:], [2], cache, mask)
                real = mask[:, start:].bool()
                assert_near(logits[real], expected[:, start:][real])

    @pytest.mark.parametrize("number", [2, 25])
    def test_all_tokens_of_a_recorded_past(
        self, causal_mode, causal_model, texts, read, full, new_cache, assert_near, number
    ):
        """After `activate_past_recording`, all since the last crop, in pieces that are larger than the spare too."""
        model, ids = causal_model(causal_mode), texts(length=40)
        expected, cache = full(model, ids), new_cache(model, spare=2)
        read(model, ids[:, :15], [1] * 15, cache)
        cache.activate_past_recording()
        assert cache.is_recording_past()
        read(model, texts(length=25, seed=7), [1, 12], cache)
        cache.crop(-25)
        read(model, ids[:, 15:], [9, 3, 12], cache)
        for _ in range(3):  # the record begins again at each crop
            cache.crop(-number)
            assert_near(read(model, ids[:, 40 - number :], [1, 12], cache), expected[:, 40 - number :])

    def test_a_positive_number_is_what_remains(
        self, cache_mode, causal_model, texts, read, full, new_cache, assert_near
    ):
        model, ids = causal_model(cache_mode), texts()
        cache = new_cache(model, spare=4)
        read(model, ids, [1] * LENGTH, cache)
        cache.crop(17)
        assert cache.get_seq_length() == 17
        cache.crop(30)  # there are no more
        cache.crop(0)
        assert cache.get_seq_length() == 17
        assert_near(read(model, ids[:, 17:], [], cache), full(model, ids)[:, 17:])

    def test_all_tokens(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near):
        """Nothing remains to be known: the cache is a new one, for any batch."""
        model, ids, other = causal_model(cache_mode), texts(), texts(5, 7, seed=9)
        for number in (LENGTH, 1000):
            cache = new_cache(model)
            read(model, ids, [1] * LENGTH, cache)
            cache.crop(-number)
            assert cache.get_seq_length() == 0 and not cache.is_initialized and cache.batch_size == -1
            assert_near(read(model, other, [2], cache), full(model, other))

    def test_more_than_is_kept(self, cache_mode, causal_model, texts, read, new_cache):
        model, ids = causal_model(cache_mode), texts()
        cache = new_cache(model, spare=2)
        read(model, ids, [1] * LENGTH, cache)
        if not folds(cache_mode):
            cache.crop(-19)
            assert cache.get_seq_length() == 1
            return
        kept = cache.measure.shape[1]
        message = rf"`tokens_to_remove` \(-19\) takes 19 of 20 tokens back.*the last {kept} .*`spare` \(2\)"
        with pytest.raises(ValueError, match=message):
            cache.crop(-19)
        assert cache.get_seq_length() == LENGTH  # and nothing happened

    def test_what_it_refuses_is_what_it_cannot_do(
        self, cache_mode, causal_model, texts, read, full, new_cache, assert_near
    ):
        """Every number that is not refused is exact."""
        model, ids = causal_model(cache_mode), texts(length=16)
        expected, cache, refused = full(model, ids), new_cache(model, spare=1), 0
        read(model, ids[:, :11], [1] * 11, cache)
        for length in range(12, 17):
            read(model, ids[:, length - 1 : length], [], cache)
            for number in range(1, length):
                cut, start = copy.deepcopy(cache), length - number
                try:
                    cut.crop(-number)
                except ValueError:
                    refused += 1
                    continue
                assert_near(read(model, ids[:, start : start + 3], [], cut), expected[:, start : start + 3])
        assert (refused > 0) == folds(cache_mode)


class TestSamples:
    """Beams: samples that change places, multiply or leave go on as they would alone."""

    def continued(self, model, cache, texts, read):
        new = texts(cache.batch_size, 5, seed=8)
        return new, read(model, new, [1, 1], cache)

    @pytest.mark.parametrize("cropped", [0, 2])
    @pytest.mark.parametrize("how", ["reorder", "repeat", "select", "mask"])
    def test_other_samples(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near, how, cropped):
        model, ids, mask = causal_model(cache_mode), texts(3), padded("left")
        cache = new_cache(model)
        read(model, ids, [1, 3] * 6, cache, mask)
        cache.crop(-cropped)
        if how == "reorder":
            order = torch.tensor([2, 0, 0])
            cache.reorder_cache(order)
        elif how == "repeat":
            order = torch.tensor([0, 0, 1, 1, 2, 2])
            cache.batch_repeat_interleave(2)
        else:
            order = torch.tensor([0, 2])
            cache.batch_select_indices(order if how == "select" else torch.tensor([True, False, True]))
        assert cache.batch_size == len(order)
        new, logits = self.continued(model, cache, texts, read)
        for row, source in enumerate(order.tolist()):
            start = ids[source, : LENGTH - cropped][mask[source, : LENGTH - cropped].bool()]
            text = torch.cat([start, new[row]]).unsqueeze(0)
            assert_near(logits[row], full(model, text)[0, -5:])

    def test_of_an_empty_cache(self, causal_model, texts, read, full, new_cache, assert_near):
        model, ids = causal_model("near_far, decay"), texts()
        cache = new_cache(model)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert_near(read(model, ids, [3], cache), full(model, ids))

    def test_a_copy_goes_its_own_way(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near):
        model, ids = causal_model(cache_mode), texts()
        cache = new_cache(model)
        read(model, ids, [1] * LENGTH, cache)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        for seed, one in enumerate([*copies, cache], start=20):
            new = texts(length=6, seed=seed)
            logits = read(model, new, [1, 2], one)
            assert_near(logits, full(model, torch.cat([ids, new], 1))[:, LENGTH:])

    def test_reset(self, cache_mode, causal_model, texts, read, full, new_cache, assert_near):
        model, ids, other = causal_model(cache_mode), texts(), texts(3, 9, seed=6)
        cache = new_cache(model)
        read(model, ids, [1] * LENGTH, cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes == 0
        assert_near(read(model, other, [1, 1], cache), full(model, other))


class TestSize:
    def test_lengths(self, cache_mode, causal_model, texts, read, new_cache):
        model, cache = causal_model(cache_mode), new_cache(causal_model(cache_mode))
        assert (cache.get_seq_length(), cache.get_max_length(), cache.batch_size) == (0, -1, -1)
        assert cache.get_mask_sizes(4) == (4, 0)
        read(model, texts(), [1, 6], cache)
        assert cache.get_seq_length() == cache.get_seq_length(1) == LENGTH
        assert cache.get_mask_sizes(4) == (LENGTH + 4, 0)
        assert cache.batch_size == 2 and cache.is_initialized and len(cache.layers) == len(cache) == 2

    def test_bytes(self, cache_mode, causal_model, texts, read, new_cache):
        """Of a fixed number of tokens and of two states, or of all tokens; counted by hand."""
        batch, width, heads, rank, layers = 2, 16, 2, 2, 2
        model, ids, sizes = causal_model(cache_mode, max_position_embeddings=512), texts(length=60), {}
        cache = new_cache(model)
        for length in range(1, 61):
            read(model, ids[:, length - 1 : length], [], cache)
            sizes[length] = cache.nbytes
        kept = cache.measure.shape[1]
        own = batch * 8 + kept * batch * (4 + 8)  # the count; positions in float32 and measure
        features = layers * batch * kept * width * 8
        if not folds(cache_mode):
            assert kept == 60
            assert sizes[60] == own + features
            steps = {sizes[length + 1] - sizes[length] for length in range(1, 60)}
            assert len(steps) == 1  # every token costs the same
            return
        state = heads * rank * (width // heads if model.config.factor_form == "matrix" else 1) + width + 1
        positions = 2 * layers * batch * 4 * model.config.factor_decay
        assert sizes[60] == own + features + 2 * layers * batch * state * 8 + positions
        reach = model.config.near_size - 1 if "near_far" in cache_mode else 0
        assert kept <= 2 * max(reach + 3, 4)
        assert max(sizes.values()) == max(list(sizes.values())[:30])

    def test_default_spare(self, causal_model, texts, read, new_cache):
        """What the documentation says of 64 tokens."""
        for mode, least in (("low_rank, vector", 65), ("near_far, matrix", 66)):
            model = causal_model(mode, max_position_embeddings=512)
            cache = ITNetCache(model.config)
            read(model, texts(1, 140), [100, 20], cache)
            assert least <= cache.measure.shape[1] <= 2 * least
            cache.crop(-64)
            assert cache.get_seq_length() == 76


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 12, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"num_beams": 3, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
GENERATED = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 39}


@pytest.fixture
def generated():
    """generated(model, ids, ...): what is generated behind a prompt, with the same random numbers every time."""

    def run(model, ids, **settings):
        torch.manual_seed(3)
        prompt = settings["inputs_embeds"] if ids is None else ids
        mask = torch.ones(prompt.shape[:2], dtype=torch.long)  # not from the tokens: any of them may be generated
        return model.generate(ids, **{"attention_mask": mask, **GENERATED, **settings})

    return run


class TestGenerate:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_cache_changes_nothing(self, cache_mode, causal_model, texts, generated, way):
        model, ids = causal_model(cache_mode), texts(length=6)
        expected = generated(model, ids, use_cache=False, **WAYS[way])
        assert expected.shape == (2 * WAYS[way].get("num_return_sequences", 1), 14)
        assert torch.equal(generated(model, ids, **WAYS[way]), expected)

    def test_greedy_is_the_largest_logit(self, causal_mode, causal_model, texts, generated, full):
        model, ids = causal_model(causal_mode), texts(length=6)
        found = generated(model, ids, min_new_tokens=None, eos_token_id=None)
        assert torch.equal(found[:, 6:], full(model, found)[:, 5:-1].argmax(-1))

    @pytest.mark.parametrize("spare", [1, SPARE])
    def test_a_cache_that_forgets_early(self, cache_mode, causal_model, texts, generated, new_cache, spare):
        model, ids = causal_model(cache_mode), texts(length=6)
        expected = generated(model, ids, use_cache=False)
        assert torch.equal(generated(model, ids, past_key_values=new_cache(model, spare)), expected)

    def test_assistants(self, causal_mode, causal_model, texts, generated):
        """Another model proposes tokens, some of which are refused; or the prompt does."""
        model, ids = causal_model(causal_mode), texts(1, 8)
        expected = generated(model, ids, use_cache=False)
        for assistant in (causal_model("low_rank, decay"), model):
            assert torch.equal(generated(model, ids, assistant_model=assistant), expected)
        ids = ids.repeat(1, 3)
        expected = generated(model, ids, use_cache=False)
        assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=4), expected)

    @pytest.mark.parametrize("size", [3, 100])
    def test_a_prompt_in_pieces(self, cache_mode, causal_model, texts, generated, size):
        model, ids, mask = causal_model(cache_mode), texts(3), padded("rows")
        mask[2], mask[:, -1] = 1, 1
        expected = generated(model, ids, attention_mask=mask, use_cache=False)
        assert torch.equal(generated(model, ids, attention_mask=mask, prefill_chunk_size=size), expected)

    def test_a_continuation(self, cache_mode, causal_model, texts, generated, new_cache):
        """`generate` goes on with the cache that it returned, and with more tokens of a user."""
        model, ids = causal_model(cache_mode), texts(length=6)
        first = generated(model, ids, return_dict_in_generate=True, past_key_values=new_cache(model))
        text = torch.cat([first.sequences, texts(length=3, seed=5)], 1)
        expected = generated(model, text, use_cache=False)
        again = generated(model, text, past_key_values=first.past_key_values)
        assert torch.equal(again, expected)

    @pytest.mark.parametrize("way", ["greedy", "beams"])
    def test_a_padded_batch_is_its_texts(self, cache_mode, causal_model, texts, generated, way):
        model, ids, mask = causal_model(cache_mode), texts(3), padded("left")
        together = generated(model, ids, attention_mask=mask, **WAYS[way])[:, LENGTH:]
        for row in range(3):
            alone = generated(model, ids[row : row + 1, mask[row].bool()], **WAYS[way])
            assert torch.equal(together[row], alone[0, -8:])

    def test_embeddings_as_a_prompt(self, cache_mode, causal_model, texts, generated):
        model, ids = causal_model(cache_mode), texts(length=6)
        embeddings = model.get_input_embeddings()(ids)
        found = generated(model, None, inputs_embeds=embeddings)
        assert torch.equal(found, generated(model, ids)[:, 6:])

    def test_beyond_the_positions_of_training(self, causal_model, texts, generated):
        model, ids = causal_model("near_far, matrix", max_position_embeddings=8), texts(length=6)
        assert torch.equal(generated(model, ids), generated(model, ids, use_cache=False))


def message(text):
    return re.escape(text)


class TestWrongUse:
    def test_a_cache_of_another_kind(self, causal_model, texts):
        model = causal_model("exact")
        with pytest.raises(ValueError, match=message("`past_key_values` (DynamicCache) must be an ITNetCache")):
            model(texts(), past_key_values=DynamicCache())
        with pytest.raises(ValueError, match=message("`past_key_values` (DynamicCache) must be an ITNetCache")):
            model.generate(texts(), past_key_values=DynamicCache(), max_new_tokens=2)
        with pytest.raises(ValueError, match=message("`cache_implementation` ('static') must be None")):
            model.generate(texts(), cache_implementation="static", max_new_tokens=2)

    @pytest.mark.parametrize(
        ("mode", "other", "overrides", "text"),
        [
            ("exact", "low_rank, vector", {}, "`integration_mode` 'exact', but this one has 'low_rank'"),
            ("low_rank, vector", "low_rank, matrix", {}, "`factor_form` 'vector', but this one has 'matrix'"),
            ("low_rank, vector", "low_rank, decay", {}, "`factor_decay` False, but this one has True"),
            ("low_rank, vector", "low_rank, vector", {"rank": 3}, "`rank` 2, but this one has 3"),
            ("near_far, matrix", "near_far, matrix", {"near_size": 5}, "`near_size` 3, but this one has 5"),
            ("exact", "exact", {"num_hidden_layers": 3}, "`num_hidden_layers` 2, but this one has 3"),
            ("exact", "exact", {"hidden_size": 32}, "`hidden_size` 16, but this one has 32"),
            ("exact", "exact", {"num_attention_heads": 4}, "`num_attention_heads` 2, but this one has 4"),
            ("exact", "exact", {"max_position_embeddings": 9}, "`max_position_embeddings` 64, but this one has 9"),
        ],
    )
    def test_a_cache_of_another_model(self, causal_model, texts, mode, other, overrides, text):
        cache = causal_model(mode)(texts()).past_key_values
        with pytest.raises(ValueError, match=message(text) + ".*a cache goes with the model that filled it"):
            causal_model(other, **overrides)(texts(), past_key_values=cache)

    @pytest.mark.parametrize("length", [3, LENGTH])
    @pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 2}])
    def test_a_prompt_without_a_new_token(self, causal_model, texts, length, settings):
        model, ids = causal_model("exact"), texts(1)
        cache = model(ids).past_key_values
        given = {"attention_mask": torch.ones(1, length, dtype=torch.long), "max_new_tokens": 2, **settings}
        with pytest.raises(ValueError, match=f"`past_key_values` hold {LENGTH} tokens, but the prompt has {length}"):
            model.generate(ids[:, :length], past_key_values=cache, **given)
        assert cache.get_seq_length() == LENGTH

    def test_the_model_as_its_own_assistant(self, causal_model, texts):
        """Transformers would change the configuration for it, and leave it so after an error."""
        model = causal_model("exact")
        with pytest.raises(ValueError, match=message("`assistant_early_exit` (1) must be None")):
            model.generate(texts(1), assistant_early_exit=1, max_new_tokens=2)
        assert model.config.num_hidden_layers == 2

    def test_another_batch(self, causal_model, texts):
        model = causal_model("exact")
        cache = model(texts()).past_key_values
        with pytest.raises(ValueError, match=message("`past_key_values` hold 2 texts, but this batch has 3")):
            model(texts(3), past_key_values=cache)
        assert cache.get_seq_length() == LENGTH

    def test_another_device(self, causal_model, texts):
        model = causal_model("exact")
        cache = model(texts()).past_key_values
        with pytest.raises(ValueError, match="`past_key_values` are on cpu, but the new tokens on meta"):
            cache.check(model.config, torch.zeros(2, 1, 16, device="meta"))

    def test_a_mask_that_contradicts_the_cache(self, causal_model, texts):
        model, ids = causal_model("exact"), texts()
        cache = model(ids[:, :5]).past_key_values
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, 3] = 0
        with pytest.raises(
            ValueError, match=message("`attention_mask` calls [5, 4] of the cached tokens real, but [5, 5] were")
        ):
            model(ids[:, 5:7], past_key_values=cache, attention_mask=mask)
        with pytest.raises(ValueError, match=message("`attention_mask` [2, 6] must be [2, 7] or [2, 2]")):
            model(ids[:, 5:7], past_key_values=cache, attention_mask=mask[:, :6])
        assert cache.get_seq_length() == 5

    def test_a_model_that_sees_the_future(self, tiny_config, tiny_model, causal_model, texts):
        with pytest.raises(ValueError, match=message("`is_causal` (False) must be True: only causal models have a")):
            ITNetCache(tiny_config("text"))
        with pytest.raises(ValueError, match=message("`modality` ('signal') has no tokens: only models of texts")):
            ITNetCache(tiny_config("signal", position_dim=1, is_causal=True))
        cache = causal_model("exact")(texts()).past_key_values
        with pytest.raises(ValueError, match=message("`is_causal` True, but this one has False")):
            tiny_model("text", integration_mode="exact", max_position_embeddings=64)(texts(), past_key_values=cache)

    def test_gradient_checkpointing(self, causal_model, texts, new_cache):
        model = causal_model("exact").train()
        model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="`past_key_values` do not go with gradient checkpointing"):
            model(texts(), past_key_values=new_cache(model))

    def test_several_documents(self, causal_model, texts, new_cache):
        model = causal_model("exact")
        numbers = torch.arange(LENGTH) % 8
        with pytest.raises(ValueError, match="`past_key_values` do not go with several documents in a row"):
            model(texts(), position_ids=numbers.expand(2, -1), past_key_values=new_cache(model))
        cache = model(texts()).past_key_values
        with pytest.raises(ValueError, match="`past_key_values` do not go with several documents in a row"):
            model(texts(), seq_idx=numbers.expand(2, -1) // 4, past_key_values=cache)


class TestWhenThereIsOne:
    def test_by_default_at_evaluation(self, causal_model, texts):
        model = causal_model("low_rank, matrix")
        assert isinstance(model(texts()).past_key_values, ITNetCache)
        assert model(texts(), use_cache=False).past_key_values is None
        assert model.train()(texts()).past_key_values is None
        model.eval().config.use_cache = False
        assert model(texts()).past_key_values is None
        assert isinstance(model(texts(), use_cache=True).past_key_values, ITNetCache)

    def test_a_model_that_sees_the_future_has_none(self, tiny_model, texts):
        assert tiny_model("text")(texts()).past_key_values is None

    def test_as_a_tuple(self, causal_model, texts):
        model = causal_model("exact", ITNetForCausalLM)
        logits, cache = model(texts(), return_dict=False)
        assert logits.shape == (2, LENGTH, 40) and isinstance(cache, ITNetCache)
