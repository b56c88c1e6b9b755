"""Messages between workers."""

import collections
import pickle
import re
from pathlib import Path

import pytest
import torch

import mlx_runtime
from mlx_runtime.distributed.messages import decode, encode

pytestmark = pytest.mark.pure


class TestAMessage:
    def test_is_read_as_it_was_written(self) -> None:
        value = {
            "plain": [None, True, -7, 10**30, 2.5, float("inf"), 1j, "a\ud800\n", b"\x00\xff"],
            ("a", 1): (1, (2, [])),
            3: {"within": collections.OrderedDict(b=1, a=2), "counted": collections.Counter("aab")},
            "tuple": {"tuple": [1]},
        }
        found = decode(encode(value))
        assert found == value
        assert list(map(type, found[3].values())) == [collections.OrderedDict, collections.Counter]
        assert type(found["plain"][1]) is bool

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64], ids=str
    )
    @pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)], ids=str)
    def test_has_the_bits_of_tensors(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.arange(6).reshape(2, 3).T[: shape[0] if shape else 1, : 2 if shape else 1].to(dtype)
        tensor = tensor.reshape(shape) if shape != (0, 4) else torch.empty(shape, dtype=dtype)
        before, found, after = decode(encode([b"odd", tensor, "text"]))
        assert (before, after) == (b"odd", "text")
        assert (found.dtype, found.shape) == (dtype, torch.Size(shape))
        assert encode(found) == encode(tensor)
        assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))

    MESSAGE = encode({"a": [1, torch.ones(3)]})

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            pickle.dumps({"a": 1}),
            MESSAGE[:-1],
            MESSAGE + b"x",
            MESSAGE.replace(b"float32", b"float99"),
            MESSAGE.replace(b"float32", b"vmapped"),
            MESSAGE.replace(b"[3]", b"[9]"),
            MESSAGE.replace(b"[3]", b"[x]"),
            MESSAGE.replace(b'"tensor"', b'"object"'),
            (0).to_bytes(8, "big"),
            b"\xff" * 100,
            b"\x00" * 6 + b"\x75\x30" + b"[" * 30_000,
        ],
        ids=lambda content: str(content[:40]),
    )
    def test_other_bytes_are_refused(self, content: bytes) -> None:
        with pytest.raises(ValueError, match=r".*"):
            decode(content)


def test_no_collective_of_torch_that_unpickles_is_used() -> None:
    unpickling = re.compile(r"\b(all_gather_object|gather_object|\w+_object_list|pickle\.loads\(broadcast)\b")
    package = Path(mlx_runtime.__file__).parent
    assert [file.name for file in package.rglob("*.py") if unpickling.search(file.read_text())] == []
