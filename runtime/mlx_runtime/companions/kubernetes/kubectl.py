"""Calls of kubectl, which knows the cluster and the user's credentials."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_runtime.errors import ClusterError

ANSWER_S = 60.0
"""Timeout of a call."""

MISSING = "install kubectl, or print the manifest with --dry-run, for whoever has it"


@dataclass(frozen=True)
class Kubectl:
    """kubectl with the options of a launch. Methods raise `ClusterError`."""

    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: str | None, namespace: str | None) -> "Kubectl":
        given = {"--context": context, "--namespace": namespace}
        return cls(tuple(f"{option}={value}" for option, value in given.items() if value))

    def run(self, *arguments: str, document: str | None = None) -> str:
        """Return the output of a call. Pass a manifest for `-f -` as `document`."""
        if (program := shutil.which("kubectl")) is None:
            error = ClusterError("there is no kubectl on the PATH")
            error.hint = MISSING
            raise error
        command = [program, *self.options, *arguments]
        try:
            done = subprocess.run(command, input=document, capture_output=True, text=True, timeout=ANSWER_S)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {arguments[0]} did not end within {ANSWER_S:.0f} s") from error
        if done.returncode:
            raise ClusterError(_reason(done.stderr))
        return done.stdout

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None if there is none."""
        found = self.run("get", kind, name, "--ignore-not-found", "--output=json")
        return dict(json.loads(found)) if found.strip() else None

    def keys_of_secret(self, name: str) -> list[str]:
        """Return the keys of a Secret. Its values do not reach this process."""
        template = "{{range $key, $value := .data}}{{$key}} {{end}}"
        return self.run("get", "secret", name, f"--output=go-template={template}").split()


def _reason(errors: str) -> str:
    """Return the last line of an error without the prefix of kubectl."""
    lines: Sequence[str] = [line for line in errors.splitlines() if line.strip()] or ["kubectl failed without a reason"]
    return lines[-1].removeprefix("error: ").removeprefix("Error from server ").strip()
