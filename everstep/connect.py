"""Where things are: the Temporal server, the ledger, the secrets, the state of ``everstep up``.

Each is looked up on its own, and the first place that names it wins: a flag, the environment, the
``up.json`` that a running ``everstep up`` keeps in its state directory, ``config/temporal.toml``
(the Temporal server only; the file is Temporal's own client configuration, so TLS and API keys are
written there). Every answer remembers where it came from, since "which server?" is the first
question when something does not answer.

Not here: opening connections (``everstep.client``) and starting anything (``workers.embedded``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import ConfigurationProblem

STATE_ENV = "EVERSTEP_STATE"
TEMPORAL_ENV = ("EVERSTEP_TEMPORAL_ADDRESS", "TEMPORAL_ADDRESS")
NAMESPACE_ENV = ("EVERSTEP_TEMPORAL_NAMESPACE", "TEMPORAL_NAMESPACE")
LEDGER_ENV = "EVERSTEP_LEDGER_URL"
SECRETS_ENV = "EVERSTEP_SECRETS_DIR"
UP_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A value and the place that named it."""

    value: str
    source: str

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFile:
    """What ``everstep up`` leaves in its state directory for other commands."""

    temporal: str
    namespace: str
    ui: str
    ledger: str
    secrets: str
    controllers: tuple[str, ...] = ()
    agents: dict[str, str] = field(default_factory=dict)
    pid: int | None = None
    """Process id while it runs; None after it ended in order."""

    def write(self, state: Path) -> None:
        """Replace the file at once, so that no reader sees half of it."""
        target = state / UP_FILE
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        scratch.replace(target)

    @classmethod
    def read(cls, state: Path) -> UpFile | None:
        """The state directory's file, or None where ``up`` has never run.

        Raises:
            ConfigurationProblem: the file is there and is not one that ``up`` wrote.
        """
        path = state / UP_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                temporal=_text(data, "temporal"),
                namespace=_text(data, "namespace"),
                ui=_text(data, "ui"),
                ledger=_text(data, "ledger"),
                secrets=_text(data, "secrets"),
                controllers=tuple(str(url) for url in data.get("controllers", ())),
                agents={str(k): str(v) for k, v in dict(data.get("agents", {})).items()},
                pid=data.get("pid") if isinstance(data.get("pid"), int) else None,
            )
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigurationProblem(
                f"{state}: the state directory is a file; name a directory with --state"
            ) from None
        except OSError as error:
            raise ConfigurationProblem(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationProblem(
                f"{path}: not a file that `everstep up` wrote ({error}); delete it, `everstep up` "
                f"writes it anew"
            ) from None

    @property
    def running(self) -> bool:
        """Whether the ``up`` that wrote the file still runs."""
        return self.pid is not None and Path(f"/proc/{self.pid}").exists()


def _text(data: Any, key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r}, not a text")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The answers. ``None`` where nobody named one; ``require_*`` turn that into a clear error."""

    state: Path
    state_source: str
    temporal: Found | None
    namespace: Found
    ledger: Found | None
    secrets: Found | None
    config_file: Path | None
    up: UpFile | None

    def require_ledger(self) -> str:
        """The ledger's URL.

        Raises:
            ConfigurationProblem: nobody named one.
        """
        if self.ledger is None:
            raise ConfigurationProblem(
                f"no ledger is known: start `everstep up`, or set {LEDGER_ENV} or --ledger to a "
                f"URL like sqlite:///… or postgresql://… (no {UP_FILE} in {self.state})"
            )
        return self.ledger.value

    def require_secrets(self) -> Path:
        """The directory of token files.

        Raises:
            ConfigurationProblem: nobody named one.
        """
        if self.secrets is None:
            raise ConfigurationProblem(
                f"no secrets directory is known: start `everstep up`, or set {SECRETS_ENV} "
                f"(no {UP_FILE} in {self.state})"
            )
        return Path(self.secrets.value)

    def describe_temporal(self) -> str:
        """The server's address with its source, for error lines."""
        if self.temporal is None:
            return "no address is known"
        hint = ""
        if self.up is not None and self.temporal.source.endswith(UP_FILE) and not self.up.running:
            hint = "; the `everstep up` that used it has ended"
        return f"{self.temporal.value}, from {self.temporal.source}{hint}"


def default_state(env: Mapping[str, str] | None = None) -> Path:
    """``everstep`` in the user's state directory (XDG)."""
    values = os.environ if env is None else env
    base = values.get("XDG_STATE_HOME", "")
    # The XDG specification wants relative values ignored.
    root = Path(base) if base.startswith("/") else Path(values.get("HOME") or "/") / ".local/state"
    return root / "everstep"


def config_file(name: str, env: Mapping[str, str] | None = None) -> Path | None:
    """The configuration file of that name, or None where there is none.

    Raises:
        SpecError: ``EVERSTEP_CONFIG`` is set and is not a directory.
    """
    from everstep.spec.load import find_config

    found = find_config(name, environ=os.environ if env is None else env)
    return found if found.is_file() else None


def find_places(
    *,
    state: str | Path | None = None,
    temporal: str | None = None,
    namespace: str | None = None,
    ledger: str | None = None,
    secrets: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Places:
    """Look everything up; arguments are the flags."""
    values = os.environ if env is None else env
    chosen, state_source = _state(state, values)
    up = UpFile.read(chosen)
    file = config_file("temporal.toml", values)
    up_source = str(chosen / UP_FILE)
    return Places(
        state=chosen,
        state_source=state_source,
        temporal=_first(
            _flag(temporal, "--temporal"),
            *(_env(values, key) for key in TEMPORAL_ENV),
            Found(up.temporal, up_source) if up else None,
            _from_toml(file, "address"),
        ),
        namespace=_first(
            _flag(namespace, "--namespace"),
            *(_env(values, key) for key in NAMESPACE_ENV),
            Found(up.namespace, up_source) if up else None,
            _from_toml(file, "namespace"),
        )
        or Found("default", "the default"),
        ledger=_first(
            _flag(ledger, "--ledger"),
            _env(values, LEDGER_ENV),
            Found(up.ledger, up_source) if up else None,
        ),
        secrets=_first(
            _flag(secrets, "--secrets"),
            _env(values, SECRETS_ENV),
            Found(up.secrets, up_source) if up else None,
        ),
        config_file=file,
        up=up,
    )


def _state(flag: str | Path | None, env: Mapping[str, str]) -> tuple[Path, str]:
    if flag:
        return Path(flag).expanduser().absolute(), "--state"
    if named := env.get(STATE_ENV):
        return Path(named).expanduser().absolute(), STATE_ENV
    return default_state(env), "the default"


def _flag(value: str | None, name: str) -> Found | None:
    return Found(value, name) if value else None


def _env(env: Mapping[str, str], name: str) -> Found | None:
    value = env.get(name)
    return Found(value, name) if value else None


def _first(*candidates: Found | None) -> Found | None:
    return next((found for found in candidates if found is not None), None)


def _from_toml(file: Path | None, key: str) -> Found | None:
    """A key of the profile that Temporal's own tools would use from this file."""
    if file is None:
        return None
    import tomllib

    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        profile = os.environ.get("TEMPORAL_PROFILE") or "default"
        value = data.get("profile", {}).get(profile, {}).get(key)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationProblem(f"{file}: cannot be read as TOML: {error}") from None
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigurationProblem(f"{file}: {key} is {value!r}; expected a text")
    return Found(value, str(file))
