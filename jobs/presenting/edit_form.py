"""Validate edits of an existing job."""

from __future__ import annotations

import re
from typing import Any

from django import forms

from jobs.errors import SpecError
from jobs.spec import JobSpec


class EditForm(forms.Form):
    """Name, tags and notes of a job, validated by the rules of the job specification."""

    name = forms.CharField(max_length=64)
    tags = forms.CharField(required=False, max_length=4000)
    notes = forms.CharField(required=False, max_length=20_000, strip=True)

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        data["tags"] = (
            list(dict.fromkeys(re.split(r"[\s,]+", data.get("tags", "").strip()))) if data.get("tags") else []
        )
        try:
            JobSpec.parse(
                {
                    "name": data.get("name", ""),
                    "kind": "distributed",
                    "tags": data["tags"],
                    "notes": data.get("notes", ""),
                }
            )
        except SpecError as error:
            raise forms.ValidationError([problem.message for problem in error.problems]) from error
        return data
