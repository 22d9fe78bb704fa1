"""Rules for the kinds of mistakes that a diagnosis finds, read from ``rules.md``.

To add a kind, add a section there, and return ``rules.NAME.finding(…)`` where the mistake is
detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distkit.diagnosis.findings import Finding, fill, lines_of
from distkit.events import Span

#: Codes of the rules about matched calls that differ.
MISMATCHES = frozenset("DK201 DK202 DK203 DK204 DK205 DK206 DK306".split())

#: Remedies for a process that has exited, by text in the cause.
ENDINGS = {
    "dk.inject_faults": "To run without the fault, run it outside the dk.inject_faults block.",
    "gloo": "It received more data than its tensor holds: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "If memory ran out, use smaller batches or fewer ranks. Otherwise find the call or "
    "the command that sent the signal, such as os.kill.",
    "SIGSEGV": "It crashed in native code: check the arguments of its last call.",
    "exit status": "Look for a call to os._exit, including in libraries, and raise an exception "
    "instead.",
}

#: Matches the heading of a section: its code, its name, and the section that it extends.
_HEADING = re.compile(r"^##? (DK\d{3})? ?(\w+)(?: \((\w+)\))?\n+", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Rule:
    """A kind of mistake, with its code, name, page, and the templates of its sentences."""

    code: str
    name: str
    page: str
    message: str
    remedy: str
    #: The templates of all sentences, by name.
    sentences: Mapping[str, str]

    @property
    def desynchronizes(self) -> bool:
        """Whether later collectives of the ranks no longer match."""
        return "desynchronizes" in self.sentences

    def title(self) -> str:
        """Return the first line of the page."""
        return self.page.partition("\n")[0]

    def fill(self, name: str, **values: object) -> str:
        """Fill the template of one of the rule's sentences."""
        return fill(self.sentences[name], **values)

    def finding(
        self,
        *spans: Span,
        message: str = "",
        remedy: str = "",
        culprits: Iterable[int] = (),
        waiting: Iterable[int] = (),
        missing: Iterable[int] = (),
        hang: bool = False,
        lines: Mapping[int, str] | None = None,
        **values: object,
    ) -> Finding:
        """Return a finding of this kind.

        Args:
            spans: the operations whose lines the finding names.
            message: a template that replaces the rule's message.
            remedy: a sentence that replaces the rule's remedy.
            culprits: see :class:`Finding`.
            waiting: see :class:`Finding`.
            missing: see :class:`Finding`.
            hang: see :class:`Finding`.
            lines: the line of each rank, instead of the lines of ``spans``.
            values: values for the placeholders of the rule's templates.
        """
        return Finding(
            self,
            fill(message or self.message, **values),
            remedy or fill(self.remedy, **values),
            tuple(culprits),
            tuple(waiting),
            tuple(missing),
            dict(lines_of(*spans) if lines is None else lines),
            hang,
        )


def _read(text: str) -> dict[str, Rule]:
    """Return the rules in the text of ``rules.md``, by name."""
    rules: dict[str, Rule] = {}
    _, *parts = _HEADING.split(text)
    for code, name, base_name, body in zip(*[iter(parts)] * 4, strict=True):
        templates, _, page = body.strip().partition("\n\n")
        lines = (line[2:].partition(": ") for line in templates.splitlines())
        sentences = {key: value.strip('"') for key, _, value in lines}
        base = rules.get(base_name, Rule("", "", "", "", "", {}))
        sentences = {"message": "", "remedy": "", **base.sentences, **sentences}
        rules[name] = Rule(
            code or base.code,
            name if code else base.name or name,
            page or base.page,
            sentences["message"],
            sentences["remedy"],
            sentences,
        )
    return rules


_BY_NAME = _read(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))

#: Every kind of mistake, by its code.
RULES = {rule.code: rule for name, rule in _BY_NAME.items() if rule.code and rule.name == name}


def __getattr__(name: str) -> Rule:
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise AttributeError(f"no rule {name!r}")
