"""Reading what training commands share: recipe, table of records, model."""

from __future__ import annotations

from pathlib import Path

from certify.errors import DataError


def read_inputs(model: Path, data: Path, recipe: Path, target: str | None, output_name: str | None):
    """(recipe, table with targets, graph); the recipe has the (public) column names of the table written out, so that
    predictions read the same columns.  ``target``: columns with commas, over the recipe's."""
    from certify.recipe import from_dict, load
    from certify.tables import read_table
    from models import read as read_model

    facts = load(recipe)
    names = [n.strip() for n in target.split(",")] if target else facts.target.names
    arrays = data.name.lower().endswith(".npz")
    if names is None and not arrays:
        raise DataError("target: no target column is given; pass --target or set target.names in the recipe")
    table = read_table(data, names, facts.features.names)
    if table.targets is None:
        raise DataError(f"{data}: holds no target; pass --target, or store an array 'y'")
    if not arrays:
        plain = facts.to_dict()
        plain["features"]["names"] = list(table.feature_names)
        plain["target"]["names"] = list(table.target_names)
        facts = from_dict(plain, "recipe")
    return facts, table, read_model(model, output=output_name)
