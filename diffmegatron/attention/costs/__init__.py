"""Estimated costs of layers, by kind of attention."""

from . import dex as dex
from .costs import Costs, Sizes, costs_of, register_costs
from .layer_run import LayerRun

__all__ = ["Costs", "LayerRun", "Sizes", "costs_of", "register_costs"]
