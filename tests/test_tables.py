import gzip
import os
import stat
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from certify.errors import DataError
from certify.tables import read_table, write_predictions

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {"a": [1.5, -2.0, 3e10], "b": [1, 0, 7], "c": [True, False, True]}
FORMATS = ["csv", "csv.gz", "parquet", "npz"]
fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def save(path, columns):
    """Writes `columns` in the format that the suffix of `path` names."""
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table(columns), path)
    elif path.name.endswith(".npz"):
        np.savez(path, **{name: np.array(column) for name, column in columns.items()})
    else:
        rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        text = ("\n".join(rows) + "\n").encode()
        path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def refused(path, *words, target=None, features=None):
    with pytest.raises(DataError) as info:
        read_table(path, target, features)
    message = str(info.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for word in words:
        assert word in message, message


# --- what is read ---


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_three_formats_give_the_same_table(tmp_path, suffix):
    path = save(tmp_path / f"t.{suffix}", COLUMNS)
    table = read_table(path, "b")
    np.testing.assert_array_equal(table.features, [[1.5, 1], [-2, 0], [3e10, 1]])
    np.testing.assert_array_equal(table.targets, [[1], [0], [7]])
    assert table.features.dtype == table.targets.dtype == np.float64
    assert (table.feature_names, table.target_names, table.source) == (("a", "c"), ("b",), path)
    table = read_table(str(path), ["c", "b"], ["a"])
    assert table.targets.tolist() == [[1, 1], [0, 0], [1, 7]] and table.feature_names == ("a",)
    table = read_table(path)
    assert table.targets is None and table.target_names == () and table.features.shape == (3, 3)
    assert read_table(path, features=["c", "a"]).features[0].tolist() == [1, 1.5]


@fixture
@given(
    st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1, 1)), min_size=1, max_size=8),
    st.sampled_from(FORMATS),
)
def test_rows_keep_the_order_of_the_file(tmp_path, rows, suffix):
    first, second = (list(column) for column in zip(*rows, strict=True))
    table = read_table(save(tmp_path / f"t.{suffix}", {"x": first, "y": second}), "y")
    np.testing.assert_array_equal(table.features[:, 0], first)
    np.testing.assert_array_equal(table.targets[:, 0], second)


def test_npz_with_X_and_y(tmp_path):
    path, x = tmp_path / "t.npz", np.arange(24.0).reshape(2, 3, 4)
    np.savez(path, X=x, y=np.array([1, 0]))
    for target in (None, "y", ["y"]):
        table = read_table(path, target)
        np.testing.assert_array_equal(table.features, x)
        assert table.targets.tolist() == [[1], [0]] and table.target_names == ("y[0]",)
        assert table.feature_names[:2] == ("X[0]", "X[1]") and len(table.feature_names) == 12
    np.savez(path, X=x[:, 0], y=x[:, 1, :2])
    assert read_table(path).targets.shape == (2, 2)
    np.savez(path, X=x[:, 0])
    assert read_table(path).targets is None
    np.savez_compressed(path, X=np.arange(3, dtype=np.uint8), y=np.ones(3, bool))
    assert read_table(path).features.tolist() == [[0], [1], [2]]


def test_npz_with_one_array_as_the_only_feature(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, train=np.ones((2, 3, 3)), label=np.array([1, 2]), test=np.ones((5, 3, 3)))
    table = read_table(path, "label", ["train"])
    assert table.features.shape == (2, 3, 3) and table.target_names == ("label",)
    refused(path, "column 'train'", "found shape [2, 3, 3]", "(rows,)", target="label")
    refused(path, "found 2 rows beside 5 rows", target="label", features=["test"])
    refused(path, "target: found shape [2, 3, 3]", target="train", features=["label"])


def test_csv_as_other_programs_write_it(tmp_path):
    path = tmp_path / "t.CSV"
    path.write_bytes(b'\xef\xbb\xbf"a", b\r\n"1", 2.5e1\r\nTRUE,-.5\r\n\r\n')
    table = read_table(path, "b")
    assert table.features.tolist() == [[1], [1]] and table.targets.tolist() == [[25], [-0.5]]


