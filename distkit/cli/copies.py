"""The learner's copies of the notebooks: the checkout's own stay as they are, and theirs, too."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

#: The copies' folder in the checkout, which git ignores, and what it knows of their originals.
FOLDER, RECORD = "my-notebooks", ".originals.json"


def copies(checkout: Path) -> tuple[Path, list[str]]:
    """Bring the copies up to date; their folder, and those that are older than their originals.

    A copy that its reader has changed, if only by running it, is never touched.
    """
    folder = checkout / FOLDER
    folder.mkdir(exist_ok=True)
    record = folder / RECORD
    known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    older = []
    for original in sorted((checkout / "notebooks").glob("*.ipynb")):
        copy, now = folder / original.name, _digest(original)
        if not copy.exists() or _digest(copy) == known.get(copy.name):
            shutil.copyfile(original, copy)
            known[copy.name] = now
        elif known.get(copy.name) != now:
            older.append(copy.name)
    record.write_text(json.dumps(known, indent=1))
    return folder, older


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
