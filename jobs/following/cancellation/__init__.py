"""Cancel at the scheduler: requested cancellations, jobs that came too late, leftover allocations."""
