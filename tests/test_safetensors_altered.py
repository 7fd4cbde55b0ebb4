"""Files that another program wrote, and files that were cut, altered or forged."""

import hashlib
import json
import pickle
import re
import zlib

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import picture, round_trip

from tdnn import TensorDict
from tdnn.errors import FileFormatError

HEAD = b'{"__metadata__":{"tdnn.sha256":"'


def split(data):
    """The header and the data of a file."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def file_of(header, data=b""):
    """A file with this header, given as bytes or as what JSON writes."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def sealed(about, entries, data=b""):
    """A file whose digest is right, whatever it says: what a careful forger would write."""
    text = about if isinstance(about, str) else json.dumps(about)
    metadata = {"tdnn.sha256": "", "tdnn": text}
    rest = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    rest = rest[len(HEAD) :]
    return file_of(HEAD + hashlib.sha256(rest).hexdigest().encode() + rest, data)


def tensor_entry(begin=0, end=4, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


# -- files of other programs ---------------------------------------------------------------------


def test_a_file_of_another_program_comes_back_flat(path):
    state = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(2), "n": torch.tensor(3)}
    safetensors.torch.save_file(state, path, metadata={"format": "pt", "epoch": "3"})
    back = TensorDict.load(path)
    assert back.batch_size == ()
    assert back.keys() == state.keys()
    for key, leaf in state.items():
        assert torch.equal(back[key], leaf)


def test_a_file_of_another_program_that_is_not_aligned_is_read(path):
    entries = {"a": tensor_entry(0, 1, (), "U8"), "b": tensor_entry(1, 9, (2,))}
    path.write_bytes(file_of(entries, b"\7" + torch.tensor([1.5, 2.5]).numpy().tobytes()))
    back = TensorDict.load(path)
    assert back["a"] == 7
    assert back["b"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("header", [{}, {"__metadata__": None}, {"__metadata__": {"a": "b"}}])
def test_a_file_without_tensors_is_an_empty_tree(path, header):
    path.write_bytes(file_of(header))
    assert list(TensorDict.load(path).keys()) == []


# -- files that were cut or altered --------------------------------------------------------------


def sample(path):
    w = torch.arange(6.0).view(2, 3)
    tree = TensorDict({"a": {"b": w, "e": {}}, "c": w, "d": torch.ones(2, dtype=torch.complex128)})
    tree.batch_size = [2]
    tree.save(path)
    return path.read_bytes()


def test_a_file_cut_at_any_length_is_refused(path):
    data = sample(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(FileFormatError, match=r"cannot load '.*tree.safetensors': it "):
            TensorDict.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(FileFormatError, match="it has 1 bytes more than its header describes"):
        TensorDict.load(path)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_a_file_with_any_one_byte_altered_is_refused(path, flip):
    data = sample(path)
    for at in range(len(data)):
        altered = bytearray(data)
        altered[at] ^= flip
        path.write_bytes(altered)
        with pytest.raises(FileFormatError, match=r"cannot load '.*tree.safetensors'"):
            TensorDict.load(path)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_file_of_another_program_that_was_altered_is_refused_or_read(tmp_path, data):
    path = tmp_path / "t"
    safetensors.torch.save_file({"a.b": torch.ones(2, 3), "c": torch.zeros(0)}, path)
    altered = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(altered) - 1))
        altered[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path.write_bytes(altered)
    try:
        tree = TensorDict.load(path)
    except FileFormatError:
        return
    for leaf in tree.values():
        leaf.sum()


def test_data_that_changed_is_found_on_request_in_a_large_file(path, monkeypatch):
    monkeypatch.setattr("tdnn.io.safetensors._SMALL", 10)
    TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3), "d": torch.ones(3)}}).save(path)
    assert TensorDict.load(path, verify=True)["a"].sum() == 3
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    assert TensorDict.load(path)["a"].sum() == 3
    with pytest.raises(FileFormatError, match=r"the data of \['b.d'\] changed after save"):
        TensorDict.load(path, verify=True)


def test_data_that_changed_can_be_loaded_on_request(path):
    TensorDict({"a": torch.ones(3)}).save(path)
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    with pytest.raises(FileFormatError, match="the data of"):
        TensorDict.load(path)
    assert torch.equal(TensorDict.load(path, verify=False)["a"][:2], torch.ones(2))


