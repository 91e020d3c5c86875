"""Define the site's settings, all from the environment; a secret also from the file that NAME_FILE names."""

import os
import re
import secrets
import sys
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from vigil_core import installation
from vigil_core.environment import amount, choice, env, flag, share, whole

BASE_DIR = installation.ROOT


# Vigil's own settings
VIGIL_HOME = Path(env("VIGIL_HOME", str(installation.default_home()))).resolve()
VIGIL_HOME.mkdir(mode=0o700, parents=True, exist_ok=True)
# Where jobs import our trainer from. The wheel's folder also has packages of the site's Python, which jobs must not
# import: they get a folder with links to ours alone (console.site.job_code).
JOB_CODE = BASE_DIR if installation.IS_CHECKOUT else VIGIL_HOME / "job-code"
VIGIL_PORT = whole("VIGIL_PORT", 8000, 1, 65_535)
VIGIL_RUNS = Path(env("VIGIL_RUNS", str(VIGIL_HOME / "runs"))).resolve()
VIGIL_PUBLIC_URL = env("VIGIL_PUBLIC_URL", f"http://127.0.0.1:{VIGIL_PORT}").rstrip("/")
# Where the shippers of jobs post: nodes may know the portal by another name than browsers do.
VIGIL_REPORT_URL = env("VIGIL_REPORT_URL", VIGIL_PUBLIC_URL).rstrip("/")
# How reports travel: "post" to that address; or "tail" if nodes cannot reach it: the worker reads the spools.
VIGIL_REPORTS = choice("VIGIL_REPORTS", "post", "tail")
# The longest grace period for a cancelled job to save and stop, whatever its reported checkpoint times suggest. Slurm's
# own warning before a time limit (--signal) takes at most 65,535 s.
VIGIL_MAX_GRACE_SECONDS = whole("VIGIL_MAX_GRACE_SECONDS", 900, 30, 65_535)
VIGIL_SPOOL_DAYS = whole("VIGIL_SPOOL_DAYS", 14, 0, 100_000)  # retention after an attempt has closed
VIGIL_SCHEDULER = env("VIGIL_SCHEDULER", "local")
VIGIL_QUEUE_VISIBLE = choice("VIGIL_QUEUE_VISIBLE", "everyone", "own")  # own: as Slurm with PrivateData=jobs
VIGIL_HEALTH = choice("VIGIL_HEALTH", "propose", "act")  # act: health rules drain nodes by themselves, within limits
VIGIL_MINIMUM_VERSIONS = env("VIGIL_MINIMUM_VERSIONS", "")  # a TOML file with the site's own minimum versions
VIGIL_HEALTH_STRICT = flag("VIGIL_HEALTH_STRICT")  # Xid 13 and 31 take a node out of service, whatever ran there
VIGIL_SLURM_URL = env("VIGIL_SLURM_URL")  # http(s)://host:6820 or unix:/path of slurmrestd
VIGIL_SLURM_KEY_FILE = env("VIGIL_SLURM_KEY_FILE")  # slurmctld's jwt_hs256.key; the worker alone opens it
VIGIL_SLURM_TOKEN_COMMAND = env("VIGIL_SLURM_TOKEN_COMMAND")  # instead of the key: prints a token for {user}
VIGIL_SLURM_CA_FILE = env("VIGIL_SLURM_CA_FILE")  # certificate authorities of an https:// address, if not the system's
VIGIL_SLURM_USER = env("VIGIL_SLURM_USER")  # also the first sysadmin's Slurm user, until changed
VIGIL_PUSH_SECRET = env("VIGIL_PUSH_SECRET")  # secret with which Slurm's hooks wake the follower; empty: disabled
if 0 < len(VIGIL_PUSH_SECRET) < 16:
    raise SystemExit("VIGIL_PUSH_SECRET is too short: use 16 characters or more (openssl rand -hex 32).")
VIGIL_METRICS_TOKEN = env("VIGIL_METRICS_TOKEN")  # token with which Prometheus reads /metrics; empty: disabled
if 0 < len(VIGIL_METRICS_TOKEN) < 16:
    raise SystemExit("VIGIL_METRICS_TOKEN is too short: use 16 characters or more (openssl rand -hex 32).")
