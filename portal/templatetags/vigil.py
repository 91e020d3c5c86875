"""How Vigil writes numbers, times and states in pages."""

from django import template

register = template.Library()
