"""Layers spread over ranks: schedules as data, an executor, links between stages, and a simulator."""