VIGIL_METRICS_PROCESS = env("VIGIL_METRICS_PROCESS", "web")  # with several web processes, each needs its own name
VIGIL_LOCAL_USER = env("VIGIL_LOCAL_USER")
VIGIL_LOCAL_TRUST = choice("VIGIL_LOCAL_TRUST", "sysadmins", "everyone")
# Folders that jobs may read if they run as the portal's Unix user and their owner is not a sysadmin
# (docs/explanations/security.md).
VIGIL_DATA_ROOTS = tuple(Path(root.strip()).resolve() for root in env("VIGIL_DATA_ROOTS").split(",") if root.strip())
if any(root.strip()[:1] not in {"", "/"} for root in env("VIGIL_DATA_ROOTS").split(",")):
    raise SystemExit("VIGIL_DATA_ROOTS must be absolute paths, separated by commas.")
for _root in VIGIL_DATA_ROOTS:
    for _name, _ours in (("VIGIL_HOME", VIGIL_HOME), ("VIGIL_RUNS", VIGIL_RUNS)):
        if _root.is_relative_to(_ours) or _ours.is_relative_to(_root):
            raise SystemExit(
                f"VIGIL_DATA_ROOTS contains {_root}, which overlaps with {_name}={_ours}: jobs could read secrets and"
                " each other's files. Use folders outside it."
            )
VIGIL_LOCAL_CPUS = env("VIGIL_LOCAL_CPUS")  # CPU slots; more than the cores oversubscribes them
VIGIL_LOCAL_GPUS = env("VIGIL_LOCAL_GPUS")  # indices such as 0,1; "none"; empty: all
VIGIL_LOCAL_ENVIRONMENT = env("VIGIL_LOCAL_ENVIRONMENT")  # names of further variables that jobs inherit
# Defaults for jobs, unless their project or specification sets something else.
VIGIL_JOB_PYTHON = env("VIGIL_JOB_PYTHON", sys.executable)
VIGIL_JOB_ENVIRONMENT = env("VIGIL_JOB_ENVIRONMENT")  # TOML, as [environment] in a job's spec; usually by its _FILE
VIGIL_RESTART_ON = env("VIGIL_RESTART_ON")  # TOML, as [restart.on] in a job's spec; usually by its _FILE
VIGIL_NCCL_INTERFACE = env("VIGIL_NCCL_INTERFACE")  # "ib0", "^lo,docker": passed on as NCCL_SOCKET_IFNAME
VIGIL_GLOO_INTERFACE = env("VIGIL_GLOO_INTERFACE")
VIGIL_AGENT = flag("VIGIL_AGENT", True)  # `vigil up` starts an agent for its machine
VIGIL_AGENT_HOME = VIGIL_HOME / "agent"  # the agent's token and buffer
# node=http://host:9400/metrics,… or @FILE: polled on nodes without agents
VIGIL_DCGM_EXPORTERS = env("VIGIL_DCGM_EXPORTERS")
# Internal addresses that webhooks may use: networks and host names, separated by commas.
VIGIL_WEBHOOK_ALLOW = env("VIGIL_WEBHOOK_ALLOW")
for _word in filter(None, (word.strip() for word in VIGIL_WEBHOOK_ALLOW.split(","))):
    try:
        ip_network(_word, strict=False)
    except ValueError:
        if not re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", _word):
            raise SystemExit(
                f"VIGIL_WEBHOOK_ALLOW: {_word} is neither a network such as 10.0.0.0/8 nor a host name."
            ) from None
VIGIL_WEBHOOK_PROXY = env("VIGIL_WEBHOOK_PROXY") or None  # http://proxy:3128; the environment's proxy is not used
# Price of a GPU-hour, to show what failures cost; empty: only hours are shown.
VIGIL_GPU_HOUR_PRICE = amount("VIGIL_GPU_HOUR_PRICE")
VIGIL_CURRENCY = env("VIGIL_CURRENCY", "€").strip()[:8]  # a sign before the amount, or a word after it
VIGIL_TOKEN_MAX_DAYS = whole("VIGIL_TOKEN_MAX_DAYS", 365, 1, 3650)  # the maximum lifetime of a person's API token
# A process of the portal that does not respond for this long is killed and restarted.
VIGIL_UNRESPONSIVE_SECONDS = amount("VIGIL_UNRESPONSIVE_SECONDS") or 60.0
if VIGIL_UNRESPONSIVE_SECONDS < 5:
    raise SystemExit(
        "VIGIL_UNRESPONSIVE_SECONDS is too short: processes on a busy machine can pause for seconds. Use 5 or more."
    )
# Maximum age of the newest `vigil backup`; empty: backups are made in another way and not monitored.
VIGIL_BACKUP_HOURS = amount("VIGIL_BACKUP_HOURS")
VIGIL_FEDERATED_LEAST_SHARE = share("VIGIL_FEDERATED_LEAST_SHARE")  # of samples that must be included
VIGIL_API_RATE = whole("VIGIL_API_RATE", 3000, 1, 1_000_000)  # requests a minute, per person and web process
# Open at once, per person and web process; a token may have half of them.
VIGIL_SOCKETS = whole("VIGIL_SOCKETS", 200, 2, 1_000_000)


