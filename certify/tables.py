"""Tables of records: CSV, Parquet and NPZ in, predictions out. A table is private data; rows are slots, in order.

A column must be numeric and finite; integers and booleans become float64 (integers beyond 2^53 are rounded).
Nothing is filled, dropped or guessed.

NPZ files come in two layouts:
  arrays:  an array `X` of shape (N, F) or (N, *shape) and optionally `y` of shape (N,) or (N, O), nothing else;
  columns: any other set of arrays, each a column of shape (N,). If a single array is picked as the features or
           as the target, it may have further axes.

Formal guarantees (a test of the same name checks each):

* Rows keep the order of the file.
* The three formats give the same table.
* Every value of a table is finite.
* Written predictions read back exactly.
"""

import csv
import difflib
import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from certify.envelope import write_atomically
from certify.errors import DataError

__all__ = ["Table", "read_table", "write_predictions"]

_Columns = dict[str, Callable[[], np.ndarray]]  # name -> reader of the column, float64 (N,) or (N, *shape)


@dataclass(frozen=True, eq=False)
class Table:
    """features: float64 (N, F) or (N, *shape); targets: float64 (N, O) or None; one name per column; source: path."""

    features: np.ndarray
    targets: np.ndarray | None
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    source: Path


def read_table(
    path: str | Path, target: str | Sequence[str] | None = None, features: Sequence[str] | None = None
) -> Table:
    """Reads the columns `target` (None: there is none) and `features` (None: all others) of a table.

    The suffix says how: .csv or .csv.gz (first line: column names), .parquet, .npz (`X` and `y`, or columns).
    Raises DataError: file, column and row (counted from 0), what was found, what is accepted.
    """
    path = Path(path)
    readers = {".csv": _csv, ".csv.gz": _csv, ".parquet": _parquet, ".npz": _npz}
    suffix = next((suffix for suffix in readers if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path}: found an unknown kind of file; the suffix must be {', '.join(readers)}")
    if not path.is_file():
        raise DataError(f"{path}: found no such file; give the path of a table")
    target = [target] if isinstance(target, str) else None if target is None else list(target)
    try:
        return _select(path, readers[suffix](path), target, None if features is None else list(features))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def write_predictions(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes `columns` (name to one-dimensional array, equal lengths) as CSV, all or nothing, mode 0600.

    Numbers are written with as many digits as give them back exactly. Raises DataError.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        found = ", ".join(f"{name}: {list(array.shape)}" for name, array in arrays.items()) or "no columns"
        raise DataError(f"{path}: found columns of shapes {found}; one-dimensional columns of one length are required")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(arrays)
    writer.writerows(zip(*(array.tolist() for array in arrays.values()), strict=True))
    try:
        write_atomically(path, text.getvalue().encode())
    except OSError as error:
        raise DataError(
            f"{path}: found that the file cannot be written ({error.strerror or error}); "
            "give a path in an existing folder that you may write to and that has room"
        ) from error


def _select(path: Path, columns: _Columns, target: list[str] | None, features: list[str] | None) -> Table:
    arrays_layout = path.name.lower().endswith(".npz") and "X" in columns
    if target is None and arrays_layout and "y" in columns:
        target = ["y"]
    wanted = target or []
    if features is None:
        features = [name for name in columns if name not in wanted]
    for kind, names in (("target", wanted), ("feature", features)):
        for i, name in enumerate(names):
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1)
                hint = f"; did you mean '{near[0]}'" if near else ""
                have = ", ".join(list(columns)[:40]) + (", ..." if len(columns) > 40 else "")
                raise DataError(f"{kind} column '{name}': missing{hint}; the file has {have}")
            if name in names[:i] or (kind == "feature" and name in wanted):
                raise DataError(f"{kind} column '{name}': found twice among features and targets; name it once")
    if not features:
        raise DataError("found no feature column; a table needs at least one besides the target")
    x, x_names = _stack(columns, features, arrays_layout)
    if not wanted:
        return Table(x, None, x_names, (), path)
    y, y_names = _stack(columns, wanted, arrays_layout)
    if len(y) != len(x):
        raise DataError(f"target: found {len(y)} rows beside {len(x)} rows of features; make them agree")
    if y.ndim > 2:
        raise DataError(f"target: found shape {list(y.shape)}; (records,) or (records, outputs) is required")
    return Table(x, y, x_names, y_names, path)


def _stack(columns: _Columns, names: list[str], arrays_layout: bool) -> tuple[np.ndarray, tuple[str, ...]]:
    """Columns side by side, (N, len(names)), with their names; or one array as it is, with numbered names."""
    arrays = [columns[name]() for name in names]
    if len(arrays) == 1:
        array = arrays[0] if arrays[0].ndim > 1 else arrays[0][:, None]
        width = int(np.prod(array.shape[1:]))
    else:
        for name, array in zip(names, arrays, strict=True):
            if array.ndim != 1 or len(array) != len(arrays[0]):
                raise DataError(
                    f"column '{name}': found shape {list(array.shape)}, with {len(arrays[0])} rows in '{names[0]}'; "
                    "columns of shape (rows,) are required, or a single array as the only feature or target"
                )
        array, width = np.stack(arrays, axis=1), len(names)
    if array.size == 0:
        raise DataError(f"found an empty table ({len(array)} rows); at least one record is required")
    if width == len(names) and not arrays_layout:
        return array, tuple(names)
    return array, tuple(f"{names[0]}[{i}]" for i in range(width))


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    """float64, contiguous; DataError at the first value that is not finite."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"column '{name}': found values of type {values.dtype}; numbers are required")
    if values.ndim == 0:
        raise DataError(f"column '{name}': found a single value; one per record is required")
    values = np.ascontiguousarray(values, dtype=np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        found = values[bad][0]
        raise DataError(f"column '{name}', row {row}: found {found}; finite numbers are required")
    return values


# --- CSV ---


def _csv(path: Path) -> _Columns:
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"found text that is not CSV in UTF-8 ({error}); save the table as CSV again") from None
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError("found an empty file; a line of column names and at least one record are required")
    header, *rows = lines
    names = [name.strip() for name in header]
    for i, name in enumerate(names):
        if not name or name in names[:i]:
            raise DataError(f"line 1, column {i}: found the name {name!r}; column names must differ and not be empty")
    if all(_is_number(name) for name in names):
        raise DataError(f"line 1: found numbers ({', '.join(names[:3])}); the first line must name the columns")
    for row, cells in enumerate(rows):
        if len(cells) != len(names):
            raise DataError(f"row {row}: found {len(cells)} cells; {len(names)} are required, as in the first line")
    return {name: lambda name=name, i=i: _parse(name, [cells[i] for cells in rows]) for i, name in enumerate(names)}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_BOOLEANS = {"true": 1.0, "false": 0.0}


def _parse(name: str, cells: list[str]) -> np.ndarray:
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        try:
            word = cell.strip().lower()
            values[row] = _BOOLEANS[word] if word in _BOOLEANS else float(word.replace("_", "x"))  # float takes 1_000
        except ValueError:
            found = "an empty cell" if not word else repr(cell if len(cell) <= 40 else cell[:37] + "...")
            raise DataError(f"column '{name}', row {row}: found {found}; numbers are required") from None
    return _finite(name, values)


# --- Parquet ---


def _parquet(path: Path) -> _Columns:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("found a Parquet file, but pyarrow is not installed; install it or convert to CSV") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"found a file that is not Parquet ({error}); save the table again") from None
    names = table.column_names
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"column '{name}': found twice; column names must differ")
    return {name: lambda name=name: _arrow(name, table.column(name)) for name in names}


def _arrow(name: str, column) -> np.ndarray:
    """float64 (N,) from a pyarrow ChunkedArray."""
    from pyarrow import float64, types

    column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"column '{name}', row {row}: found an empty cell; numbers are required")
    if types.is_decimal(kind):
        column = column.cast(float64())
    elif not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        first = repr(column[0].as_py()) if len(column) else "no value"
        raise DataError(f"column '{name}', row 0: found {first[:40]} of type {kind}; numbers are required")
    return _finite(name, column.to_numpy(zero_copy_only=False))


# --- NPZ ---


_DAMAGED = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


def _npz(path: Path) -> _Columns:
    try:
        if not zipfile.is_zipfile(path):  # np.load would take a single .npy here
            raise ValueError("no zip archive")
        with np.load(path, allow_pickle=False) as file:
            names = file.files
    except _DAMAGED as error:
        raise DataError(f"found a file that is not NPZ ({error}); write it with numpy.savez") from None
    if "X" in names and (extra := [name for name in names if name not in ("X", "y")]):
        raise DataError(f"array '{extra[0]}': found beside X; use X and y alone, or columns without an X")
    if not names:
        raise DataError("found no array; X (and y), or one array per column, is required")
    return {name: lambda name=name: _npz_array(path, name) for name in names}


def _npz_array(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as file:
            array = file[name]
    except _DAMAGED as error:
        raise DataError(f"array '{name}': found damaged data or Python objects ({error}); write numbers") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"array '{name}': found something other than a numpy array; write it with numpy.savez")
    return _finite(name, array)
