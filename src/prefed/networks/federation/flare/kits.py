"""Kits: what each party of a federation gets, made by NVIDIA FLARE's provisioning.

A kit holds a certificate and its key, signed by the federation's own authority, and settings: where the hub
is, which classes a job may name, who may do what. Who has no kit takes no part. The authority's key stays in
the folder ``authority``; with it sites can be added later.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from prefed.config.errors import ConfigError, explain
from prefed.config.file import read_toml
from prefed.core import files
from prefed.core.strict_settings import StrictModel
from prefed.core.text import listed
from prefed.networks.federation.config import OWN_DATA, check_name
from prefed.networks.federation.flare.process import ALLOWED, REGISTRATION

AUTHORITY = "authority"
LASTING = ("name", "hub", "port", "valid_days")
"""Keys of a project file that are in certificates and kits, so that they last as long as these do."""
HEARTBEAT = 2.0
"""Seconds between a site's signs of life."""
NOBODY: Mapping[str, str] = {
    "submit_job": "none",
    "clone_job": "none",
    "manage_job": "none",
    "download_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
PERMISSIONS: Mapping[str, Any] = {
    "project_admin": NOBODY,
    "org_admin": {**NOBODY, "view": "o:site"},
    # The hub's own account. It opens sessions; it cannot read a site's files or run commands there.
    "lead": {**NOBODY, "submit_job": "any", "manage_job": "n:submitter", "view": "any"},
    "member": {**NOBODY, "view": "none"},
}
"""Who may do what, at the hub and at each site: roles of FLARE → rights."""

_RIGHTS = ("local/resources.json", "local/authorization.json")
WHOLE: Mapping[str, Sequence[str]] = {
    "server": ("fed_server.json", "rootCA.pem", "server.crt", "server.key"),
    "admin": ("fed_admin.json", "rootCA.pem", "client.crt", "client.key"),
    "site": ("fed_client.json", "rootCA.pem", "client.crt", "client.key"),
}
"""Party → the files in ``startup`` of its kit without which FLARE cannot start."""

README = "readme.txt"
SITE_README = """\
A site's kit. `prefed site site.toml` uses it: run nothing in it by hand. Its key is this site's alone.
"""
HUB_README = """\
Part of the hub's kit. `prefed federate` uses it: run nothing in it by hand. Its key is the hub's alone.
"""

SITE_FILE = """\
# What this site takes part with, and what it allows. `prefed site site.toml` starts it.
federation = {federation}
name = {name}

# Your own pairs: of an experiment's [data] {own}.
[data]
train = {{ {client} = "pairs.jsonl" }}     # one client of this name
# partition = {{ by = "column", column = "ward" }} # several clients: train = "pairs.jsonl" and this

[model]
name = "./model"            # folder of the base model that the hub names to you

[tell]
names = true                # false: the hub gets made-up names of clients
pairs = true                # how many pairs each client has; a merge weighs by it

[limits]
# methods = ["feddpo"]      # left out: all
# exchanges = ["train"]     # left out: all
rounds = 1000
minimum_cohort = 2
minimum_pairs = 0
# privacy = "local"         # runs must have noise, which is added here
evaluate = true
"""


_HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


class Project(StrictModel):
    """A federation, before it has kits."""

    name: str = Field(description="the federation's name")
    hub: str = Field(description="host name or IPv4 address at which sites reach the hub, without a port")
    port: int = Field(8002, ge=1, le=65535, description="the one port that sites must reach there")
    sites: list[str] = Field(min_length=1, description="names of the sites")
    valid_days: int = Field(
        360,
        ge=1,
        description="days for which the authority's certificate is valid; the hub's and the sites' are for "
        "360, and for no longer than that one",
    )
    message_mb: int = Field(4096, ge=1, description="MiB of the longest answer that the hub takes in")

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        return check_name(value)

    @field_validator("hub")
    @classmethod
    def _reached(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError(
                'a host name or an IPv4 address alone, e.g. "fed.example.org": the port is a key of its own, '
                "and a scheme or a path has no place here"
            )
        return value

    @field_validator("sites")
    @classmethod
    def _apart(cls, value: list[str]) -> list[str]:
        if dotted := [name for name in value if "." in check_name(name)]:
            raise ValueError(f"a site's name has no '.' in NVIDIA FLARE: call {dotted[0]!r} otherwise")
        taken = {"hub", "server", AUTHORITY}
        if len({check_name(name) for name in value} | taken) < len(value) + len(taken):
            raise ValueError(
                f"sites need different names, and none is called 'hub', 'server' or {AUTHORITY!r}"
            )
        return value

    @classmethod
    def load(cls, path: Path) -> Project:
        """Read a project file.

        Raises:
            ConfigError: it cannot be read, or names a key or a value that is not allowed.
        """
        tables = read_toml(path, "write one with name, hub and sites: docs/federation.md shows it")
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, tables, str(path), {})) from None


