"""Sphinx's settings for the site of `make docs`. `tools/build_docs.py` lays the pages and runs it."""

from __future__ import annotations

import tomllib

from build_docs import ROOT, heading_name

project = "Freight"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"Freight {version}"
extensions = ["myst_parser"]
myst_enable_extensions = ["html_image"]  # README's picture
myst_heading_anchors = 6
myst_heading_slug_func = "build_docs.heading_name"  # links to headings are the forge's
assert heading_name
html_theme = "furo"  # its pages load nothing from elsewhere, and follow the light or dark setting
html_css_files = ["site.css"]
html_static_path = ["_static"]
html_extra_path = ["reference/openapi.json"]
html_copy_source = False
html_show_copyright = False
highlight_language = "none"  # a block without a language is plain text
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # commands with … are no shell
