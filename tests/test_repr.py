"""Pictures of a tree: what they say about each entry, and that they never fail."""

import re
import textwrap
from html.parser import HTMLParser

import pytest
import strategies
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdnn import TensorDict


def picture(text):
    return textwrap.dedent(text).strip("\n")


def lines_below(tree):
    """Return the number of leaves and branches."""
    return len(list(tree.keys(include_nested=True)))


# -- text --------------------------------------------------------------------------------------


def test_a_picture_has_one_line_for_each_entry_with_its_columns_aligned():
    tree = TensorDict(
        {
            "observation": torch.zeros(3, 4, dtype=torch.uint8),
            "policy": {"loc": torch.zeros(3), "deeper": {"scale": torch.zeros(3, 10, 2)}},
            "n": torch.zeros(3, dtype=torch.int64, device="meta"),
        },
        [3],
    )
    assert repr(tree) == picture("""
        TensorDict(batch_size=[3])
          observation: (3, 4)     uint8   cpu
          policy:
            loc:       (3,)       float32 cpu
            deeper:
              scale:   (3, 10, 2) float32 cpu
          n:           (3,)       int64   meta
    """)
    assert str(tree) == repr(tree)


def test_the_header_says_what_the_tree_declares():
    tree = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], device="cpu", names=["time", None])
    tree.lock_()
    head = "TensorDict(batch_size=[2, 3], device=cpu, names=['time', None], locked)"
    assert repr(tree).splitlines()[0] == head
    assert repr(TensorDict({"a": 1})).splitlines()[0] == "TensorDict(batch_size=[])"


def test_a_branch_says_only_what_differs_from_its_parent():
    tree = TensorDict({"same": {"x": torch.zeros(2)}}, [2], device="cpu", names=["time"])
    tree["wide"] = TensorDict({"x": torch.zeros(2, 3)}, [2, 3], names=["time", "env"])
    tree["held"] = {}
    tree["held"].lock_()
    assert repr(tree) == picture("""
        TensorDict(batch_size=[2], device=cpu, names=['time'])
          same:
            x: (2,)   float32 cpu
          wide: batch_size=[2, 3], names=['time', 'env']
            x: (2, 3) float32 cpu
          held: locked empty
    """)


def test_empty_trees_and_branches_are_visible():
    assert repr(TensorDict({}, [2])) == "TensorDict(batch_size=[2]) empty"
    assert repr(TensorDict({"a": {"b": {}}})) == picture("""
        TensorDict(batch_size=[])
          a:
            b: empty
    """)


def test_a_tie_names_the_first_of_its_names():
    shared = torch.zeros(2)
    tree = TensorDict({"a": {"weight": shared}, "b": shared, "c": torch.zeros(2)})
    assert repr(tree) == picture("""
        TensorDict(batch_size=[])
          a:
            weight: (2,) float32 cpu
          b:        (2,) float32 cpu = 'a.weight'
          c:        (2,) float32 cpu
    """)


def test_parameters_and_tensors_that_require_grad_are_marked():
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    tree = TensorDict(
        {"p": nn.Parameter(torch.zeros(2)), "f": frozen, "g": torch.zeros(2, requires_grad=True)}
    )
    assert repr(tree) == picture("""
        TensorDict(batch_size=[])
          p: (2,) float32 cpu Parameter
          f: (2,) float32 cpu Parameter requires_grad=False
          g: (2,) float32 cpu requires_grad
    """)


def test_uninitialised_parameters_have_no_shape_to_show():
    tree = TensorDict.from_module(nn.LazyBatchNorm1d())
    assert repr(tree) == picture("""
        TensorDict(batch_size=[])
          weight:              (?) float32 cpu UninitializedParameter
          bias:                (?) float32 cpu UninitializedParameter
          running_mean:        (?) float32 cpu UninitializedBuffer
          running_var:         (?) float32 cpu UninitializedBuffer
          num_batches_tracked: ()  int64   cpu
    """)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_unusual_layouts_are_named():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    tree = TensorDict({"sparse": torch.eye(2).to_sparse()})
    tree._data.update(jagged=jagged, strided=strided)
    sparse_line, jagged_line, strided_line = repr(tree).splitlines()[1:]
    assert sparse_line.split("cpu")[1] == " sparse_coo"
    assert jagged_line.endswith("NestedTensor jagged")
    assert "(?)" in strided_line