@dataclass(frozen=True)
class Kits:
    """The hub's kits.

    Attributes:
        federation: its name.
        sites: all that have kits.
        server: the folder of the server's kit.
        admin: the folder of the kit of the account that opens sessions.
        user: the name of that account.
        organisation: the hub's name as an organisation.
        message_mb: MiB of the longest message that the hub takes in.
    """

    federation: str
    sites: tuple[str, ...]
    server: Path
    admin: Path
    user: str
    organisation: str
    message_mb: int = 4096

    @classmethod
    def open(cls, folder: Path) -> Kits:
        """The kits in the hub's folder.

        Raises:
            FileNotFoundError: it holds none, or one of them lacks a file.
        """
        path = folder / "hub.json"
        try:
            fields = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder} holds no hub's kit: `prefed federation init PROJECT` makes one"
            ) from None
        sites = tuple(fields["sites"])
        folder = folder.resolve()
        server, admin = folder / "server", folder / "admin"
        check_whole(server, "server")
        check_whole(admin, "admin")
        most = fields.get("message_mb", cls.message_mb)
        return cls(fields["federation"], sites, server, admin, fields["user"], "hub", most)


def check_whole(kit: Path, party: str) -> None:
    """Refuse a kit without a file that FLARE would miss, or without which it would take its own defaults.

    Args:
        party: a key of :data:`WHOLE`.

    Raises:
        FileNotFoundError: a file is missing.
    """
    names = [f"startup/{name}" for name in WHOLE[party]] + ([] if party == "admin" else [*_RIGHTS])
    if missing := [name for name in names if not (kit / name).is_file()]:
        raise FileNotFoundError(
            f"{kit} is incomplete: missing {listed(missing, str)}; put a copy of the kit back"
        )


def settle(kit: Path) -> None:
    """Have the server keep its files in its kit, wherever that lies: FLARE asks for whole paths."""
    path, storage = kit / "local" / "resources.json", kit.resolve() / "storage"
    files.private_folder(storage)
    resources = json.loads(path.read_text("utf-8"))
    persistor = resources["snapshot_persistor"]["args"]["storage"]["args"]
    persistor["root_dir"] = str(storage / "snapshots")
    for each in resources["components"]:
        if each["id"] == "job_manager":
            each["args"]["uri_root"] = str(storage / "jobs")
    files.write(path, json.dumps(resources, indent=1).encode())


