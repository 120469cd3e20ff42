"""The documentation site: `make docs` builds it from the pages of the repository as they are.

Its source folder is the root of the repository, so that a link from page to page, such as
`../benchmarks/README.md`, is the same one on the site and in the repository.
"""

import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE / "figures")]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS = {name.lower(): url for name, url in PROJECT.get("urls", {}).items()}

project = PROJECT["name"]
author = "The authors of mpjax"
project_copyright = author
html_title = "mpjax"

# From [project.urls] of pyproject.toml: with it, each page has a button that leads to the
# repository. A link to a file that is no page of the site downloads the file.
repository_url = URLS.get("repository", URLS.get("source", ""))

root_doc = "docs/index"
include_patterns = [
  "docs/*.md",
  "docs/*/*.md",
  "benchmarks/README.md",
  "examples/README.md",
  "CHANGELOG.md",
  "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "dist", "mpjax", "tests", "out", "**/__pycache__"]

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.intersphinx",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
  "site_coverage",
  "site_llms",
  "site_names",
  "site_notebooks",
  "site_signatures",
  "sphinx_pictures",  # figures in light and dark
]

# Pages.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The API, from docstrings.
default_role = "mpjax"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Fields", "params_style")]
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"  # the contents at the right are narrow

nitpicky = True
nitpick_ignore = [
  ("py:class", "nnx.DiffState"),  # public, and on no page of Flax
]

# Two entries for each library: its own inventory where the network reaches it, and the small one
# of `docs/inventories/make.py`, so that the strict build needs no network.
SITES = {
  "python": "https://docs.python.org/3",
  "numpy": "https://numpy.org/doc/stable",
  "jax": "https://docs.jax.dev/en/latest",
  "flax": "https://flax.readthedocs.io/en/latest",
  "flax_linen": "https://flax-linen.readthedocs.io/en/latest",
  "optax": "https://optax.readthedocs.io/en/latest",
}
intersphinx_mapping = {
  f"{name}{which}": (f"{url}{slash}", (*first, str(HERE / f"inventories/{name}.inv")))
  for name, url in SITES.items()
  # Sphinx wants an address once: hence the slash.
  for which, slash, first in (("", "/", (None,)), ("_kept", "", ()))
}
intersphinx_timeout = 10

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_extra_path = ["_root"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
  "show_navbar_depth": 1,
  "show_toc_level": 2,
  "use_download_button": False,
  "use_fullscreen_button": False,
  "navbar_persistent": [],  # the sidebar has the search
  **({"repository_url": repository_url, "use_repository_button": True} if repository_url else {}),
}
