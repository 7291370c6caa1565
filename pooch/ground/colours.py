"""The one map of colours: of the terminal, of pictures, of notebooks and of the page.

The hues are those of Okabe and Ito, which people with any colour vision can tell apart. Bars are dark enough for white
paper and light enough for a dark page (a contrast of at least 3:1, as WCAG 2.2 asks of graphics), so one colour serves
both. Nothing depends on colour alone: there are hatches and letters too.
"""

from __future__ import annotations

CHOICES = {"keep": "#708CA8", "swap": "#009E73", "recompute": "#C07C00", "split": "#A64CA6"}
LETTERS = {"keep": "k", "swap": "s", "recompute": "r", "split": "x"}
HATCHES = {"keep": "", "swap": "////", "recompute": "....", "split": "xxxx"}  # as matplotlib writes them

KINDS = {
    "op": CHOICES["keep"],
    "replay": CHOICES["recompute"],
    "stall": "#C23B22",
    "copy": CHOICES["swap"],
    "move": "#A64CA6",
}
KIND_HATCHES = {"op": "", "replay": HATCHES["recompute"], "stall": "xxxx", "copy": "", "move": "\\\\"}

# What outlives a step, under the curve of memory.
PERSISTENT = {"parameter": "#4B6584", "buffer": "#708CA8", "gradient": "#CC79A7", "state": "#A64CA6"}

# Of the page in both schemes, under the names that its style sheet uses.
LIGHT = {
    "paper": "#FFFFFF",
    "panel": "#F5F6F8",
    "ink": "#1C2127",
    "quiet": "#5B6470",
    "line": "#D9DDE3",
    "planned": "#0072B2",
    "in-core": "#808080",
    "budget": "#D55E00",
    "bound": "#2F8FC4",
    "warning": "#B24A00",
}
DARK = {
    "paper": "#15181C",
    "panel": "#1E2227",
    "ink": "#E6E9ED",
    "quiet": "#A2ABB6",
    "line": "#353B43",
    "planned": "#56B4E9",
    "in-core": "#A0A0A0",
    "budget": "#F08030",
    "bound": "#8FCDF0",
    "warning": "#F08030",
}

# Pictures are drawn on white paper.
IN_CORE, PLANNED, BUDGET, BOUND = (LIGHT[name] for name in ("in-core", "planned", "budget", "bound"))

# Blocks of an arena have a dark edge each, so that light ones stand out too.
BLOCK_EDGE = "#333333"
BLOCKS = {
    **CHOICES,
    "replay": "#F5C978",
    "gradient": "#CC79A7",
    "temporary": "#F0E442",
    "fixed": "#E3E8EC",
    "program": "#E3E8EC",
    "before": "#999999",
}
