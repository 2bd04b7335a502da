"""Sphinx's settings for the course's site (builder.py runs it)."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from extension import linkcode_resolve  # noqa: E402, F401

project = "ALST"
html_title = "ALST: train on very long sequences"
html_short_title = "ALST"
language = "en"
root_doc = "notebooks/index"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "extension"]

# Stored outputs only. No widget manager (it would come from elsewhere): notebooks keep a plain figure in its place.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_merge_streams = True
nb_render_markdown_format = "myst"

# Formulas become MathML, which browsers draw by themselves: no MathJax.
myst_enable_extensions = ["dollarmath"]
myst_update_mathjax = False
html_math_renderer = "mathml"
myst_heading_anchors = 4

# Docstrings are plain text: `name` is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_use_rtype = False

html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_prev_next": True,
    "logo": {"text": "ALST"},
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_content_items": ["extra-footer.html"],
    "extra_footer": "Built from the stored outputs of the notebooks; nothing was executed for this page.",
}
html_static_path = [str(HERE / "static")]
html_css_files = ["custom.css"]
html_sourcelink_suffix = ""
html_show_sphinx = False
html_show_copyright = False
html_domain_indices = False
