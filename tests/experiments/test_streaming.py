"""Stop strings in streamed text, wherever the rounds cut it."""

from itertools import combinations, pairwise

import pytest

from experiments.streaming import Piece, until

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


def test_B06_no_part_of_a_stop_string_is_shown_early():
    assert streamed(["The quick br", "ow", "n", " ", "cat"], "own f") == ["The quick br", "own cat"]
    assert streamed(["how", " now"], "own f") == ["h", "ow n", "ow"]


def test_B06_an_unfinished_stop_string_is_shown_at_the_end():
    assert "".join(streamed(["The quick br", "ow", "n"], "own f")) == "The quick brown"


def test_B06_the_decoder_is_asked_no_further():
    def pieces():
        yield Piece("The quick brown fox", False)
        raise AssertionError("a round after the stop string")

    assert [piece.text for piece in until(pieces(), ("own f",))] == ["The quick br"]


def test_without_stop_strings_the_pieces_pass_as_they_are():
    assert streamed(["né ", "🎉", "漢字"]) == ["né ", "🎉", "漢字"]