def make_kits(project: Project, out: Path) -> None:
    """Make the kits of all parties in ``out``, or those of sites that a project file has more than before.

    Each party gets a folder: ``hub`` and one for each site, with ``site.toml`` to be filled in.

    Raises:
        FileExistsError: ``out`` holds something else.
        ConfigError: the kits there were made with another value of one of :data:`LASTING`.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    if out.exists() and any(out.iterdir()) and not (out / AUTHORITY).is_dir():
        raise FileExistsError(f"{out} is not empty and holds no federation; choose another --out")
    _check_lasting(project, out)
    authority, user = out / AUTHORITY, "hub@federation.local"
    files.private_folder(authority)
    server = {"name": project.hub, "type": "server", "org": "hub", "fed_learn_port": project.port}
    sites = [{"name": name, "type": "client", "org": organisation_of(name)} for name in project.sites]
    admin = {"name": user, "type": "admin", "org": "hub", "role": "lead"}
    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=project.valid_days),
        SignatureBuilder(),
    ]
    described = {"api_version": 3, "name": project.name, "participants": [server, *sites, admin]}
    with redirect_stdout(StringIO()) as said:
        context = Provisioner(str(authority.resolve()), builders).provision(prepare_project(described))
    if context.get(CtxKey.BUILD_ERROR):
        raise OSError(f"NVIDIA FLARE could not make the kits:\n{said.getvalue()}")
    made = Path(context[CtxKey.CURRENT_PROD_DIR])
    _place(made / project.hub, out / "hub" / "server", HUB_README)
    _place(made / user, out / "hub" / "admin", HUB_README)
    about = {
        "federation": project.name,
        "sites": project.sites,
        "user": user,
        "message_mb": project.message_mb,
    }
    files.write(out / "hub" / "hub.json", json.dumps(about, indent=1).encode())
    for name in project.sites:
        _place(made / name, out / name / "kit", SITE_README)
        path = out / name / "site.toml"
        if not path.exists():
            words = {"federation": json.dumps(project.name), "name": json.dumps(name)}
            words |= {"client": json.dumps(name), "own": ", ".join(OWN_DATA)}
            path.write_text(SITE_FILE.format(**words), "utf-8")
    shutil.rmtree(made)


def address(startup: Path) -> tuple[str, str, int]:
    """The federation's name, and the host name and the port of its hub, as a kit has them.

    Args:
        startup: the kit's folder of that name, of the server or of a site.

    Raises:
        OSError, ValueError: it has none that can be read.
    """
    path = next(
        (path for path in (startup / "fed_server.json", startup / "fed_client.json") if path.exists()), None
    )
    if path is None:
        raise FileNotFoundError(f"{startup} has no fed_server.json or fed_client.json: put a copy back")
    try:
        server = json.loads(path.read_text("utf-8"))["servers"][0]
        host, _, port = server["service"]["target"].rpartition(":")
        return str(server["name"]), host, int(port)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; put a copy of it back") from error


def _check_lasting(project: Project, out: Path) -> None:
    """Refuse a project that kits which stay as they are would not follow."""
    made = _made_with(out)
    for key in LASTING:
        if key in made and made[key] != (now := getattr(project, key)):
            raise ConfigError(
                f"{key} = {now!r}: the kits in {out} were made with {made[key]!r}, and they stay as they "
                "are; put it back, or make all kits anew in another --out"
            )


def _made_with(out: Path) -> dict[str, Any]:
    """What of :data:`LASTING` the kits in ``out`` were made with; nothing where there are none."""
    from cryptography import x509

    found = [out / "hub" / "server" / "startup", *sorted(out.glob("*/kit/startup"))]
    startup = next((each for each in found if each.is_dir()), None)
    if startup is None:
        return {}
    name, hub, port = address(startup)
    authority = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    valid = authority.not_valid_after_utc - authority.not_valid_before_utc
    return {"name": name, "hub": hub, "port": port, "valid_days": valid.days}


def organisation_of(site: str) -> str:
    """A site's organisation: each site is its own, whose name has letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in site)


def _place(made: Path, kit: Path, readme: str) -> None:
    """Put a kit where its party finds it, with our settings. A kit that is there stays, with its key.

    Args:
        readme: what the kit says of itself, instead of FLARE's text, which says to run FLARE's scripts.
    """
    if kit.exists():
        return
    files.private_folder(kit.parent)
    shutil.copytree(made, kit)
    kit.chmod(0o700)
    (kit / "startup" / README).unlink(missing_ok=True)
    (kit / README).write_text(readme, "utf-8")
    local = kit / "local"
    resources = local / "resources.json.default"
    content = json.loads(resources.read_text("utf-8"))
    if "class_allow_list" in content:
        _restrict(content)
        files.write(local / "resources.json", json.dumps(content, indent=1).encode())
        text = json.dumps({"format_version": "1.0", "permissions": PERMISSIONS}, indent=1)
        files.write(local / "authorization.json", text.encode())


def _restrict(resources: dict[str, Any]) -> None:
    """Let jobs name our classes alone, keep files in the kit's folder, and send no log to the hub."""
    resources["class_allow_list"] = list(ALLOWED)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False
    components: Sequence[dict[str, Any]] = resources["components"]
    resources["components"] = [
        each for each in components if each["id"] not in ("site_log_streamer", "log_receiver")
    ]
    if "servers" in resources:
        resources["servers"][0]["heart_beat_timeout"] = 30
    else:
        resources["components"].append({"id": "registration", "path": REGISTRATION, "args": {}})
