"""Draws a pipelined step: a lane per rank and a box per pass; the bubble stays white."""

import math
from typing import Any

from megatron.report.pipeline_timeline import Span, Timeline

_LANE, _LEFT, _TOP, _WIDTH, _GAP = 34, 70, 46, 1400, 6
_COLOURS = {  # by kind and chunk: later chunks are darker
    "F": ((173, 205, 240), (104, 159, 217), (56, 116, 184), (28, 78, 138)),
    "B": ((178, 223, 178), (115, 186, 115), (64, 143, 64), (30, 98, 30)),
    "W": ((250, 215, 160), (236, 178, 92), (205, 137, 40), (150, 96, 20)),
}
_KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_INK, _PAPER, _EDGE = (30, 30, 30), (255, 255, 255), (120, 120, 120)


def draw_step(step: Timeline, title: str, path: str, *, measured: bool) -> None:
    """Writes a PNG: a lane per rank, a box per pass with the number of its micro-batch, a time axis and a legend."""
    from PIL import Image, ImageDraw

    bottom = _TOP + step.ranks * (_LANE + _GAP) + 6
    picture = Image.new("RGB", (_LEFT + _WIDTH + 40, bottom + 90), _PAPER)
    pen = ImageDraw.Draw(picture)
    pen.text((10, 12), title, fill=_INK)
    pen.text((10, _TOP - 16), "pipeline stage", fill=_INK)
    for rank in range(step.ranks):
        pen.text((10, _TOP + rank * (_LANE + _GAP) + 10), f"stage {rank}", fill=_INK)
    end = step.end  # the latest of all spans
    for span in step.spans:
        _box(pen, span, end)
    _time_axis(pen, end, bottom, measured=measured)
    _legend(pen, step, bottom + 56)
    picture.save(path)


def _box(pen: Any, span: Span, end: float) -> None:
    left = _LEFT + span.start / end * _WIDTH
    right = max(_LEFT + span.end / end * _WIDTH, left + 1)
    top = _TOP + span.rank * (_LANE + _GAP)
    pen.rectangle((left, top, right, top + _LANE), fill=_colour(span.action.kind, span.action.chunk), outline=_EDGE)
    label = str(span.action.micro_batch)
    if right - left > 7 * len(label) + 4:
        pen.text(((left + right) / 2 - 3 * len(label), top + 10), label, fill=_INK)


def _time_axis(pen: Any, end: float, bottom: float, *, measured: bool) -> None:
    """Draws ticks at round numbers. A simulation has no seconds: its unit is the duration of a forward pass."""
    scale, title = (1000.0, "time (ms)") if measured else (1.0, "time (1 = a forward pass)")
    pen.line((_LEFT, bottom, _LEFT + _WIDTH, bottom), fill=_INK)
    for tick in ticks(end * scale):
        x = _LEFT + tick / (end * scale) * _WIDTH
        pen.line((x, bottom, x, bottom + 4), fill=_INK)
        pen.text((x - 3 * len(f"{tick:g}"), bottom + 6), f"{tick:g}", fill=_INK)
    pen.text((_LEFT + _WIDTH / 2 - 3 * len(title), bottom + 24), title, fill=_INK)


def ticks(end: float) -> list[float]:
    """Returns 0 and the multiples of 1, 2 or 5 times a power of ten up to `end`: from 5 to 13 numbers."""
    power = 10.0 ** math.floor(math.log10(end / 5))
    step = next(factor * power for factor in (5, 2, 1) if end / (factor * power) >= 5)
    return [float(f"{step * i:.9g}") for i in range(int(end / step * (1 + 1e-9)) + 1)]


def _legend(pen: Any, step: Timeline, top: float) -> None:
    x = float(_LEFT)
    kinds = {(span.action.kind, span.action.chunk) for span in step.spans}
    for kind, chunk in sorted(kinds, key=lambda each: ("FBW".index(each[0]), each[1])):
        name = _KINDS[kind] if kind != "B" or not step.defers_wgrads else "backward, inputs only"
        text = f"{name}, chunk {chunk}" if step.chunks > 1 else name
        pen.rectangle((x, top, x + 22, top + 14), fill=_colour(kind, chunk), outline=_EDGE)
        pen.text((x + 28, top + 2), text, fill=_INK)
        x += 28 + 6.5 * len(text) + 24
    pen.rectangle((x, top, x + 22, top + 14), fill=_PAPER, outline=_EDGE)
    pen.text((x + 28, top + 2), "idle (the bubble); the number in a box: its micro-batch", fill=_INK)


def _colour(kind: str, chunk: int) -> tuple[int, int, int]:
    colours = _COLOURS[kind]
    return colours[min(chunk, len(colours) - 1)]