def test_a_subclass_of_tensor_is_named():
    class Tagged(torch.Tensor):
        pass

    tree = TensorDict({"a": torch.zeros(2).as_subclass(Tagged)})
    assert repr(tree).splitlines()[1] == "  a: (2,) float32 cpu Tagged"


def test_an_entry_that_is_no_tensor_shows_its_value_on_one_line():
    class Wordy:
        def __repr__(self):
            return "two\nlines"

    class Broken:
        def __repr__(self):
            raise RuntimeError("no picture of this")

    tree = TensorDict({"a": torch.zeros(2)})
    tree._data.update(text="hello", wordy=Wordy(), long="x" * 1000, broken=Broken())
    lines = repr(tree).splitlines()
    assert len(lines) == 6
    assert lines[2] == "  text: str 'hello'"
    assert lines[3] == "  wordy: Wordy two lines"
    assert len(lines[4]) < 80
    assert lines[5].startswith("  broken: Broken <")


def test_keys_that_could_be_misread_are_quoted():
    tree = TensorDict({"plain.dots_and-é": 1, "": 1, "a b": 1, "x: (2,)": 1, "new\nline": 1})
    shown = [re.split(r": +\(\)", line)[0].strip() for line in repr(tree).splitlines()[1:]]
    assert shown == ["plain.dots_and-é", "''", "'a b'", "'x: (2,)'", r"'new\nline'"]


def test_a_long_key_does_not_push_the_other_lines_away():
    tree = TensorDict({"a": torch.zeros(2), "k" * 300: torch.zeros(2)})
    lines = repr(tree).splitlines()
    assert len(lines[1]) < 100
    assert lines[2].endswith(": (2,) float32 cpu")


def test_a_subclass_shows_its_own_name():
    class Weights(TensorDict):
        __slots__ = ()

    tree = Weights({"a": {"b": 1}})
    assert repr(tree).splitlines()[:2] == ["Weights(batch_size=[])", "  a:"]
    mixed = TensorDict({"a": torch.zeros(2)}, [2])
    mixed["b"] = Weights({"c": torch.zeros(2, 3)}, [2, 3])
    mixed["d"] = Weights({}, [2])
    assert repr(mixed) == picture("""
        TensorDict(batch_size=[2])
          a:   (2,)   float32 cpu
          b: Weights(batch_size=[2, 3])
            c: (2, 3) float32 cpu
          d: Weights empty
    """)


def test_a_model_of_usual_size_is_shown_whole():
    tree = TensorDict.from_module(torchvision.models.resnet18())
    lines = repr(tree).splitlines()
    assert len(lines) == 1 + lines_below(tree)
    assert sum("Parameter" in line for line in lines) == 62
    column = {line.index("float32") for line in lines if "float32" in line}
    assert len(column) == 1


@pytest.mark.parametrize("count", [199, 200, 201, 202, 512])
def test_a_long_picture_is_cut_and_says_how_much_is_missing(count):
    tree = TensorDict({str(at): 1 for at in range(count - 2)} | {"deep": {"x": 1}})
    lines = repr(tree).splitlines()
    entries = lines_below(tree)
    assert entries == count
    if count <= 200:
        assert len(lines) == 1 + entries
    else:
        more = entries - 200
        assert len(lines) == 202
        assert lines[-1] == f"  ... and {more} more {'entry' if more == 1 else 'entries'}"


def test_tensors_in_transforms_can_be_shown():
    seen = []

    def look(tree):
        seen.append((repr(tree), tree._repr_html_()))
        return tree["a"].sum()

    tree = TensorDict({"a": torch.zeros(3, 4)}, [3])
    torch.vmap(torch.func.grad(look))(tree)
    assert seen[0][0].splitlines()[0] == "TensorDict(batch_size=[])"
    assert seen[0][0].splitlines()[1].startswith("  a: (4,) float32 cpu")


