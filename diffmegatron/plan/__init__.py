"""``diffmegatron plan``: estimates of a recipe's parameters, memory, traffic and step time."""

from diffmegatron.plan.command import run, run_search
from diffmegatron.plan.rank_layout import Layout
from diffmegatron.plan.summary import Plan, plan_recipe
from diffmegatron.plan.tables import print_plan

__all__ = ["Layout", "Plan", "plan_recipe", "print_plan", "run", "run_search"]
