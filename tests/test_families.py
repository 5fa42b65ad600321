"The table of architectures says what happens."

from __future__ import annotations

import pandas as pd
import pytest
from families import TABLE, row_of
from tiny_models import one_thread  # noqa: F401 (used by every test)

ROWS = pd.read_csv(TABLE, dtype=str, keep_default_na=False).set_index("architecture")


# every 30th: families.py makes the whole table
@pytest.mark.parametrize("name", ROWS.index[ROWS["not made here"] == ""][::30])
def test_an_architecture_does_what_the_table_says(name: str):
    row = row_of(name)
    expected = ROWS.loc[name]
    for column in ("drawn by", "shared prefixes", "refused", "LoRA"):
        assert row.get(column, "") == expected[column]
    if not row["refused"]:
        assert max(row["largest gap"], row.get("LoRA gap", 0.0)) < 1e-5
