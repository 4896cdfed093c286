"""Who of many requests is served next, in which memory: policy over a pool, without a model and without token ids."""

from torch_uma.scheduling.costs import Costs
from torch_uma.scheduling.need import Need
from torch_uma.scheduling.request import Request
from torch_uma.scheduling.round import Forward, Round
from torch_uma.scheduling.scheduler import Scheduler
from torch_uma.scheduling.stats import SchedulerStats

__all__ = ["Costs", "Forward", "Need", "Request", "Round", "Scheduler", "SchedulerStats"]