@given(strategies.trees(keys=st.text(max_size=3), names=True))
def test_any_tree_has_a_picture_with_a_line_for_each_entry(tree):
    lines = repr(tree).splitlines()[1:]
    assert len(lines) == lines_below(tree)
    leaves = [line for line in lines if re.search(r"\) +\w+ +cpu", line)]
    for leaf, line in zip(tree.values(True, True), leaves, strict=True):
        assert f": {tuple(leaf.shape)} " in re.sub(r": +\(", ": (", line)
        assert str(leaf.dtype).removeprefix("torch.") in line
    page(tree)


# -- HTML --------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Reads HTML into nested ``[tag, attributes, children]``; a text is a child."""

    def __init__(self, html):
        super().__init__()
        self.tags = set()
        self.stack = [["page", {}, []]]
        self.feed(html)
        self.close()
        assert len(self.stack) == 1, f"not closed: {self.stack[-1][0]}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        node = [tag, dict(attrs), []]
        self.stack[-1][2].append(node)
        self.stack.append(node)

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag

    def handle_data(self, data):
        self.stack[-1][2].append(data)


def words(node):
    return node if isinstance(node, str) else "".join(words(child) for child in node[2])


def outline(node):
    """Return a leaf's row as a str, and a branch as (summary, is open, rows below)."""
    if node[0] != "details":
        return words(node)
    summary, below = node[2]
    return words(summary), "open" in node[1], [outline(child) for child in below[2]]


def page(tree):
    """Return the outline of a tree's HTML picture."""
    reader = Reader(tree._repr_html_())
    assert reader.tags <= {"div", "details", "summary", "span", "b"}
    (frame,) = reader.stack[0][2]
    (root,) = frame[2]
    return outline(root)


def test_html_nests_branches_and_lines_up_columns():
    tree = TensorDict(
        {"obs": torch.zeros(3, 4), "a": {"loc": nn.Parameter(torch.zeros(3)), "b": {}}}, [3]
    )
    tree["a", "tied"] = tree["obs"]
    assert page(tree) == (
        "TensorDict(batch_size=[3])",
        True,
        [
            "obs    (3, 4) float32 cpu",
            (
                "a (3)",
                True,
                ["loc  (3,)   float32 cpu Parameter", "b empty", "tied (3, 4) float32 cpu = 'obs'"],
            ),
        ],
    )


def test_html_of_an_empty_tree_has_nothing_to_unfold():
    assert page(TensorDict({}, [3])) == "TensorDict(batch_size=[3]) empty"


def test_html_escapes_whatever_a_user_can_write():
    bad = "</div><script>alert('x')</script>&amp;"
    tree = TensorDict({bad: torch.zeros(2), "b": {bad: {"c": 1}}}, names=None)
    tree["tied"] = tree[bad]
    tree._data["text"] = bad
    html = tree._repr_html_()
    assert "<script" not in html
    _, _, rows = page(tree)
    assert rows[0].startswith(repr(bad)[:10])
    assert rows[1][2][0][0].startswith(repr(bad))
    assert rows[2].endswith(f"= {bad!r}")
    assert rows[3].startswith("text str")


def test_html_has_no_script_and_no_colour_that_a_theme_could_contradict():
    html = TensorDict.from_module(nn.Linear(2, 2))._repr_html_()
    for word in ("<script", "<style", "http", "background", ";color", '"color', "url("):
        assert word not in html


def test_html_begins_with_the_branches_closed_when_there_are_many():
    few = TensorDict({str(at): {"x": 1} for at in range(3)})
    many = TensorDict({str(at): {"x": 1} for at in range(100)})
    assert [row[1] for row in page(few)[2]] == [True] * 3
    assert page(many)[1] is True
    assert [row[1] for row in page(many)[2]] == [False] * 100


def test_html_of_a_huge_tree_is_cut_and_says_how_much_is_missing():
    tree = TensorDict({str(at): {"deep": {"x": 1}} for at in range(500)})
    root = page(tree)
    assert root[2].pop() == "... and 500 more entries"
    assert count(root) == 1 + 1000


def count(row):
    return 1 if isinstance(row, str) else 1 + sum(count(below) for below in row[2])