def test_parquet_kinds_of_numbers(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {
        "f": pa.array([1.5, 2], pa.float32()),
        "u": pa.array([1, 2], pa.uint8()),
        "d.e": [Decimal("1.25"), Decimal(2)],
        "h": pa.array([1, 2], pa.int32()).dictionary_encode(),
        "n": pa.array([0.5, 1], pa.float16()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=1)
    assert read_table(path).features.tolist() == [[1.5, 1, 1.25, 1, 0.5], [2, 2, 2, 2, 1]]
    assert read_table(path, "d.e").targets.tolist() == [[1.25], [2]]


# --- what is refused ---


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_and_repeated_columns_are_named(tmp_path, suffix):
    path = save(tmp_path / f"t.{suffix}", {"price": [1.0], "rooms": [2.0]})
    refused(path, "target column 'prize': missing; did you mean 'price'; the file has price, rooms", target="prize")
    refused(path, "target column 'zzz': missing; the file has price, rooms", target=["price", "zzz"])
    refused(path, "feature column 'x': missing", features=["rooms", "x"])
    refused(path, "feature column 'price': found twice", target="price", features=["price"])
    refused(path, "feature column 'rooms': found twice", features=["rooms", "rooms"])
    refused(path, "target column 'price': found twice", target=["price", "price"])
    refused(path, "no feature column", target=["price", "rooms"])
    refused(path, "no feature column", features=[])


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_every_value_of_a_table_is_finite(tmp_path, suffix, bad):
    path = save(tmp_path / f"t.{suffix}", {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, bad]})
    for target in (None, "a", "b"):
        refused(path, "column 'b', row 2", f"found {bad}", "finite", target=target)
    assert read_table(path, features=["a"]).features.tolist() == [[1], [2], [3]]  # a column that is not used


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_that_are_not_numeric_are_named_with_the_first_row(tmp_path, suffix):
    path = save(tmp_path / f"t.{suffix}", {"a": [1.0, 2.0], "b": ["red", "blue"]})
    refused(path, "column 'b'", "numbers are required")
    assert read_table(path, features=["a"]).features.tolist() == [[1], [2]]
    path = save(path, {"a": ["1", "2"]})
    if suffix in ("parquet", "npz"):
        refused(path, "column 'a'", "numbers are required")
    path = save(path, {"a": ["1", "red"]})
    if suffix.startswith("csv"):
        refused(path, "column 'a', row 1: found 'red'")


@pytest.mark.parametrize("suffix", FORMATS)
def test_empty_tables_are_refused(tmp_path, suffix):
    refused(save(tmp_path / f"t.{suffix}", {"a": np.zeros(0), "b": np.zeros(0)}), "empty table")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty file"),
        ("\n\n", "empty file"),
        ("a,b\n", "empty table"),
        ("a,b\n1,2\n3\n", "row 1: found 1 cells; 2 are required"),
        ("a,b\n1,2,3\n", "row 0: found 3 cells"),
        ("a,b\n1,2\n\n3,4\n", "row 1: found 0 cells"),
        ("a,a\n1,2\n", "line 1, column 1: found the name 'a'"),
        ("a, \n1,2\n", "line 1, column 1: found the name ''"),
        ("1,2\n3,4\n", "found numbers (1, 2); the first line must name the columns"),
        ("a,b\n1,\n", "column 'b', row 0: found an empty cell"),
        ("a,b\n1,1_000\n", "column 'b', row 0: found '1_000'"),
        ("a,b\n1,0x10\n", "column 'b', row 0: found '0x10'"),
        ("a;b\n1;2\n", "column 'a;b', row 0: found '1;2'"),
        ("a,b\n1,1e999\n", "column 'b', row 0: found inf"),
        ('a,b\n"1,2\n', "not CSV"),
        ("a,b\n1," + "9" * 200_000 + "\n", "not CSV"),
        ("a,b\n1," + "x" * 100 + "\n", "..."),
    ],
)
def test_malformed_csv_is_refused(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    refused(path, words)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    refused(path, words)


def test_malformed_files_are_refused(tmp_path):
    refused(tmp_path / "absent.csv", "no such file")
    refused(tmp_path / "t.xlsx", "suffix must be .csv, .csv.gz, .parquet, .npz")
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "no such file")
    for suffix, words in (("csv", "not CSV"), ("csv.gz", "not CSV"), ("parquet", "not Parquet"), ("npz", "not NPZ")):
        path = tmp_path / f"bad.{suffix}"
        path.write_bytes(b"\xff\xfe\x00garbage")
        refused(path, words)
    np.save(tmp_path / "single.npy", np.ones(3))
    os.replace(tmp_path / "single.npy", tmp_path / "single.npz")
    refused(tmp_path / "single.npz", "not NPZ")


