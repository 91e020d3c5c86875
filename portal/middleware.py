"""The site's own middleware."""

from csp.middleware import CSPMiddleware


class ContentSecurityPolicy(CSPMiddleware):
    """django-csp's; /admin is exempt (CONTENT_SECURITY_POLICY), because unfold evaluates expressions in the page."""
