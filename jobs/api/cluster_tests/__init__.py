"""REST: tests of the cluster that sysadmins start: burn-ins, acceptances and game days."""
