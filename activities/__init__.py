"""Side effects of the workflows; every one idempotent and retryable. Start at ``contracts``."""
