"""The pages of jobs."""

from django.urls import path

from jobs.views import actions, disk, gpus, job, jobs, logs, performance, submit, sweep_list, sweeps

urlpatterns = [
    path("jobs", jobs.index, name="jobs"),
    path("jobs/row/<int:job_id>", jobs.row, name="job_row"),
    path("jobs/cancel", actions.cancel_several, name="jobs_cancel"),
    path("jobs/<int:job_id>", job.overview, name="job"),
    path("jobs/<int:job_id>/life", job.life, name="job_life"),
    path("jobs/<int:job_id>/logs", logs.page, name="job_logs"),
    path("jobs/<int:job_id>/logs/lines", logs.lines, name="job_log_lines"),
    path("jobs/<int:job_id>/logs/download", logs.download, name="job_log_download"),
    path("jobs/<int:job_id>/checkpoints", job.checkpoints, name="job_checkpoints"),
    path("jobs/<int:job_id>/checkpoints/<int:checkpoint_id>/pin", actions.pin, name="job_pin"),
    path("jobs/<int:job_id>/gpus", gpus.page, name="job_gpus"),
    path("jobs/<int:job_id>/attempts", job.attempts, name="job_attempts"),
    path("jobs/<int:job_id>/spec", job.spec, name="job_spec"),
    path("jobs/<int:job_id>/spec.toml", job.spec_toml, name="job_spec_toml"),
    path("jobs/<int:job_id>/cancel", actions.cancel, name="job_cancel"),
    path("jobs/<int:job_id>/resume", actions.resume, name="job_resume"),
    path("jobs/<int:job_id>/profile", performance.profile, name="job_profile"),
    path("jobs/<int:job_id>/profiles/<int:number>/<str:name>", performance.download, name="job_profile_download"),
    path("jobs/<int:job_id>/edit", actions.edit, name="job_edit"),
    path("jobs/<int:job_id>/delete", actions.delete, name="job_delete"),
    path("sweeps", sweep_list.index, name="sweeps"),
    path("sweeps/<int:sweep_id>", sweeps.page, name="sweep"),
    path("sweeps/<int:sweep_id>/cancel", sweeps.cancel, name="sweep_cancel"),
    path("disk", disk.page, name="disk"),
    path("disk/<str:slug>/keep", disk.keep, name="disk_keep"),
    path("submit", submit.page, name="submit"),
    path("submit/sync", submit.sync, name="submit_sync"),
]