def _secret_key() -> str:
    """Return the configured key, else one that is created at the first start and stored in VIGIL_HOME."""
    if key := env("SECRET_KEY"):
        return key
    path = VIGIL_HOME / "secret_key"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(50))
    except FileExistsError:
        pass
    return path.read_text().strip()


def _database(url: str) -> dict[str, object]:
    """Parse sqlite:////absolute/path?timeout=20 or postgresql://user:password@host:port/name?options for DATABASES."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path),
            "OPTIONS": {
                # DEFERRED loses transactions to "database is locked" as soon as two processes write.
                "transaction_mode": "IMMEDIATE",
                "timeout": float(dict(parse_qsl(parts.query)).get("timeout", 20)),
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA mmap_size=268435456;"
                " PRAGMA cache_size=-65536; PRAGMA foreign_keys=ON; PRAGMA temp_store=MEMORY;",
            },
            "CONN_MAX_AGE": None,
        }
    if parts.scheme in {"postgres", "postgresql"}:
        options: dict[str, object] = dict(parse_qsl(parts.query))
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": unquote(parts.path.lstrip("/")),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": unquote(parts.hostname or options.pop("host", "") or ""),  # type: ignore[arg-type]
            "PORT": str(parts.port or ""),
            "OPTIONS": options,
            "CONN_MAX_AGE": 60,
            "CONN_HEALTH_CHECKS": True,
        }
    raise SystemExit(f"DATABASE_URL {parts.scheme}:// is not supported: use sqlite:////absolute/path or postgresql://…")


def _email(url: str) -> dict[str, object]:
    """Return Django's mail settings from smtp://host:25, smtp+tls://user:password@host:587 or smtps://…:465."""
    parts = urlsplit(url)
    ports = {"smtp": 25, "smtp+tls": 587, "smtps": 465}
    if parts.scheme not in ports or not parts.hostname:
        raise SystemExit("EMAIL_URL is not valid: use smtp://, smtp+tls:// or smtps://, then user:password@host:port.")
    return {
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": parts.port or ports[parts.scheme],
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_TLS": parts.scheme == "smtp+tls",
        "EMAIL_USE_SSL": parts.scheme == "smtps",
    }


def _static_of(package: str) -> list[Path]:
    """Return the static files of a package that is not installed as an application, which every process would load."""
    spec = find_spec(package)
    return [Path(place) / "static" for place in (spec and spec.submodule_search_locations) or ()]


DATABASES = {"default": _database(env("DATABASE_URL", f"sqlite://{VIGIL_HOME / 'vigil.sqlite3'}"))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
REDIS_URL = env("REDIS_URL", f"unix://{VIGIL_HOME / 'redis' / 'redis.sock'}")

# Django
SECRET_KEY = _secret_key()
DEBUG = flag("VIGIL_DEBUG")
_public = urlsplit(VIGIL_PUBLIC_URL)
ON_LOOPBACK = _public.hostname in {"127.0.0.1", "localhost", "::1"}
ALLOWED_HOSTS = [h for h in env("ALLOWED_HOSTS").split(",") if h] or [
    "127.0.0.1", "localhost", "[::1]", *([_public.hostname] if _public.hostname else []),
]  # fmt: skip
ROOT_URLCONF = "console.urls"
ASGI_APPLICATION = "console.asgi.application"
AUTH_USER_MODEL = "portal.User"
INSTALLED_APPS = [
    # Neither autodiscovers admin modules: only the web process loads them, by console.urls.
    "unfold.apps.BasicAppConfig",
    "django.contrib.admin.apps.SimpleAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "axes",
    "csp",
    "channels",
    "portal",
    "nodes",
    "jobs",
    "console",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "portal.http.middleware.StaticFiles",
    "portal.http.client_address.remember",
    "portal.http.middleware.private",
    "portal.http.middleware.ContentSecurityPolicy",
    "portal.http.middleware.problem_documents",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "portal.http.middleware.Slashes",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "axes.middleware.AxesMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [installation.site_files("templates")],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.pages.context.context",
            ],
            "builtins": ["portal.templatetags.vigil"],
        },
    }
]
LANGUAGE_CODE = "en"
TIME_ZONE = env("TZ", "UTC")
USE_TZ = True
USE_I18N = False
FORMAT_MODULE_PATH = "console.site.formats"  # date formats of the admin

