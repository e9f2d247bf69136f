"""The error of a layer that cannot become a graph."""

from cleave.errors import PlanError


class LayerGraphError(PlanError):
    """A layer cannot be exported as a graph. The message is a clause that can follow "because"."""
