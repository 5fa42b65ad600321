"The table that its reader sorts, searches and filters, on a separate page: no kernel, no notebook."

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from rl_notebook.views.charts import asset, module

from .hostile import BAD, HARM, HARMLESS

COLUMNS = [
    {"name": "group", "label": "group", "kind": "number", "filter": "="},
    {"name": "reward", "label": "reward", "kind": "number", "filter": ">0"},
    {"name": "advantage", "label": "advantage", "kind": "bar", "format": "+.3f"},
    {"name": "text", "label": "completion", "kind": "text", "filter": "contains", "opens": True},
]
ROWS = [
    {"id": "a", "group": 0, "reward": 0.5, "advantage": -0.25, "text": "ten apples"},
    {"id": "b", "group": 0, "reward": None, "advantage": None, "text": "nine Apples"},
    {"id": "c", "group": 1, "reward": 1, "advantage": 1, "text": "two pears"},
    {
        "id": "d",
        "group": 1,
        "reward": -2,
        "advantage": 0,
        "text": "x" * 300 + " far away\nand below",
    },
    {"id": "e", "group": 1, "reward": 0.5, "advantage": -1e-9, "text": "10 pears"},
]
SCRIPT = """
const heard = (window.heard = { opened: [], view: null });
const options = { label: "rows", size: 3, open: (row) => heard.opened.push(row.id), changed: (v) => (heard.view = v) };
window.table = makeTable({ ...options, ...OPTIONS });
document.body.append(table.element);
table.draw({ title: "Fruit", columns: COLUMNS, rows: ROWS });
"""


@pytest.fixture
def show(open_page: Callable[..., Page], tmp_path: Path) -> Callable[..., Locator]:
    "A page with a table of these rows."

    def show_table(
        rows: object = ROWS, columns: object = COLUMNS, width: int = 1280, **options: object
    ) -> Locator:
        constants = "".join(
            f"const {name} = {json.dumps(value)};\n"
            for name, value in {"ROWS": rows, "COLUMNS": columns, "OPTIONS": options}.items()
        ).replace("<", "\\u003c")
        code = "\n".join([module("table.js").replace("export ", ""), constants, SCRIPT])
        page = tmp_path / "table.html"
        style = asset("table.css")
        page.write_text(
            f"<!doctype html><meta charset=utf-8><style>{style}</style><body><script>{code}</script>"
        )
        return open_page(page, width).locator(".rltable")

    return show_table


def texts(table: Locator, column: int = 3) -> list[str]:
    "What the rows of the page say in a column."
    return [
        row.locator("td").nth(column).inner_text().strip()
        for row in table.locator("tbody tr").all()
    ]


def ids(table: Locator) -> list[str]:
    "The rows of the page."
    return [row.get_attribute("data-id") for row in table.locator("tbody tr").all()]


def all_ids(table: Locator) -> list[str]:
    "The rows of all pages."
    results = ids(table)
    on = table.get_by_role("button", name="Next")
    while on.count() and on.is_enabled():
        on.click()
        results += ids(table)
    return results


def sort_by(table: Locator, label: str) -> None:
    "A click on the head of a column."
    table.get_by_role("button", name=label).click()


ORDERS = {  # of a column: up and down
    "group": ("abcde", "cdeab"),
    "reward": (
        "daecb",
        "caedb",
    ),  # what has no number is last, whichever way; equal ones stay in their order
    "advantage": ("aedcb", "cdeab"),
    "completion": ("ebacd", "dcabe"),  # numbers in a text by their value
}


def test_every_column_sorts_both_ways(show: Callable[..., Locator]):
    table = show(size=9)
    assert "".join(ids(table)) == "abcde"
    for label, orders in ORDERS.items():
        head = table.locator("th", has_text=label)
        expect(head).to_have_attribute("aria-sort", "none")
        for order, direction in zip(orders, ("ascending", "descending"), strict=True):
            sort_by(table, label)
            assert "".join(ids(table)) == order, (label, direction)
            expect(head).to_have_attribute("aria-sort", direction)
            expect(table.locator("th[aria-sort=none]")).to_have_count(3)


FILTERS = [
    ("reward", "0.5", "ae"),
    ("reward", "=.5", "ae"),
    ("reward", " > 0.5 ", "c"),
    ("reward", "<= -2", "d"),
    ("reward", "-3..0.5", "ade"),
    ("reward", ">=0", "ace"),  # what has no number fits nothing
    ("reward", "5e-1", "ae"),
    ("completion", "APPLES", "ab"),
    ("completion", "below", "d"),  # the whole text, not its beginning
]


def test_filters_read_what_one_types(show: Callable[..., Locator]):
    table = show()
    for column, wanted, matches in FILTERS:
        field = table.get_by_label(f"Filter by {column}")
        field.fill(wanted)
        assert "".join(all_ids(table)) == matches, wanted
        expect(table.get_by_role("status")).to_contain_text(f"{len(matches)} of 5 rows")
        field.fill("")


def test_a_filter_that_cannot_be_read_hides_nothing_and_says_so(show: Callable[..., Locator]):
    table = show()
    field = table.get_by_label("Filter by reward")
    field.fill("good")
    assert len(all_ids(table)) == 5
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_attribute("title", '"good" is none of: 1, >0.5, <=12, 3..7')
    field.fill("1")
    expect(field).to_have_attribute("aria-invalid", "false")


