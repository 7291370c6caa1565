"""The colours of every picture: the Okabe and Ito palette, which people with any colour vision can tell apart."""

from __future__ import annotations

IN_CORE = "#999999"
PLANNED = "#0072B2"
BUDGET = "#D55E00"
BOUND = "#56B4E9"
KINDS = {"op": "#BBCCDD", "replay": "#E69F00", "stall": "#D55E00", "copy": "#009E73"}
CHOICES = {"keep": KINDS["op"], "swap": KINDS["copy"], "recompute": KINDS["replay"]}
BLOCKS = {
    **CHOICES,
    "replay": "#F5C978",
    "gradient": "#CC79A7",
    "temporary": "#F0E442",
    "fixed": "#E3E8EC",
    "program": "#E3E8EC",
    "before": IN_CORE,
}