ONE = {"w": tensor_entry()}
FOREIGN = {
    "empty": (b"", "0 bytes, too few"),
    "five bytes": (b"abcde", "5 bytes, too few"),
    "long header": ((2**63).to_bytes(8, "little") + b"{}", "allows 100000000"),
    "short header": ((9).to_bytes(8, "little") + b"{}", "2 of the 9 bytes of its header"),
    "no header": (file_of(b""), "header is not JSON"),
    "not json": (file_of(b"{'a': 1}"), "header is not JSON"),
    "not utf-8": (file_of(b'{"\xff": 1}'), "header is not JSON"),
    "nan": (file_of(b'{"a": NaN}'), "NaN is not JSON"),
    "list": (file_of(b"[]"), "header is a JSON list"),
    "deep lists": (file_of(b"[" * 1_000_000), "nested too deep"),
    "deep objects": (file_of(b'{"a":' * 1_000_000), "nested too deep"),
    "long number": (file_of(b'{"a": ' + b"9" * 10_000 + b"}"), "header is not JSON"),
    "pickle": (pickle.dumps({"a": torch.ones(3)}), "altered or is not a safetensors file"),
    "metadata list": (file_of({"__metadata__": []}), "'__metadata__' is not a map of strings"),
    "metadata number": (file_of({"__metadata__": {"a": 1}}), "'__metadata__' is not a map"),
    "name twice": (
        file_of(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"w":0}'),
        r"the names \['w'\] more than once",
    ),
    "no entry": (file_of({"w": 3}), "entry of 'w' has no dtype, shape and data_offsets"),
    "no offsets": (file_of({"w": {"dtype": "F32", "shape": []}}), "entry of 'w' has no dtype"),
    "float offsets": (file_of({"w": tensor_entry(0.0, 4)}, b"1234"), "entry of 'w' has no dtype"),
    "dtype": (file_of({"w": tensor_entry(dtype="F31")}, b"1234"), "unknown dtype 'F31'"),
    "negative shape": (file_of({"w": tensor_entry(shape=[-1])}, b"1234"), r"impossible shape"),
    "float shape": (file_of({"w": tensor_entry(shape=[1.0])}, b"1234"), "impossible shape"),
    "bool shape": (file_of({"w": tensor_entry(shape=[True])}, b"1234"), "impossible shape"),
    "huge shape": (file_of({"w": tensor_entry(shape=[2**70])}, b"1234"), "impossible shape"),
    "huge shape of nothing": (
        file_of({"w": tensor_entry(end=0, shape=[0, 2**70])}, b""),
        "impossible shape",
    ),
    "wide shape": (
        file_of({"w": tensor_entry(0, 0, [0, 2**62, 2**62])}),
        "torch cannot make 'w'",
    ),
    "long shape": (file_of({"w": tensor_entry(0, 0, [2**62] * 9999)}), r"impossible .*\.\.\.$"),
    "shape": (file_of({"w": tensor_entry(shape=[2])}, b"1234"), "needs 8 bytes .* at 0 to 4"),
    "backwards": (file_of({"w": tensor_entry(4, 0)}, b"1234"), "at 4 to 0"),
    "negative": (file_of({"w": tensor_entry(-4, 0)}, b"1234"), "at -4 to 0"),
    "gap in front": (file_of({"w": tensor_entry(4, 8)}, b"12345678"), "'w' comes after a gap"),
    "overlap": (
        file_of({"w": tensor_entry(), "v": tensor_entry(2, 6)}, b"123456"),
        "'v' overlaps another tensor",
    ),
    "beyond": (file_of(ONE, b"12"), r"it was cut: it has \d+ of its \d+ bytes"),
    "more": (file_of(ONE, b"12345"), "1 bytes more"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_broken_file_is_refused_with_what_is_wrong(path, kind):
    data, why = FOREIGN[kind]
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=rf"cannot load '{re.escape(str(path))}': .*{why}"):
        TensorDict.load(path, verify=False)


GOOD = {
    "version": 1,
    "tree": [[0, "", {"batch_size": []}], [1, "w", "w"]],
    "dtypes": {},
    "crc32": {"w": f"{zlib.crc32(b'1234'):08x}"},
}
ROOT = [0, "", {"batch_size": []}]
FORGED = {
    "other version": ({"version": 2}, "version 2 of tdnn's metadata, and this tdnn reads 1"),
    "no version": ({"version": None}, "version None"),
    "no rows": ({"tree": []}, "has no rows"),
    "no tree": ({"tree": None}, "has no rows"),
    "no root": ({"tree": [[1, "w", "w"]]}, "does not begin with a root"),
    "two roots": ({"tree": [ROOT, ROOT, [1, "w", "w"]]}, "malformed row"),
    "deep row": ({"tree": [ROOT, [2, "w", "w"]]}, r"malformed row \[2, 'w', 'w'\]"),
    "number as key": ({"tree": [ROOT, [1, 5, "w"]]}, "malformed row"),
    "short row": ({"tree": [ROOT, [1, "w"]]}, "malformed row"),
    "long row": ({"tree": [ROOT, [1, "w", ["w" * 999]]]}, r"malformed row .*\.\.\.$"),
    "key twice": ({"tree": [ROOT, [1, "w", "w"], [1, "w", "w"]]}, "key 'w' twice"),
    "unknown tensor": ({"tree": [ROOT, [1, "w", "v"]]}, "tensor 'v', which is not in the file"),
    "unused tensor": ({"tree": [ROOT]}, r"no leaf of its tree uses the tensors \['w'\]"),
    "no batch size": ({"tree": [[0, "", {}], [1, "w", "w"]]}, "no batch size"),
    "float batch size": ({"tree": [[0, "", {"batch_size": [1.0]}]]}, "no batch size"),
    "other batch size": (
        {"tree": [[0, "", {"batch_size": [3]}], [1, "w", "w"]]},
        r"'w' of shape \(1,\) does not begin with the batch size \(3,\)",
    ),
    "names as numbers": ({"tree": [[0, "", {"batch_size": [1], "names": [1]}]]}, "wrong names"),
    "too many names": ({"tree": [[0, "", {"batch_size": [1], "names": ["a", "b"]}]]}, "names"),
    "no dtypes": ({"dtypes": None}, "'dtypes' is not a map of strings"),
    "unknown dtype": ({"dtypes": {"w": "float31"}}, "'w' is said to be float31"),
    "other parts": ({"dtypes": {"w": "complex128"}}, "said to be complex128, stored as F32"),
    "dtype of nothing": ({"dtypes": {"v": "complex128"}}, "different names"),
    "no checksums": ({"crc32": {}}, "different names"),
    "checksums": ({"crc32": [1]}, "'crc32' is not a map of strings"),
    "wrong checksum": ({"crc32": {"w": "00000001"}}, r"the data of \['w'\] changed"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_file_that_contradicts_itself_is_refused_although_its_digest_is_right(path, kind):
    change, why = FORGED[kind]
    path.write_bytes(sealed({**GOOD, **change}, ONE, b"1234"))
    with pytest.raises(FileFormatError, match=why):
        TensorDict.load(path)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from([0, 1, 2, "w", "a", "F32"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


def spots(value):
    """Every place in a JSON value that can be written to."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from spots(inner)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_random_forgery_is_refused_or_read(tmp_path, data):
    path = tmp_path / "t"
    header, rest = split(sample(path))
    entries = json.loads(header)
    both = {"about": json.loads(entries.pop("__metadata__")["tdnn"]), "entries": entries}
    for _ in range(data.draw(st.integers(1, 3))):
        inside, key = data.draw(st.sampled_from(list(spots(both))))
        inside[key] = data.draw(JSON)
    if not isinstance(both["entries"], dict):
        both["entries"] = {}
    path.write_bytes(sealed(both["about"], both["entries"], rest))
    try:
        tree = TensorDict.load(path)
    except FileFormatError:
        return
    assert picture(round_trip(tree, path)) == picture(tree)


def test_the_forged_files_differ_from_a_good_one_only_in_their_fault(path):
    path.write_bytes(sealed(GOOD, ONE, b"1234"))
    assert list(TensorDict.load(path).keys()) == ["w"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version":1,"version":1}'])
def test_metadata_that_is_no_object_is_refused(path, text):
    path.write_bytes(sealed(text, ONE, b"1234"))
    with pytest.raises(FileFormatError, match=r"metadata is|header has the names"):
        TensorDict.load(path)


def test_a_header_rewritten_by_another_program_says_how_to_read_it(path):
    sample(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata)
    with pytest.raises(FileFormatError, match=r"altered after save.*load_file may still read"):
        TensorDict.load(path)


def test_a_file_of_torch_save_is_told_to_be_read_by_torch(tmp_path):
    torch.save({"0.weight": torch.ones(2)}, tmp_path / "net.pt")
    with pytest.raises(FileFormatError, match=r"read it with torch\.load; .*unflatten_keys"):
        TensorDict.load(tmp_path / "net.pt")
    tree = TensorDict(torch.load(tmp_path / "net.pt")).unflatten_keys(".")
    assert tree["0", "weight"].tolist() == [1, 1]
