"""Configures the documentation site: Sphinx reads the Markdown pages, and the reference from docstrings.

`sphinx-build -W docs build/site` builds it, with the package and its extra `docs` installed.
"""

import dataclasses
import inspect
from typing import Any

from sphinx.application import Sphinx

import ortolan

project = "Ortolan"
author = copyright = "the Ortolan authors"  # noqa: A001
version = release = ortolan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3  # links such as generation.md#sampling-and-seeds, which GitHub knows, too

add_module_names = False  # the names that users import: ortolan.Session, not ortolan.runtime.session.Session
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
default_role = "code"
napoleon_use_ivar = True  # attributes as a list, because autodoc describes the properties besides
napoleon_use_rtype = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "Ortolan"
html_copy_source = False
html_show_sourcelink = False


def name_options(_: Sphinx, what: str, name: str, given: Any, *rest: Any) -> tuple[str, None] | None:
    """Show the options of an eviction policy, which its `__new__` takes by name without listing them."""
    if what != "class" or not issubclass(given, ortolan.Eviction) or given is ortolan.Eviction:
        return None
    options = [field for field in dataclasses.fields(given) if field.name != "policy"]
    parameters = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default) for field in options
    ]
    return str(inspect.Signature(parameters)), None


def leave_out_functions(_: Sphinx, what: str, name: str, given: Any, *rest: Any) -> bool | None:
    """Leave out the functions of a module that is shown as a whole: that of the errors also checks arguments."""
    return True if what == "module" and inspect.isfunction(given) else None


def setup(app: Sphinx) -> None:
    """Connect what the options above cannot say."""
    app.connect("autodoc-process-signature", name_options)
    app.connect("autodoc-skip-member", leave_out_functions)
