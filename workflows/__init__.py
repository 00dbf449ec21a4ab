"""When things happen: durable workflows, deterministic, without I/O. Start at ``training_job``."""