def test_malformed_npz_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    for arrays, words in (
        ({}, "found no array"),
        ({"X": np.ones((2, 2)), "z": np.ones(2)}, "array 'z': found beside X"),
        ({"a": np.ones(2), "b": np.ones(3)}, "column 'b': found shape [3]"),
        ({"a": np.ones(2), "b": np.ones((2, 2))}, "column 'b': found shape [2, 2]"),
        ({"a": np.float64(3)}, "column 'a': found a single value"),
        ({"a": np.array([1j, 2])}, "type complex128; numbers"),
        ({"a": np.array(["2020-01-01"], "M8[D]")}, "datetime64"),
        ({"a": np.array([None, 1])}, "Python objects"),
        ({"X": np.ones((3, 2)), "y": np.ones(2)}, "found 2 rows beside 3 rows"),
        ({"X": np.ones((3, 0))}, "empty table"),
        ({"X": np.array([[1, 2], [3, np.nan]])}, "column 'X', row 1: found nan"),
    ):
        np.savez(path, **arrays)
        refused(path, words)


def test_malformed_parquet_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    for column, words in (
        (pa.array([1.0, None]), "column 'a', row 1: found an empty cell"),
        (pa.array([date(2020, 1, 1)]), "type date32"),
        (pa.array([[1.0, 2.0]]), "type list"),
        (pa.array([{"x": 1.0}]), "type struct"),
        (pa.array([b"1"]), "type binary"),
        (pa.array([None, None]), "row 0: found an empty cell"),
        (pa.array(["x"]).dictionary_encode(), "found 'x'"),
    ):
        pq.write_table(pa.table({"a": column}), path)
        refused(path, words)
    pq.write_table(pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["a", "a"]), path)
    refused(path, "column 'a': found twice")


@pytest.mark.parametrize("suffix", ["csv.gz", "parquet", "npz"])
def test_a_cut_file_is_refused(tmp_path, suffix):
    path = save(tmp_path / f"t.{suffix}", {"a": np.arange(50.0), "b": np.arange(50.0)})
    blob = path.read_bytes()
    for length in range(0, len(blob), max(1, len(blob) // 150)):
        path.write_bytes(blob[:length])
        refused(path)


# --- predictions ---


@fixture
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=10))
def test_written_predictions_read_back_exactly(tmp_path, values):
    path = tmp_path / "p.csv"
    write_predictions(path, {"row": np.arange(len(values)), "prediction, $": values})
    table = read_table(path, "prediction, $")
    np.testing.assert_array_equal(table.targets[:, 0], values)
    np.testing.assert_array_equal(table.features[:, 0], np.arange(len(values)))


def test_predictions_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "p.csv"
    write_predictions(path, {"p": np.array([1.5, 2.0], np.float32), "label": np.array(["x", "y"])})
    assert path.read_text() == "p,label\n1.5,x\n2.0,y\n" and stat.S_IMODE(path.stat().st_mode) == 0o600
    for columns in ({}, {"p": 3.0}, {"p": np.ones(2), "q": np.ones(3)}, {"p": np.ones((2, 2))}):
        with pytest.raises(DataError, match="one-dimensional columns of one length"):
            write_predictions(path, columns)
    with pytest.raises(DataError, match="absent/p.csv: found that the file cannot be written"):
        write_predictions(tmp_path / "absent" / "p.csv", {"p": [1.0]})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match="No space left"):
        write_predictions(path, {"p": [9.0]})
    assert path.read_text().startswith("p,label") and os.listdir(tmp_path) == ["p.csv"]


def test_reading_csv_loads_neither_pandas_nor_pyarrow(tmp_path):
    path = save(tmp_path / "t.csv", COLUMNS)
    code = f"import sys; from certify.tables import read_table; read_table({str(path)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"pandas", "pyarrow"} & set(done.stdout.split())
