"""Processes: controller, agent, and all of them as one command. Wiring and nothing else."""
