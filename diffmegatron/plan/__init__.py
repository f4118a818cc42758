"""``diffmegatron plan``: estimates of a recipe's parameters, memory, traffic and step time."""

from diffmegatron.plan.command import run_plan, run_search
from diffmegatron.plan.rank_layout import RankLayout
from diffmegatron.plan.summary import Plan, plan_recipe
from diffmegatron.plan.tables import print_plan

__all__ = ["Plan", "RankLayout", "plan_recipe", "print_plan", "run_plan", "run_search"]
