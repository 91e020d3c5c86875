"""Run every service of docker/compose.yaml as the file describes it, on private volumes."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx

from tests.image import compose
from tests.image.compose import Service
from tests.image.container import Container, Furniture
from tests.image.network import Network
from tests.stack import REPOSITORY, free_port
from tests.waiting import until


class Site:
    """The whole site: `services` as written, `containers` as running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.services = compose.read({"VIGIL_PUBLISH": f"127.0.0.1:{self.port}", "VIGIL_PUBLIC_URL": self.url})
        self.containers: dict[str, Container] = {}
        self.network = Network(folder, list(self.services))
        self.docker = shutil.copytree(REPOSITORY / "docker", folder / "docker")
        subprocess.run(["sh", self.docker / "secrets.sh"], check=True)

    def start(self) -> None:
        """Start each service once its dependencies have reached the condition that the file requires."""
        for service in self.services.values():
            for other, condition in service.after.items():
                self.wait(other, condition)
            self.start_service(service)
        for service in self.services.values():
            if service.healthcheck:
                self.wait(service.name, "service_healthy")
        for name in self.running:
            assert self.containers[name].ended is None, f"{name} ended: {self.containers[name].output()}"

    @property
    def running(self) -> list[str]:
        """Return the services that keep running; the others exit when their work is done."""
        awaited = {
            other for service in self.services.values() for other, how in service.after.items() if "completed" in how
        }
        return [name for name in self.services if name not in awaited]

    def start_service(self, service: Service) -> None:
        container = self.containers.get(service.name)
        if container is None:
            container = self.containers[service.name] = Container(
                service.name, service.image, self.folder / f"{service.name}.log"
            )
        container.start(service.command, self._furniture(service, container))
        self.network.join(service.name, container.pid)
        container.go()
        for line in service.ports:
            on, _, port = line.rpartition(":")
            self.network.publish(service.name, int(port), on)

    def wait(self, name: str, condition: str) -> None:
        """Wait until a service has reached the condition that another one requires."""
        reading = {
            "service_started": lambda: True,
            "service_healthy": lambda: self._is_healthy(name),
            "service_completed_successfully": lambda: self.containers[name].ended is not None,
        }[condition]
        until(reading)
        if condition == "service_completed_successfully":
            assert self.containers[name].ended == 0, f"{name}: {self.containers[name].output()}"

    def _is_healthy(self, name: str) -> bool:
        container, check = self.containers[name], self.services[name].healthcheck
        assert check, f"{name} has no health check, and is waited for"
        assert container.ended is None, f"{name} ended with {container.ended}: {container.output()}"
        return container.run(*check).returncode == 0

    def _furniture(self, service: Service, container: Container) -> Furniture:
        secrets = [(str(self.docker / "secrets" / name), f"/run/secrets/{name}", True) for name in service.secrets]
        named = {place: source for source, place, _ in service.volumes}
        anonymous = [(f"{service.name}{place.replace('/', '-')}", place, False) for place in container.image.volumes]
        volumes = [*service.volumes, *(item for item in anonymous if item[1] not in named)]
        placed = [(self._source(source, container.root / place[1:]), place, ro) for source, place, ro in volumes]
        return Furniture(
            environment=service.environment,
            mounts=[(str(self.network.hosts), "/etc/hosts", True), *secrets, *placed],
            tmpfs=service.tmpfs,
            shm_size=service.shm_size.rstrip("b"),
            read_only=service.read_only,
            without_capabilities=service.without_capabilities,
        )

    def _source(self, source: str, place: Path) -> str:
        """Return a file next to the compose file, or a volume, which initially has the image's content at that path."""
        if source.startswith("."):
            return str(self.docker / source)
        volume = self.folder / "volumes" / source
        if not volume.exists():
            volume.parent.mkdir(exist_ok=True)
            subprocess.run(["cp", "--archive", place, volume], check=True)
        return str(volume)

    @property
    def token(self) -> str:
        """Return the first sysadmin's token, which `prepare` left in the home."""
        return str(tomllib.loads((self.folder / "volumes/home/cli.toml").read_text())["token"])

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    def output(self) -> str:
        return "\n".join(f"== {name}\n{container.output()[-3000:]}" for name, container in self.containers.items())

    def close(self) -> None:
        for container in self.containers.values():
            container.close()
        self.network.close()
