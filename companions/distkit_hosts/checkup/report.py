"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property

from distkit._format import count
from distkit_hosts.checkup import checks as all_checks
from distkit_hosts.checkup.facts import HERE, Check, Facts, Level

#: The longest line [columns].
WIDTH = 100


@dataclass(frozen=True)
class Report:
    """The checks of the doctor; a notebook and ``print`` show them as text.

    Args:
        facts: the facts that the checks judge.
    """

    facts: Facts

    @cached_property
    def checks(self) -> list[Check]:
        """All checks, failures first."""
        single = not self.facts.targets  # for several machines, only problems are reported
        machines = self.facts.machines.items()
        of_hosts = [c for host, m in machines for c in all_checks.of_host(host, m)]
        reported = [c for c in of_hosts if single or c.level is not Level.OK]
        order = [Level.FAILURE, Level.WARNING, Level.OK]
        checks = [*reported, *all_checks.between_hosts(self.facts)]
        return sorted(checks, key=lambda check: order.index(check.level))

    @property
    def failures(self) -> list[Check]:
        """The problems that prevent ranks from working together."""
        return [check for check in self.checks if check.level is Level.FAILURE]

    @property
    def good(self) -> bool:
        """Whether there are no failures."""
        return not self.failures

    @property
    def title(self) -> str:
        """A summary in one line."""
        hosts = len({*self.facts.targets} - {HERE})
        title = f"this machine ({self.facts.machines[HERE]['hostname']})"
        title += f" and {count(hosts, 'host')}" if hosts else ""
        levels = Counter(check.level for check in self.checks if check.level is not Level.OK)
        problems = ", ".join(count(n, str(level)) for level, n in levels.items())
        return f"{title}: {problems or 'all is well'}"

    def to_json(self) -> str:
        """Return a JSON object with ``good``, the ``checks``, and the ``facts`` that they judge."""
        checks = [asdict(check) for check in self.checks]
        content = {"good": self.good, "checks": checks, "facts": asdict(self.facts)}
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        lines = [line for check in self.checks for line in _lines(check)]
        return "\n".join([self.title, "", *lines])

    __repr__ = __str__


def _lines(check: Check) -> list[str]:
    """Return a check as a paragraph."""
    return textwrap.wrap(
        f"{check.level:<8} {check}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 11,
        break_on_hyphens=False,
        break_long_words=False,
    )
