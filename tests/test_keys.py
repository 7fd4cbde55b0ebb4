"""Nested keys, and the hints of error messages."""

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdnn import TensorDict, unravel_key, unravel_key_list
from tdnn._keys import as_key, as_path, hint, listing

NESTED = st.recursive(st.text(max_size=3), lambda keys: st.lists(keys, min_size=1).map(tuple))


def flat(key):
    return [key] if isinstance(key, str) else [part for inner in key for part in flat(inner)]


@given(NESTED)
def test_a_path_has_the_parts_of_a_key_in_order(key):
    assert as_path(key) == tuple(flat(key))
    assert unravel_key(key) == as_key(as_path(key))
    assert as_path(unravel_key(key)) == as_path(key)


@given(st.lists(NESTED))
def test_a_list_of_keys_is_unravelled_one_by_one(keys):
    assert unravel_key_list(keys) == [unravel_key(key) for key in keys]


@pytest.mark.parametrize("key", [5, (), ("a", ()), ("a", 5), ["a"], None, ("a", ["b"]), b"a", 1.5])
def test_anything_else_is_not_a_key(key):
    with pytest.raises(TypeError, match="a key is a str or a non-empty tuple of str, not"):
        as_path(key)


def test_a_str_is_not_a_list_of_keys():
    with pytest.raises(TypeError, match=r"write \['ab'\]"):
        unravel_key_list("ab")


def test_a_member_of_an_enum_of_str_is_its_text():
    class Field(str, enum.Enum):  # noqa: UP042  # StrEnum's str() is the text anyway
        OBS = "ab"

    class Text(str):
        __slots__ = ()

    for key in (Field.OBS, Text("ab")):
        td = TensorDict({key: 1, "a": {"b": 2}})
        assert list(td.keys()) == ["ab", "a"]
        assert type(next(iter(td.keys()))) is str
        assert td.get(key) is td[key] is td["ab"]
        assert key in td
        assert td.set(("c", key), 3)["c", "ab"] == 3


def test_a_hint_names_the_nearest_key_or_none():
    assert hint("weigth", ["bias", "weight"]) == " (did you mean 'weight'?)"
    assert hint("weigth", []) == hint("x", ["weight"]) == ""


def test_a_long_list_says_how_many_follow():
    assert listing("abc") == "['a', 'b', 'c']"
    assert listing(map(str, range(23))).endswith("'19', and 3 more]")
