"""Start of the zygote, and of the reaper that ends what the zygote may leave behind.

Run as a file, ``python boot.py FD PATH TEMPORARY KEEP``, not as a module: Python would put the
folder of the notebook first on its path, and a learner's ``random.py`` there in the place of its
own.
"""

import sys


def _find_package() -> None:
    """Import distkit from where this file is, wherever else there may be one."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location(
        "distkit", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules["distkit"] = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _, line, path, temporary, keep = sys.argv
    sys.path[:] = path.split("\n")  # before anything else is imported
    _find_package()
    from distkit.cluster.processes import zygote

    zygote.main(int(line), temporary, float(keep))
