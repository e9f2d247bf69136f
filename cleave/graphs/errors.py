"""The error of a layer that cannot become a graph."""

from cleave.errors import PlanError


class LayerGraphError(PlanError):
    """A layer cannot become a graph; the text is the reason, to follow "because"."""
