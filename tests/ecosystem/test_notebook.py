"""The notebook of the first five minutes runs, and what is stored of it is clean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ABSOLUTE_PATH = r"(?<=[\s\"'(=])/[A-Za-z]+/"
PATH = Path(__file__).parents[2] / "examples" / "first_five_minutes.ipynb"


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(PATH, as_version=4)


def printed(notebook: Any) -> list[str]:
    """The kinds of outputs of all cells, in order."""
    return [output.output_type for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_notebook_runs(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell gives outputs of the kinds that are stored, and none writes to stderr."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # The font cache of whoever runs the tests may name fonts that are gone, which matplotlib tells stderr.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True, capture_output=True)
    stored = printed(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(notebook) == stored
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in outputs)
    (first,) = notebook.cells[3].outputs
    assert float(first.text.split("images ")[1].rstrip("%\n")) > 88


def test_what_is_stored_is_clean(notebook: Any) -> None:
    """No errors, no machine's paths, no kernel of one person's, and cells in the order in which they were run."""
    text = PATH.read_text(encoding="utf-8")
    nbformat.validate(notebook)
    assert re.search(ABSOLUTE_PATH, "saved to /anybody/model.pt")
    assert not re.search(f"{ABSOLUTE_PATH}|stderr|Traceback", text)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(not cell.metadata for cell in notebook.cells)
