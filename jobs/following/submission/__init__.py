"""Hand attempts to the scheduler once they need not wait for other jobs or a sweep's limit."""
