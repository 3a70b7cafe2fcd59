"""Pipeline parallelism: schedules as data, the executor that runs them, links between stages, and a simulator."""
