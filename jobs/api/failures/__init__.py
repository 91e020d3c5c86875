"""REST: post-mortems and incidents, causes and runbooks, and how often nodes and programs fail."""
