"""Single backquotes in docstrings: a link where they hold a public name, code otherwise."""

from docutils import nodes
from site_coverage import public_names
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.util.docutils import SphinxRole

SHORT = {"jnp.": "jax.numpy.", "np.": "numpy.", "nn.": "flax.linen.", "nnx.": "flax.nnx."}
"""What docstrings write for a module, and its name."""


class NameRole(SphinxRole):
  """The default role: `mpjax.autocast` links to it, and `x + 1` is code."""

  def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Returns a reference, or a literal."""
    literal = nodes.literal(self.rawtext, self.text, classes=["py"])
    name = self.text.split("(")[0]
    for short, long in SHORT.items():
      name = long + name.removeprefix(short) if name.startswith(short) else name
    if name not in public_names() and not self._is_elsewhere(name):
      return [literal], []
    reference = addnodes.pending_xref(
      self.rawtext, literal, refdomain="py", reftype="obj", reftarget=name, refexplicit=True
    )
    reference["refdoc"] = self.env.docname
    return [reference], []

  def _is_elsewhere(self, name: str) -> bool:
    """Whether the documentation of another library has a name."""
    found = InventoryAdapter(self.env).main_inventory
    return "." in name and any(name in names for kind, names in found.items() if kind[:3] == "py:")


def setup(app: Sphinx) -> dict[str, bool]:
  """Adds the role."""
  app.add_role("mpjax", NameRole())
  return {"parallel_read_safe": True, "parallel_write_safe": True}