def test_a_search_looks_in_every_column_and_shows_its_matches(show: Callable[..., Locator]):
    table = show()
    search = table.get_by_label("Search rows")
    search.fill("PEARS")
    assert ids(table) == ["c", "e"]
    search.fill("+1.000")
    assert ids(table) == ["c"]
    search.fill("far away")
    assert texts(table)[0].endswith("far away ⏎ and below")
    search.fill("nowhere")
    assert ids(table) == []
    expect(table.get_by_role("status")).to_have_text("0 of 5 rows")


def test_pages(show: Callable[..., Locator]):
    table = show()
    expect(table.get_by_role("status")).to_have_text("5 rows, page 1 of 2")
    expect(table.get_by_role("button", name="Back")).to_be_disabled()
    table.get_by_role("button", name="Next").click()
    assert ids(table) == ["d", "e"]
    sort_by(table, "reward")  # which begins at the first page again
    assert ids(table) == ["d", "a", "e"]
    table.get_by_role("button", name="Next").click()
    table.get_by_label("Filter by reward").fill("<0.7")
    expect(table.get_by_role("status")).to_have_text("3 of 5 rows")
    expect(table.get_by_role("button", name="Next")).to_have_count(0)


def test_it_is_used_by_keyboard(show: Callable[..., Locator]):
    table = show()
    page, keyboard = table.page, table.page.keyboard
    table.get_by_label("Search rows").focus()
    reached = []
    for _ in range(9):
        keyboard.press("Tab")
        reached.append(
            page.evaluate("() => document.activeElement.ariaLabel ?? document.activeElement.title")
        )
    assert reached[:4] == [
        "Sort by group",
        "Sort by reward",
        "Sort by advantage",
        "Sort by completion",
    ]
    assert reached[4:7] == ["Filter by group", "Filter by reward", "Filter by completion"]
    table.get_by_role("button", name="reward").focus()
    keyboard.press("Enter")
    keyboard.press("Space")
    assert ids(table) == ["c", "a", "e"]
    table.locator("tbody button").nth(1).focus()
    keyboard.press("Enter")
    assert page.evaluate("heard.opened") == ["a"]
    page.evaluate("rows => table.draw({ columns: COLUMNS, rows })", ROWS[:2])
    # the focus stays on its row
    assert page.evaluate("document.activeElement.closest('tr').dataset.id") == "a"


def test_new_rows_leave_what_the_reader_has_chosen(show: Callable[..., Locator]):
    table = show()
    page = table.page
    table.get_by_label("Search rows").fill("e")
    table.get_by_label("Filter by reward").fill(">0")
    sort_by(table, "reward")
    page.evaluate("table.select('c')")
    more = [*ROWS, {"id": "f", "group": 2, "reward": 0.1, "advantage": 3, "text": "seven"}]
    page.evaluate("rows => table.draw({ title: 'Next', columns: COLUMNS, rows })", more)
    assert "".join(all_ids(table)) == "faec"
    expect(table.locator("h4")).to_have_text("Next")
    expect(table.get_by_label("Search rows")).to_have_value("e")
    expect(table.get_by_label("Filter by reward")).to_have_value(">0")
    expect(table.locator("tr[aria-current]")).to_have_attribute("data-id", "c")
    view = page.evaluate("heard.view")
    again = show(view=view)
    assert "".join(all_ids(again)) == "aec"
    expect(again.get_by_label("Search rows")).to_have_value("e")
    again.page.evaluate("table.select('b', true)")  # past what hides it
    expect(again.locator("tr[aria-current]")).to_have_attribute("data-id", "b")
    expect(again.get_by_label("Search rows")).to_have_value("")


def test_cells_that_say_the_same_are_one(show: Callable[..., Locator]):
    columns = [
        COLUMNS[0] | {"merge": ["group"]},
        {"name": "text", "label": "text", "kind": "block"},
    ]
    table = show(columns=columns, size=4)
    assert [c.get_attribute("rowspan") for c in table.locator("td[rowspan]").all()] == ["2", "2"]
    assert [row.locator("td").count() for row in table.locator("tbody tr").all()] == [2, 1, 2, 1]
    sort_by(table, "text")
    assert [c.get_attribute("rowspan") for c in table.locator("td[rowspan]").all()] == [
        "1",
        "2",
        "1",
    ]


def test_text_of_a_model_is_never_markup_and_invisible_characters_get_a_mark(
    show: Callable[..., Locator],
):
    odd = " a\n\tb\u202e\x1b[31m  "
    rows = [
        {"id": "1", "text": BAD, "whole": odd},
        {"id": "2", "text": odd, "whole": BAD},
        {"id": "3", "text": "", "whole": "  "},
    ]
    columns = [
        {"name": "text", "label": "text", "kind": "text", "opens": True, "filter": "contains"},
        {"name": "whole", "label": "whole", "kind": "block"},
    ]
    table = show(rows, columns)
    assert table.page.evaluate(HARM) == HARMLESS
    table.get_by_label("Search rows").fill("<script")
    assert table.page.evaluate(HARM) == HARMLESS
    table.get_by_label("Search rows").fill("")
    whole = table.locator("tbody tr").first.locator(".rltable-block")
    assert whole.text_content() == "·a↵\n⇥\tb\\u202e\\u001b[31m··"
    assert table.locator("tbody tr").nth(2).locator(".rltable-block").text_content() == "··"
    assert (
        table.locator("tbody tr").nth(1).locator("button").text_content()
        == " a ⏎ b\\u202e\\u001b[31m  "
    )
