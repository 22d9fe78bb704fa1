"""Every exercise by name."""

from distkit.exercises import collectives, serving

TASKS = {task.name: task for task in (*collectives.TASKS, *serving.TASKS)}
