#!/bin/sh
# Check the image without a container engine: the compose file is valid, and the Dockerfile's install steps, run into a
# temporary prefix without torch, provide every role. Copies the tracked files that .dockerignore lets through, like
# `COPY . .`. `make test-image` builds the image itself.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
temporary=$(mktemp -d)
web=
trap 'test -z "$web" || kill "$web" 2>/dev/null || true; rm -rf "$temporary"' EXIT INT TERM
cd "$here"

sed -n 's/^!//p' .dockerignore | xargs git ls-files -z --cached -- docker/Dockerfile docker/compose.yaml docker/secrets.sh docker/nginx.conf | xargs -0 cp -P --parents -t "$temporary" 2>/dev/null || true
cd "$temporary"
sh docker/secrets.sh
if docker compose version >/dev/null 2>&1; then
    docker compose -f docker/compose.yaml config --quiet
elif command -v docker-compose >/dev/null 2>&1; then
    docker-compose -f docker/compose.yaml config --quiet
else
    echo "Neither 'docker compose' nor docker-compose is installed to validate docker/compose.yaml" >&2
    exit 1
fi
echo "compose file: valid"

# Run the same steps as the Dockerfile's RUN lines for the target `portal`, with this prefix instead of /opt/vigil.
grep -q 'VIGIL_TORCH=no sh docker/image.sh packages /opt/vigil' docker/Dockerfile
VIGIL_TORCH=no sh docker/image.sh packages "$temporary/opt"
grep -q 'RUN sh docker/image.sh code /opt/vigil' docker/Dockerfile
sh docker/image.sh code "$temporary/opt"
export PATH="$temporary/opt/bin:$PATH" VIGIL_HOME="$temporary/home" VIGIL_RUNS="$temporary/runs"
mkdir "$VIGIL_RUNS"
export VIGIL_HOST=127.0.0.1 REDIS_URL="unix://$temporary/none.sock"
VIGIL_PORT=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
export VIGIL_PORT
unset DATABASE_URL SECRET_KEY VIRTUAL_ENV || true

if python -c 'import torch' 2>/dev/null; then
    echo "torch is installed in an environment that was built without it" >&2
    exit 1
fi
docker/entrypoint.sh prepare | grep -q '^Sign in: '
docker/entrypoint.sh web &
web=$!
python - <<'PYTHON'
import os, time, httpx
url = f"http://127.0.0.1:{os.environ['VIGIL_PORT']}"
deadline = time.monotonic() + 30
while True:
    try:
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        page = httpx.get(f"{url}/", follow_redirects=True, trust_env=False)
        break
    except httpx.TransportError:
        assert time.monotonic() < deadline, "the web role does not answer"
        time.sleep(0.1)
assert page.status_code == 200 and "Vigil" in page.text, page.status_code
style = page.text.split('rel="stylesheet" href="')[1].split('"')[0]
assert httpx.get(url + style, trust_env=False).status_code == 200, style
PYTHON
docker/entrypoint.sh worker follow --help >/dev/null 2>worker.err
grep -q 'there is no torch in it' worker.err
docker/entrypoint.sh beat --help >/dev/null
docker/entrypoint.sh vigil --help >/dev/null
VIGIL_AGENT_STATE="$temporary/agent" docker/entrypoint.sh agent --once --json | grep -q '"load_1"'
if VIGIL_AGENT_URL='' docker/entrypoint.sh agent 2>agent.err; then
    echo "the agent starts without a portal to report to" >&2
    exit 1
fi
grep -q 'VIGIL_AGENT_URL is not set' agent.err
docker/entrypoint.sh manage check >/dev/null 2>&1
if docker/entrypoint.sh nonsense 2>/dev/null; then
    echo "the entrypoint accepts an unknown role" >&2
    exit 1
fi
echo "image: install steps and roles work without torch"
