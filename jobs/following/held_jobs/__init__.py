"""Follow jobs that the scheduler holds: notify people, and release the jobs on request."""
