"""What traffic would do to an arena: traces replayed through the scheduler, on the clock of a named device."""

from torch_uma.simulate.device import DEVICES, Device
from torch_uma.simulate.replay import replay
from torch_uma.simulate.report import Report
from torch_uma.simulate.traces import Arrival, at_once, generate_trace, read_trace
from torch_uma.simulate.work import Attention, Work

__all__ = [
    "DEVICES",
    "Arrival",
    "Attention",
    "Device",
    "Report",
    "Work",
    "at_once",
    "generate_trace",
    "read_trace",
    "replay",
]
