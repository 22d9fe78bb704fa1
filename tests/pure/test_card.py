"""The status card of a cluster."""

from distkit.cluster.card import Status
from distkit.views.scene.theme import GRAY


def card(**devices: str) -> str:
    """Return the HTML of a card with these processes."""
    rows = [(name, "alpha", 7, device, "idle") for name, device in devices.items()]
    return Status("2 ranks", "ready", "gloo on CPU", rows)._repr_html_()


def test_card_names_devices_unless_all_are_the_cpu_and_has_a_gray_scheduler() -> None:
    assert "cpu" not in (alike := card(a="cpu", scheduler="cpu")) and f"--light:{GRAY}" in alike
    assert "<span>cuda:0</span>" in (mixed := card(a="cpu", b="cuda:0")) and GRAY not in mixed
    assert alike.count('title="pid 7"') == mixed.count('title="pid 7"') == 2
