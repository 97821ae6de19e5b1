"""The directive that puts a diagram into a page: inline, so that it takes the page's colours, dark or light."""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from .diagrams import DIAGRAMS


class DiagramDirective(Directive):
    """`{diagram} name`, with the caption below it as its body."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The diagram as a figure; an unknown name ends the build."""
        name = self.arguments[0]
        if name not in DIAGRAMS:
            raise self.error(f"there is no diagram {name!r}; there are {', '.join(sorted(DIAGRAMS))}")
        caption = nodes.caption()
        self.state.nested_parse(self.content, self.content_offset, caption)
        figure = nodes.container(classes=["diagram"], ids=[f"diagram-{name}"])
        figure += nodes.raw("", DIAGRAMS[name](), format="html")
        # The directive's body is one paragraph; its inlines become the caption.
        words = nodes.paragraph(classes=["diagram-caption"])
        for child in caption.children:
            words.extend(child.children if isinstance(child, nodes.paragraph) else [child])
        figure += words
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("diagram", DiagramDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
