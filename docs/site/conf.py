"""Settings of the documentation site; `python tools/build_docs.py` builds it.

The source folder is the repository's root, so that links mean the same here and in a repository browser.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "Megatron"
html_title = "Megatron"
extensions = ["myst_parser", "sphinx_copybutton", "markdown_pages"]
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "docs/design/*.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("benchmarks/RESULTS.md", "examples/gpt2_8p/README.md"),
]
exclude_patterns = [".*", "build", "csrc", "megatron", "runs", "experiments", "tests"]

myst_heading_anchors = 4

smartquotes = False  # "--seq-length" in a table stays as it is typed

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
