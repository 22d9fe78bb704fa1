"""A prediction in a real JupyterLab: guess with mouse and keys, commit, run, compare."""

from __future__ import annotations

from typing import Any

from labs import change_theme, idle, look, outputs, run_cell

from benchmarks.step import notebook

ASK = """
import distkit as dk
many = dk.predict("How many messages does rank 0 send in a ring all-reduce over 4 ranks?")
many
"""
CHOOSE = """
ends = dk.predict("Both ranks send first and receive then, with large tensors. Does it ever \
return?", ["yes, at once", "yes, when the buffers are free", "no, it hangs for ever"])
ends
"""
RUN = "many.compare(6)"
HANGS = "ends.compare('no, it hangs for ever')"


def test_guess_run_compare(lab: Any, tab: Any) -> None:
    page = tab.page
    (lab.root / "predict.ipynb").write_text(notebook(ASK, CHOOSE, RUN, HANGS))
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(lab.address("predict.ipynb"))
    idle(page)
    for cell in (0, 1):
        run_cell(page, cell)
    forms = page.locator(".distkit-prediction")
    forms.nth(1).wait_for()
    assert "6" not in "".join(forms.all_inner_texts())
    active = "() => jupyterapp.shell.currentWidget.content.activeCellIndex"
    assert page.evaluate(active) == 1

    field = forms.nth(0).locator("input")
    field.click()
    field.press_sequentially("12 messages")
    field.press("Enter")
    forms.nth(0).get_by_text("Go on: the run answers.").wait_for()
    assert field.is_disabled() and field.input_value() == "12 messages"

    forms.nth(1).locator("input").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    look(page, {"predict-choosing": forms.nth(1)})
    page.keyboard.press("Enter")
    forms.nth(1).get_by_text("Go on: the run answers.").wait_for()
    assert page.evaluate(active) == 1  # Shift+Enter runs what the reader was at

    run_cell(page, 0)  # again: the guess is still there
    assert forms.nth(0).locator("input").input_value() == "12 messages"
    for cell in (2, 3):
        run_cell(page, cell)
    outputs(page, "twice what the run says")
    forms.nth(1).locator(".dk-pass", has_text="exactly right").wait_for()
    look(page, {"predict-lab": page})
    page.set_viewport_size({"width": 600, "height": 720})
    look(page, {"predict-narrow": page})
    assert forms.evaluate_all("all => all.every(e => e.scrollWidth <= e.clientWidth)")
    change_theme(page, "Light")
    assert tab.errors == [] and tab.outside == []
