"""Draws the timeline of a pipelined step: a lane per rank, a box per pass; the bubble stays white."""

from __future__ import annotations

from typing import Any

from megatron.pipeline_parallel.timeline import Span, Timeline

_LANE, _LEFT, _TOP, _WIDTH, _GAP = 34, 70, 46, 1400, 6
_COLOURS = {  # by kind and chunk: later chunks are darker
    "F": ((173, 205, 240), (104, 159, 217), (56, 116, 184), (28, 78, 138)),
    "B": ((178, 223, 178), (115, 186, 115), (64, 143, 64), (30, 98, 30)),
    "W": ((250, 215, 160), (236, 178, 92), (205, 137, 40), (150, 96, 20)),
}
_INK, _PAPER, _EDGE = (30, 30, 30), (255, 255, 255), (120, 120, 120)


def draw_timeline(step: Timeline, title: str, path: str) -> None:
    """Writes a PNG: forward passes blue, backward passes green, deferred weight gradients orange."""
    from PIL import Image, ImageDraw

    height = _TOP + step.ranks * (_LANE + _GAP) + 40
    picture = Image.new("RGB", (_LEFT + _WIDTH + 20, height), _PAPER)
    pen = ImageDraw.Draw(picture)
    pen.text((10, 12), title, fill=_INK)
    for rank in range(step.ranks):
        pen.text((10, _TOP + rank * (_LANE + _GAP) + 10), f"stage {rank}", fill=_INK)
    for span in step.spans:
        _box(pen, span, step.end)
    bottom = _TOP + step.ranks * (_LANE + _GAP) + 6
    pen.line((_LEFT, bottom, _LEFT + _WIDTH, bottom), fill=_INK)
    pen.text((_LEFT, bottom + 6), "0", fill=_INK)
    pen.text((_LEFT + _WIDTH - 60, bottom + 6), f"{step.end:.4g}", fill=_INK)
    picture.save(path)


def _box(pen: Any, span: Span, end: float) -> None:
    left = _LEFT + span.start / end * _WIDTH
    right = max(_LEFT + span.end / end * _WIDTH, left + 1)
    top = _TOP + span.rank * (_LANE + _GAP)
    colours = _COLOURS[span.action.kind]
    colour = colours[min(span.action.chunk, len(colours) - 1)]
    pen.rectangle((left, top, right, top + _LANE), fill=colour, outline=_EDGE)
    label = str(span.action.micro_batch)
    if right - left > 7 * len(label) + 4:
        pen.text(((left + right) / 2 - 3 * len(label), top + 10), label, fill=_INK)
