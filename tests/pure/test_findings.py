"""Rules: codes, sentences, pages, and the output of ``distkit explain``."""

from __future__ import annotations

import ast
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from distkit import cli
from distkit.diagnosis import rules
from distkit.diagnosis.rules import RULES, Rule
from distkit_examples import hangs

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "findings"


def strings(file: Path) -> Iterator[str]:
    """Return the string constants in a file; f-strings are split."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_docs_have_a_page_for_each_rule() -> None:
    generated = runpy.run_path(str(ROOT / "tools" / "findings"))["pages"]()
    committed = {file.name: file.read_text(encoding="utf-8") for file in PAGES.iterdir()}
    assert generated == committed, "run tools/findings"


@pytest.mark.parametrize("rule", RULES.values())
def test_rule_has_a_code_a_name_and_a_page(rule: Rule) -> None:
    assert re.fullmatch(r"DK[1-69]\d\d", rule.code)
    assert re.fullmatch("[a-z_]+", rule.name)
    assert rule.title().endswith(".") and rule.message
    page = hangs.page(rule)
    assert page.startswith(f"# {rule.code} {rule.name}\n\n**{rule.title()}**")
    assert "```" in page.partition("## What to do")[2]


def test_names_and_titles_are_unique() -> None:
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    assert len({rule.title() for rule in RULES.values()}) == len(RULES)


def test_rule_sentences_are_unique_in_the_package() -> None:
    files = [f for folder in ("distkit", "companions") for f in ROOT.joinpath(folder).rglob("*.py")]
    counts = Counter(s for file in files if "content" not in file.parts for s in strings(file))
    rule_sentences = {s for rule in RULES.values() for s in rule.sentences.values() if len(s) > 25}
    assert not rule_sentences & {*counts}


@pytest.mark.parametrize("word", ["DK303", "dk303", "wrong_tag"])
def test_explain_prints_the_page(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", word]) == 0
    output = capsys.readouterr().out
    assert "DK303 wrong_tag" in output and rules.wrong_tag.title() in output
    assert "dist.recv(torch.zeros(3), src=0, tag=2)" in output


def test_explain_lists_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert all(f"{rule.code} {rule.name} {rule.title()}" in output for rule in RULES.values())


def test_explain_of_an_unknown_code_refers_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "DK999"]) == 1
    assert capsys.readouterr().err == (
        "distkit: unknown finding DK999. List all with: distkit explain\n"
    )
