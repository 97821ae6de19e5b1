"""How Sphinx turns the collected pages into the site."""

from __future__ import annotations

project = "The inference workbook"
author = "the authors of the inference workbook"
project_copyright = "the authors of the inference workbook"
html_title = project

extensions = ["myst_nb", "sphinx_copybutton", "book.mathml", "book.diagram_directive"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

# Notebooks are shown as they were run; the book runs nothing.
nb_execution_mode = "off"
nb_merge_streams = True
# An animation that a notebook holds as HTML is shown as that, not as its text.
nb_mime_priority_overrides = [("html", "text/html", 0)]
myst_enable_extensions = ["dollarmath", "attrs_block"]
# Links to a heading of another page are written as on GitHub.
myst_heading_anchors = 4
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"
# A literal block in a handout is a formula, a drawing or a dialogue, and no Python.
highlight_language = "none"
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]
