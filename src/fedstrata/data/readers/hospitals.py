"""Medical tables: heart disease in four hospitals, and diabetes and breast cancer, which come with scikit-learn."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.cells import is_missing
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import (
    check_md5,
    damaged_error,
    data_folder,
    find_archives,
    gather_first,
    has_file,
    incomplete_error,
    missing_error,
)
from fedstrata.data.readers.build import UNVERIFIED, join_notes
from fedstrata.data.tables import Standardise, Table, TableOptions, table_dataset

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Switzerland", "va": "Long Beach"}
"""Name of a file's middle part → where the patients were."""
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal"),
)
KEPT_IF_COMPLETE = 10
"""Columns that most hospitals have filled in; the last three are mostly missing in three of the four."""
_SUMS = {
    "processed.cleveland.data": "2d91a8ff69cfd9616aa47b59d6f843db",
    "processed.hungarian.data": "22e96bee155b5973568101c93b3705f6",
    "processed.switzerland.data": "9a87f7577310b3917730d06ba9349e20",
    "processed.va.data": "4249d03ca7711e84f4444768c9426170",
}
_LIMIT = 1 << 20


def heart_disease(
    data_dir: Path | None,
    *,
    complete: bool = False,
    standardise: Standardise = "federation",
    test: float = 0.33,
    seed: int = 0,
    verify: bool = True,
) -> Dataset:
    """Heart disease, yes or no, of 920 patients in four real hospitals, each a natural client (UCI, 1988).

    cp, restecg, slope and thal are categories. Missing values, of which three hospitals have many, are at the mean,
    with an indicator each. The target is 0 (no disease) against 1 to 4.

    Args:
        data_dir: holds processed.cleveland.data, processed.hungarian.data, processed.switzerland.data and
            processed.va.data, in a folder or an archive.
        complete: leave out slope, ca and thal, and every patient for whom another value is missing: 740 patients, as in
            FLamby's Fed-Heart-Disease (du Terrail et al., NeurIPS 2022).
        standardise: numbers to mean 0 and deviation 1 over the `federation`, per `client`, or not at all.
        test: share of each hospital's patients that is held out, the same share of sick and healthy ones.
        seed: of this choice.
        verify: compare the files with upstream's md5 sums.
    """
    rows = _heart_rows(data_dir, verify)
    names: tuple[str, ...] = COLUMNS
    if complete:
        names = COLUMNS[:KEPT_IF_COMPLETE]
        rows = [(place, row) for place, row in rows if not any(map(is_missing, row[:KEPT_IF_COMPLETE]))]
    columns = {name: [row[at] for _, row in rows] for at, name in enumerate(names)}
    columns["disease"] = ["no" if float(row[-1]) == 0 else "yes" for _, row in rows]
    categories = tuple(name for name in ("cp", "restecg", "slope", "thal") if name in columns)
    options = TableOptions("disease", categories, standardise, test, seed, "binary")
    table = Table(columns, [place for place, _ in rows])
    note = join_notes(f"{len(rows)} patients of {len(HOSPITALS)} hospitals", "" if verify else UNVERIFIED)
    return table_dataset("heart-disease", table, options, note)


def _heart_rows(data_dir: Path | None, verify: bool) -> list[tuple[str, list[str]]]:
    """(hospital, the cells of a patient), as the files have them."""
    name = "heart-disease"
    folder = data_folder(name, data_dir)
    archives = find_archives(folder, has_file(*_SUMS), re.compile(r"heart[-_+]?disease"))
    found = gather_first(archives, re.compile(r"(^|/)processed\.[a-z]+\.data$"), _LIMIT)
    if found is None:
        raise missing_error(name, folder, "processed.cleveland.data and three more")
    archive, files = found
    rows: list[tuple[str, list[str]]] = []
    for file, known in _SUMS.items():
        if file not in files:
            raise incomplete_error(name, archive, file)
        if verify:
            check_md5(name, archive.where(file), files[file], {known})
        place = HOSPITALS[file.split(".")[1]]
        for cells in csv.reader(io.StringIO(files[file].decode("ascii", "replace"))):
            if len(cells) != len(COLUMNS) + 1:
                raise damaged_error(archive.where(file), f"a row has {len(cells)} columns, not {len(COLUMNS) + 1}")
            rows.append((place, cells))
    return rows


def diabetes(
    data_dir: Path | None,
    *,
    standardise: Standardise = "federation",
    scale: float = 100.0,
    test: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Progress of diabetes after a year, a number, from ten measures of 442 patients; needs no files.

    Comes with scikit-learn (Efron et al., 2004).

    The target is divided by `scale`: upstream's numbers from 25 to 346 would need a tiny learning rate. Examples are
    dealt out by tenths of the target where a partition wants classes.

    Args:
        data_dir: not needed.
        standardise: numbers to mean 0 and deviation 1 over the `federation`, per `client`, or not at all.
        scale: of the target.
        test: share of the patients that is held out.
        seed: of this choice.
    """
    from sklearn.datasets import load_diabetes

    return _embedded("diabetes", load_diabetes(scaled=False), "progress", scale, "regression", standardise, test, seed)


def breast_cancer(
    data_dir: Path | None, *, standardise: Standardise = "federation", test: float = 0.2, seed: int = 0
) -> Dataset:
    """Breast tumours, benign or malignant, from thirty measures of 569 patients; needs no files.

    Comes with scikit-learn (Wolberg, Mangasarian and Street, Wisconsin, 1995).

    Args:
        data_dir: not needed.
        standardise: numbers to mean 0 and deviation 1 over the `federation`, per `client`, or not at all.
        test: share of the patients that is held out.
        seed: of this choice.
    """
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    found.target = 1 - found.target  # upstream's 0 is malignant; yes is the one to be found
    return _embedded("breast-cancer", found, "malignant", 1.0, "binary", standardise, test, seed)


def _embedded(
    name: str, found: Any, target: str, scale: float, task: str, standardise: Standardise, test: float, seed: int
) -> Dataset:
    """A table that comes with scikit-learn."""
    columns = {str(n): [repr(float(v)) for v in found.data[:, at]] for at, n in enumerate(found.feature_names)}
    columns[target] = [f"{value:g}" for value in np.asarray(found.target, dtype=np.float64) / scale]
    table = Table(columns, [""] * len(found.target))
    return table_dataset(name, table, TableOptions(target, (), standardise, test, seed, task))
