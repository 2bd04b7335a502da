"""What papers state beside what is predicted: committed, reproduced, and explained where it is off."""

import json

import papers
import pytest

from alstlib.base.config import PAPER_ROWS

COMMITTED = json.loads(papers.FILE.read_text())
TABLES = COMMITTED["tables"]


@pytest.mark.simulates
def test_what_is_committed_is_what_comes_out():
    assert COMMITTED["mode"] == "predicted"
    again = papers.everything()
    assert list(again) == list(TABLES)
    for name, rows in again.items():
        for one, other in zip(rows, TABLES[name], strict=True):
            assert (one["row"], one.get("why")) == (other["row"], other.get("why"))
            assert one["predicted"] == pytest.approx(other["predicted"], rel=1e-6)


def test_every_row_of_table_1_is_there_and_large_errors_are_explained():
    """At the length that the paper reached, its stack must fit by our account too."""
    rows = TABLES["ALST, Table 1"]
    assert [r["row"] for r in rows] == list(PAPER_ROWS)
    for r in rows:
        assert r["predicted"] >= 0.95 * r["stated"], r
    for r in [*rows, *TABLES["ALST, Tables 2 to 4"]]:
        assert r["why"] or abs(r["error"]) <= 0.1, r


def test_the_page_shows_every_published_length_and_why_a_limit_is_far_off():
    rows = TABLES["Published lengths"]
    page = papers.PAGE.read_text().partition("<!-- published -->\n")[2]
    assert page.partition("\n<!-- /published -->")[0] == papers.published_markdown(rows)
    names = " ".join(r["row"] for r in rows)
    assert all(who in names for who in ("ALST", "TRL", "UPipe", "SuperOffload", "FPDT", "OOMB"))
    assert len({(r["row"], r["stated"]) for r in rows}) == len(rows)
    for r in rows:
        assert r["stated"] > 0 < r["predicted"]
        if (own := r.get("own")) and r.get("kind") != "point" and abs(own["error"]) > 0.15:
            assert r.get("why") or own["why"], r["row"]