STATIC_URL = "/static/"
STATIC_ROOT = VIGIL_HOME / "static"
STATICFILES_DIRS = [installation.site_files("static"), *_static_of("ninja")]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "portal.http.staticfiles.Storage"},
}
WHITENOISE_USE_FINDERS = DEBUG
WHITENOISE_SKIP_COMPRESS_EXTENSIONS = ["gz", "jpg", "map", "png", "woff", "woff2"]

# Sign-in
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "home"
ACCOUNT_ADAPTER = "portal.accounts.actions.Adapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_FORMS = {
    "login": "portal.accounts.forms.LoginForm",
    "reauthenticate": "portal.accounts.forms.ReauthenticateForm",
    "change_password": "portal.accounts.forms.ChangePasswordForm",
}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGOUT_REDIRECT_URL = "account_login"
ACCOUNT_RATE_LIMITS = {"login": None, "login_failed": None}  # axes limits sign-in attempts: one mechanism, one message
AXES_FAILURE_LIMIT = 8
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_USERNAME_CALLABLE = "portal.accounts.actions.guessed_username"
AXES_LOCKOUT_CALLABLE = "portal.accounts.actions.locked_out"
AXES_VERBOSE = False
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

# Security
_tls = _public.scheme == "https"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = not ON_LOOPBACK
SESSION_COOKIE_HTTPONLY = CSRF_COOKIE_HTTPONLY = True  # scripts take the CSRF token from the page, not the cookie
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
CSRF_TRUSTED_ORIGINS = [f"{_public.scheme}://{_public.netloc}"]
SECURE_HSTS_SECONDS = 31_536_000 if _tls else 0
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
if flag("VIGIL_BEHIND_PROXY"):
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {  # a little wider for /admin: portal.http.middleware
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "font-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "connect-src": ["'self'"],
        "manifest-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    },
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2 * 1024 * 1024

# E-mail for notifications; without EMAIL_URL none is sent.
EMAIL_HOST = ""
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = SERVER_EMAIL = env("VIGIL_MAIL_FROM", f"Vigil <vigil@{_public.hostname or 'localhost'}>")
if _mail := env("EMAIL_URL"):
    globals().update(_email(_mail))

# Celery: short idempotent tasks; the database is the truth, a lost message only delays.
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # forever: by default a worker ends after a hundred attempts
# A request that queues a task while Redis is down must not wait for it (it took 6 s): the next tick does the work.
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 3600,
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.1,
    # How long a worker's blocking wait for a task lasts before it is repeated. A task ends it at once regardless.
    "polling_interval": 20,
    # A Redis that is stopped or unreachable accepts a command and never answers it: requests, ticks and workers would
    # wait forever. A worker's wait for its next task is not limited by this.
    "socket_timeout": 2.0,
    "socket_connect_timeout": 2.0,
}
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False  # costs a connection and code to load, for commands that nobody uses
CELERY_TASK_DEFAULT_QUEUE = "work"
CELERY_TASK_ROUTES = {
    **{f"jobs.tasks.{name}": {"queue": "follow"} for name in ("submit", "follow", "wake")},
    "jobs.tasks.tail": {"queue": "tail"},
    **{f"jobs.tasks.{name}": {"queue": "diagnose"} for name in ("diagnose", "replay")},
    "portal.tasks.send": {"queue": "send"},
    "nodes.tasks.pull": {"queue": "pull"},
    # A few queries each, and `work` may be verifying gigabytes.
    **{f"nodes.tasks.{name}": {"queue": "follow"} for name in ("alert", "judge")},
    # Nor may it wait for that; but at 1,000 nodes it takes 0.4 s, which the follower would miss.
    "nodes.tasks.health": {"queue": "diagnose"},
}
CELERY_TIMEZONE = "UTC"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env("VIGIL_LOG_LEVEL", "INFO")},
    "loggers": {
        "axes": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
        "django.request": {"level": "ERROR"},  # client errors were answered; only server errors are logged
        "django.security.DisallowedHost": {"level": "CRITICAL"},
        # Two lines per task would bury the one line per transition that is worth reading.
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
        "django.channels.server": {"level": "WARNING"},
    },
}

TESTING = "pytest" in sys.modules
if TESTING:  # a real hash takes a quarter of a second, a hundred times over
    PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    CELERY_BROKER_URL = "memory://"  # not consumed; waiting for a missing broker takes 6 s
UNFOLD = {"SITE_URL": "/"}  # all other settings of the admin's appearance: portal.records
