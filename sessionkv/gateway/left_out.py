"""What stands in a prompt for a piece of a tool's result that no model here can read."""

from __future__ import annotations


def left_out(kind: str) -> str:
    """The line for a piece of some type: the model is told, and can say so."""
    return f"[{kind} left out: this model reads text alone]"
