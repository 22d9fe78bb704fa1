"""Pages about the rules, printed by ``distkit explain`` and written by ``tools/findings``."""

from __future__ import annotations

from distkit.diagnosis.rules import RULES, Rule


def find(word: str) -> Rule | None:
    """Return the rule with this code or name, or None.

    >>> [find(word).code for word in ("dk303", "wrong_tag")]
    ['DK303', 'DK303']
    """
    by_name = {rule.name: rule for rule in RULES.values()}
    return RULES.get(word.upper()) or by_name.get(word.lower())


def page(rule: Rule) -> str:
    """Return a rule's page in Markdown, with a program of :mod:`distkit.hangs`."""
    from distkit.hangs import ALL

    title, meaning, remedy = rule.page.split("\n\n", 2)
    cases = [case for case in ALL.values() if case.kind == rule.name]
    example = ""
    if cases:
        name = cases[0].program.__name__
        call = f'`hangs.ALL["{name}"].run()` (after `from distkit import hangs`)'
        source = f"```python\n{cases[0].source}```"
        example = f"\n\n## Example\n\n{call} runs this program:\n\n{source}"
    head = f"# {rule.code} {rule.name}\n\n**{title}**"
    return f"{head}\n\n{meaning}{example}\n\n## What to do\n\n{remedy}\n"
