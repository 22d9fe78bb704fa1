"""A view on a page without a kernel, with a fake model."""

import base64
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "test-results"

#: Script that waits until all views are drawn. Views draw in the next frame. After a resize, a view
#: is notified in one frame and draws in the next. New colors are animated; endless animations, such
#: as a pulse, are ignored.
SETTLED = """async () => {
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    await frame();
    await frame();
    const finite = document.getAnimations()
        .filter((a) => a.effect.getComputedTiming().endTime !== Infinity);
    if (!finite.length) return;
    await Promise.all(finite.map((a) => a.finished.catch(() => {})));
    await frame();
    await frame();
}"""

PAGE = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<style>%s</style><p id="before" tabindex="0">before</p><div id="at"></div>
<script type="module">%s
const state = %s, on = [];
const model = {get: (k) => state[k], on: (k, f) => on.push([k, f]),
  off: (k, f) => on.splice(on.findIndex((one) => one[1] === f), 1)};
const notify = (name) => { for (const [k, f] of on) if (k.split(":")[0] === name) f(); };
window.feed = (delta) => { Object.assign(state, delta); notify("change"); };
window.lose = () => notify("comm_live_update");
window.dispose = view.render({model, el: document.getElementById("at")});
window.listeners = () => on.length;
window.leaked = [];
document.addEventListener("keydown", (e) => leaked.push(e.key));
</script>"""


def to_base64(data: bytes) -> str:
    """Encode an array as text, for a page without a kernel."""
    return base64.b64encode(data).decode("ascii")


def settle(page: Any) -> None:
    """Wait until all pending drawing is done."""
    page.evaluate(SETTLED)


class Sheet:
    """A view in the browser."""

    def __init__(self, tab: Any, view: Any, path: Path) -> None:
        self.tab, self.page, self.view = tab, tab.page, view
        state = view.get_state("picture")
        name = state["picture"].get("view") or type(view).__name__.lower()
        script = view._esm.replace("export default", "const view =")
        encoded = json.dumps(state, allow_nan=False, default=to_base64)
        text = PAGE % (view._css, script, encoded.replace("<", "\\u003c"))
        path.write_text(text, encoding="utf-8")
        self.page.goto(path.as_uri())
        self._root = self.page.locator(f"#at .distkit-{name}[data-drawn]")
        self._root.wait_for()

    @property
    def root(self) -> Any:
        """The view, once all pending drawing is done."""
        settle(self.page)
        return self._root

    def refresh(self, trace: Any, live: bool = False) -> None:
        """Update the view with a trace, and wait until it is drawn."""
        self.view._process(trace, live)
        state = json.dumps(self.view.get_state("picture"), default=to_base64)
        self.wait_until_drawn(lambda: self.page.evaluate("state => feed(JSON.parse(state))", state))

    def wait_until_drawn(self, action: Any) -> None:
        """Perform an action and wait until its effect is drawn."""
        before = self.root.get_attribute("data-drawn")
        action()
        self.page.wait_for_function(
            "n => document.querySelector('#at figure').dataset.drawn !== n", arg=before
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.wait_until_drawn(lambda key=key: self.page.keyboard.press(key))

    def text(self, selector: str) -> str:
        return str(self.root.locator(selector).first.inner_text())

    def texts(self, selector: str) -> list[str]:
        return list(self.root.locator(selector).all_inner_texts())

    def is_drawn(self, selector: str) -> bool:
        """Return whether a canvas has more than one color."""
        return bool(
            self.root.locator(selector).first.evaluate(
                """c => new Set(new Uint32Array(
                c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 1"""
            )
        )

    def save_screenshots(self, name: str) -> None:
        """Save screenshots in both themes, wide and narrow."""
        RESULTS.mkdir(exist_ok=True)
        for theme in ("light", "dark"):
            for width in (1200, 760):
                self.page.set_viewport_size({"width": width, "height": 900})
                self.page.emulate_media(color_scheme=theme)
                settle(self.page)
                self.page.screenshot(path=RESULTS / f"{name}-{theme}-{width}.png", full_page=True)

    def assert_clean(self) -> None:
        """Assert that there were no errors or external requests, and that disposal is complete."""
        assert self.tab.errors == [] and self.tab.external_requests == []
        self.page.evaluate("dispose()")
        assert self.page.evaluate("listeners()") == 0
        assert self.page.locator("#at figure").count() == 0
