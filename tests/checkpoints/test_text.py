"""Text in, text out: stop strings wherever the rounds cut the text, streamed and not, and whole characters."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from checkpoints.text import Piece, TextDecoder, first_stop, pieces, until, whole_characters
from dflash_jax.generate import Decoder
from tests.support.oracle import ScriptedDrafter, script
from tests.support.reciter import Reciter, byte_tokenizer, fallback_tokenizer

TEXT = "The quick brown fox"


def cut(text: str, places: tuple[int, ...]) -> list[str]:
    """``text`` in pieces that end at the given places."""
    ends = (0, *places, len(text))
    return [text[start:end] for start, end in pairwise(ends) if end > start]


def streamed(parts: list[str], *stops: str) -> list[str]:
    return [piece.text for piece in until((Piece(part, True) for part in parts), stops)]


@pytest.mark.parametrize(
    "parts",
    [
        ["The quick ", "brown fox"],  # the stop lies inside one round, and more follows in it
        ["The quick brow", "n fox"],  # over two rounds
        list(TEXT),  # token by token
        [TEXT],  # not streamed
    ],
)
def test_B06_the_text_ends_before_the_stop_string(parts):
    assert "".join(streamed(parts, "own f")) == "The quick br"


def test_B06_every_way_to_cut_a_text_shows_the_same():
    text, stops = "aabaab|aaba", ("aabaaa", "b|a", "ab|")
    for count in range(4):
        for places in combinations(range(1, len(text)), count):
            parts = cut(text, places)
            assert "".join(streamed(parts, *stops)) == "aaba", parts


def test_B06_of_stop_strings_within_each_other_the_first_complete_one_counts():
    for count in range(4):
        for places in combinations(range(1, 6), count):
            assert "".join(streamed(cut("xabcde", places), "abcd", "bc", "abcde")) == "xa", places


def test_B06_no_part_of_a_stop_string_is_shown_early():
    assert streamed(["The quick br", "ow", "n", " ", "cat"], "own f") == ["The quick br", "own cat"]
    assert streamed(["how", " now"], "own f") == ["h", "ow n", "ow"]


def test_B06_an_unfinished_stop_string_is_shown_at_the_end():
    assert "".join(streamed(["The quick br", "ow", "n"], "own f")) == "The quick brown"


def test_B06_the_decoder_is_asked_no_further():
    def asked():
        yield Piece("The quick brown fox", False)
        raise AssertionError("a round after the stop string")

    assert [piece.text for piece in until(asked(), ("own f",))] == ["The quick br"]


def test_without_stop_strings_the_pieces_pass_as_they_are():
    assert streamed(["né ", "🎉", "漢字"]) == ["né ", "🎉", "漢字"]


TOKENIZER = byte_tokenizer()


def reciting(
    text: str, accept: list[list[int]], stop: tuple[str, ...], rows: int = 1, tokenizer=TOKENIZER, **options
) -> TextDecoder:
    """Decodes ``text`` from its first character on, in blocks of 8 whose drafts are right as often as scripted."""
    ids = tokenizer.encode(text).ids
    vocab = tokenizer.get_vocab_size()
    knows = script([ids[1:]] * rows, [ids[:1]] * rows, accept)
    decoder = Decoder(Reciter(tuple(ids), vocab), None, ScriptedDrafter(8, vocab), knows)
    return TextDecoder(decoder, tokenizer, stop, **options)


FOX = "The quick brown fox jumps over the lazy dog"
ROUNDS = {
    "inside a round, more accepted behind it": [[7]],
    "over two rounds": [[6, 6, 7]],
    "a token a round": [[0]],
}


@pytest.mark.parametrize("accept", ROUNDS.values(), ids=ROUNDS)
class TestB06StopStringsOfADecoder:
    def test_B06_streamed(self, accept) -> None:
        texts = reciting(FOX, accept, ("own f",))
        assert FOX[0] + "".join(piece.text for piece in texts.stream(FOX[0], 40)) == "The quick br"

    def test_B06_not_streamed(self, accept) -> None:
        (found,) = reciting(FOX, accept, ("own f", "lazy")).complete([FOX[0]], 40)
        assert FOX[0] + found.text == "The quick br"
        assert (found.finish, len(found.tokens)) == ("stop", len("he quick brown f"))

    def test_B06_an_unfinished_stop_string_is_part_of_the_text(self, accept) -> None:
        text = "The quick brown"
        (found,) = reciting(text, accept, ("own f",)).complete([text[0]], len(text) - 1)
        assert (text[0] + found.text, found.finish) == (text, "length")

    def test_B03_tokens_behind_a_stop_string_count_nowhere(self, accept) -> None:
        texts = reciting(FOX, accept, ("own f",))
        ids = TOKENIZER.encode(FOX).ids
        out = texts.generate([ids[:1]], 40, logprobs=1)
        assert out.tokens == [ids[1 : len("The quick brown f")]]
        assert out.counts.sum() == len(out.tokens[0]) - 1
        assert ((out.counts > 0) == (out.accepted >= 0)).all()
        assert out.logprobs[0].said.shape == (len(out.tokens[0]),)


def test_B06_rows_end_on_their_own() -> None:
    """A row whose stop string has come is done; the others go on, and a row that never says it runs to its budget."""
    texts = reciting(FOX, [[7], [0], [3]], ("own f",), rows=3)
    found = texts.complete([FOX[0]] * 3, [40, 40, 9])
    assert [FOX[0] + row.text for row in found] == ["The quick br", "The quick br", "The quick "]
    assert [row.finish for row in found] == ["stop", "stop", "length"]
    out = texts.generate([TOKENIZER.encode(FOX[0]).ids] * 3, [40, 40, 9])
    assert np.array_equal(out.counts.sum(1), [15, 15, 8])


def test_a_stop_id_may_come_first() -> None:
    (found,) = reciting(FOX, [[7]], ("own f",), stop_ids=(TOKENIZER.encode("k").ids[0],)).complete([FOX[0]], 40)
    assert (FOX[0] + found.text, found.finish) == ("The quic", "stop")


@pytest.mark.parametrize("accept", [[[7]], [[2, 5, 1]], [[0]]])
def test_B62_streamed_characters_are_whole(accept) -> None:
    text = "né 🎉漢字 👩‍💻!"
    parts = [piece.text for piece in reciting(text, accept, ()).stream(text[0], 60 - 1)]
    assert "".join(parts).startswith(text[1:]) and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("budget", [4, 5, 6, 7])
def test_B62_an_unfinished_character_at_the_end_is_not_shown(budget) -> None:
    """A budget that ends inside the four bytes of a character."""
    text = "né 🎉"
    texts = reciting(text, [[2, 1]], ())
    whole = text[1:-1] if budget < 7 else text[1:]
    (found,) = texts.complete([text[0]], budget)
    assert found.text == "".join(piece.text for piece in texts.stream(text[0], budget)) == whole
    assert len(found.tokens) == budget


@pytest.mark.parametrize("accept", [[[7]], [[1]], [[0]]])
@pytest.mark.parametrize("budget", [3, 7])
def test_B06_a_token_that_ends_a_stop_string_and_begins_a_character(accept, budget) -> None:
    """The token that is a space and half a quotation mark completes the string."""
    tokenizer, text = byte_tokenizer([("Ġ", "â"), ("Ġâ", "Ģ")]), "xQ: “Why"
    assert len(tokenizer.encode(text).ids) == 8
    texts = reciting(text, accept, ("Q: ",), tokenizer=tokenizer)
    (found,) = texts.complete(["x"], budget)
    assert (found.text, len(found.tokens), found.finish) == ("", 3, "stop")
    assert not list(texts.stream("x", budget))


@pytest.mark.parametrize("stop", [(), ("own f",)])
def test_stop_ids_end_rows_of_ids_too(stop) -> None:
    (end,) = TOKENIZER.encode("k").ids
    out = reciting(FOX, [[7]], stop, stop_ids=(end,)).generate([TOKENIZER.encode(FOX[0]).ids], 40)
    assert (out.tokens[0][-1], out.finish) == (end, ["stop"])


def test_stop_strings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="stop ''"):
        reciting(FOX, [[7]], ("",))
    with pytest.raises(ValueError, match=r"expected a tuple of strings, such as \('own f',\)"):
        reciting(FOX, [[7]], "own f")


FALLBACK = fallback_tokenizer()


def shown_of(ids: list[int], tokenizer, *stops: str) -> list[str]:
    return [piece.text for piece in until(pieces(((token, False) for token in ids), tokenizer), stops)]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK], ids=["bytes", "fallback"])
class TestB62Characters:
    def test_B62_of_a_text_none_is_split(self, tokenizer) -> None:
        text = "a é(🎉漢字 👩‍💻!"
        parts = shown_of(tokenizer.encode(text).ids, tokenizer)
        assert "".join(parts) == text and not any("\ufffd" in part for part in parts)
        assert "🎉" in parts

    def test_B62_any_bytes_show_the_same_streamed_and_at_once(self, tokenizer) -> None:
        """Broken characters among them: what was shown stays, and one that is unfinished at the end is not."""
        rng, whole = np.random.default_rng(0), tokenizer.encode("a 🎉é漢(").ids
        for _ in range(300):
            parts = [whole[start : start + size] for start, size in rng.integers((0, 1), (len(whole), 5), (4, 2))]
            ids = [token for part in parts for token in part]
            text = whole_characters(tokenizer, ids)
            assert "".join(shown_of(ids, tokenizer)) == text and not text.endswith("\ufffd")
            for end in range(len(ids)):
                assert text.startswith(whole_characters(tokenizer, ids[:end]))
            for stop in ("é", "(a", " 🎉"):
                assert "".join(shown_of(ids, tokenizer, stop)) == text[: first_stop(text, (stop,))]

    def test_B62_a_broken_character_takes_no_whole_one_back(self, tokenizer) -> None:
        first, second = tokenizer.encode("a🎉").ids, tokenizer.encode("é").ids[:1]
        assert whole_characters(tokenizer, first + second) == "a🎉"
        assert whole_characters(tokenizer, first + second + tokenizer.encode("(").ids) == "a🎉\ufffd("
