"""Predictions and concept checks in JupyterLab, with mouse and keyboard."""

from __future__ import annotations

from typing import Any

from labs import change_theme, idle, open_notebook, outputs, run_cell, save_screenshots

from benchmarks.lab import command

ASK = """
import distkit as dk
many = dk.predict("How many messages does rank 0 send in a ring all-reduce over 4 ranks?")
many
"""
CHOOSE = """
ends = dk.predict("Both ranks first send and then receive, with large tensors. Does it ever \
return?", ["yes, at once", "yes, when the buffers are free", "no, it hangs forever"])
ends
"""
RUN = "many.compare(6)"
CHECK = "dk.concept_check('01_messages')"
# anywidget's timeout of 2 s expires at once, as if the widgets' scripts loaded slowly
SLOW_SCRIPTS = """
const timeout = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => timeout(ms === 2000 ? 0 : ms);
"""
HANGS = "ends.compare('no, it hangs forever')"


def test_prediction_works_when_scripts_load_slowly(lab: Any, tab: Any) -> None:
    page = tab.page
    page.add_init_script(SLOW_SCRIPTS)
    page.set_viewport_size({"width": 1280, "height": 720})
    open_notebook(lab, page, "predict.ipynb", ASK, CHOOSE, RUN, HANGS)
    for cell in (0, 1):
        run_cell(page, cell)
    forms = page.locator(".distkit-prediction")
    forms.nth(1).wait_for()
    assert "6" not in "".join(forms.all_inner_texts())
    active = "() => jupyterapp.shell.currentWidget.content.activeCellIndex"
    assert page.evaluate(active) == 1

    field = forms.nth(0).locator("input")
    field.click()
    field.press_sequentially("a lot")
    field.press("Enter")
    forms.nth(0).get_by_text("Enter a number in digits").wait_for()
    assert field.is_enabled() and field.input_value() == "a lot"
    field.fill("13")
    field.press("Enter")
    forms.nth(0).get_by_role("button", name="Change").click()
    field.fill("12 messages")
    field.press("Enter")
    forms.nth(0).get_by_text("Continue: a cell below has the answer.").wait_for()
    assert field.is_disabled() and field.input_value() == "12 messages"

    forms.nth(1).locator("input").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    forms.nth(1).get_by_text("Continue: a cell below has the answer.").wait_for()
    assert page.evaluate(active) == 1  # Shift+Enter runs the selected cell

    run_cell(page, 0)  # again: the guess is kept
    assert forms.nth(0).locator("input").input_value() == "12 messages"
    for cell in (2, 3):
        run_cell(page, cell)
    outputs(page, "twice the answer")
    forms.nth(1).locator(".dk-pass", has_text="exactly right").wait_for()
    save_screenshots(page, {"predict-lab": page})
    change_theme(page, "Dark")
    save_screenshots(page, {"predict-dark": page})
    assert tab.errors == [] and tab.external_requests == []


def test_concept_check_keeps_its_score_after_a_reload(lab: Any, tab: Any) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1280, "height": 720})
    open_notebook(lab, page, "check.ipynb", "import distkit as dk", CHECK)
    run_cell(page, 0)
    run_cell(page, 1)
    check = page.locator(".distkit-concept")
    check.get_by_text("0 of 5 questions answered").wait_for()
    for number, choice in enumerate(("rank 1", "2 ms", "the receiver", "2", "all ranks return"), 1):
        check.get_by_text(f"{number}. ").wait_for()
        check.get_by_label(choice, exact=True).check()
        page.keyboard.press("Enter")
        check.locator(".dk-note:is(.dk-pass, .dk-fail)").wait_for()
        if number < 5:
            page.keyboard.press("Enter")  # Next
    check.get_by_text("3 of 5 right").wait_for()
    save_screenshots(page, {"check-lab": page})
    command(page, "docmanager:save")
    page.reload()
    idle(page)
    check.get_by_text("3 of 5 right").wait_for()
    check.get_by_role("button", name="Try again").click()
    check.get_by_text("3 of 5 questions answered").wait_for()
    assert tab.errors == [] and tab.external_requests == []
