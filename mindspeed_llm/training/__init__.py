"""The training loop shared by every task: setup, step, schedule, log, save, resume."""
