"""Points of .off and .ply files: written here by hand, read back."""

import struct

import numpy as np
import pytest

from modeling_itnet import ITNetPointCloudProcessor
from modeling_itnet.processing import read_points

POINTS = np.array([[0, 0, 0], [1.5, -2, 0.25], [3, 4, 5e-3]])
TEXT = "0 0 0\n1.5 -2 0.25\n3 4 5e-3\n"
HEADER = """ply
format {kind} 1.0
comment by hand
element vertex 3
property {type} x
property uchar red
property {type} y
property {type} z
element face 1
property list uchar int vertex_indices
end_header
"""


def binary(order, code):
    body = b"".join(struct.pack(f"{order}{code}B{code}{code}", x, 7, y, z) for x, y, z in POINTS)
    return body + struct.pack(f"{order}Biii", 3, 0, 1, 2)


FILES = {
    "plain.off": f"OFF\n3 1 0\n{TEXT}3 0 1 2\n".encode(),
    "modelnet.off": f"OFF3 1 0\n{TEXT}3 0 1 2\n".encode(),
    "comments.OFF": f"OFF # a shape\n# and more\n3 1 0\n\n{TEXT}".encode(),
    "text.ply": (HEADER.format(kind="ascii", type="float") + "0 7 0 0\n1.5 7 -2 0.25\n3 7 4 5e-3\n3 0 1 2\n").encode(),
    "little.ply": HEADER.format(kind="binary_little_endian", type="float").encode() + binary("<", "f"),
    "big.ply": HEADER.format(kind="binary_big_endian", type="double").encode() + binary(">", "d"),
    "windows.ply": HEADER.format(kind="binary_little_endian", type="double").replace("\n", "\r\n").encode()
    + binary("<", "d"),
}


@pytest.mark.parametrize("name", FILES)
def test_reading(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    points = read_points(path)
    np.testing.assert_allclose(points, POINTS, rtol=1e-7)  # float32 in some of the files
    assert ITNetPointCloudProcessor(do_normalize=False)(points)["points"].shape == (1, 3, 3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xyz", b"1 2 3", r"suffix '.xyz'; points are read from \.off, \.ply files"),
        ("a.off", b"", "is no readable off file"),
        ("a.off", b"OFF\n3 1 0\n1 2 3\n", "3 vertices are announced"),
        ("a.off", b"COFF\n1 0 0\n1 2 3 4\n", "does not start with OFF"),
        ("a.off", b"OFF\n0 0 0\n", "at least one vertex"),
        ("a.ply", b"nothing", "does not start with ply"),
        ("a.ply", FILES["little.ply"][:-60], "is no readable ply file"),
        ("a.ply", FILES["text.ply"].replace(b"float y", b"float w"), "'y' is not in list"),
        ("a.ply", FILES["text.ply"].replace(b"ascii", b"zip"), "its format is 'zip'"),
        ("a.ply", FILES["text.ply"].replace(b"1.5", b"nan"), "all of them finite"),
    ],
)
def test_files_that_hold_no_points(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_points(path)
    assert str(path) in str(error.value)
