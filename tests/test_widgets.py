"""Controls: live ones follow their values, and where there is no kernel a plain view is left."""

from __future__ import annotations

import pytest

from alstlib.widgets import step_through


def test_without_a_kernel_the_first_view_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALST_STATIC", "1")
    assert step_through(lambda i: f"view {i}", 3) == "view 1"


def test_the_slider_draws_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALST_STATIC", raising=False)
    drawn: list[int] = []
    box = step_through(drawn.append, 3, "rank")
    slider, _ = box.children
    assert (slider.min, slider.max, slider.description) == (1, 3, "rank")
    slider.value = 3
    slider.value = 2
    assert drawn == [1, 3, 2]
